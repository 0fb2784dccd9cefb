"""Decoding with the routed cache: what runs and what is stored, and the caches that are refused.

What decoding computes is law 5.
"""

import pytest
import torch
from tiny import NUM_LAYERS, decisions, dense, routed, token_ids
from transformers import StaticCache, pipeline

import mixdepth
from mixdepth.hf.cache import RoutedCacheLayer
from mixdepth.hf.layer import RoutedLayer

SETTINGS = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
SLIDING = "mistral"  # every layer has a window, shorter than the sequences here


@pytest.fixture(params=["llama", SLIDING, "gpt2", "gpt_neox"])
def model(request):
    return routed(request.param)


def left_padded():
    ids = token_ids(3, 14)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    mask[1, :2] = 0
    return ids, mask


def test_decoding_runs_a_block_for_the_rows_that_chose_it_and_for_no_others(model):
    """Counted at each block's MLP, and compared with the choice of one pass without a cache."""
    ids = token_ids(3, 25)
    masks = [route.mask for route in decisions(model, ids)]
    tokens: dict[int, list[int]] = {}
    for layer in model.modules():
        if isinstance(layer, RoutedLayer):
            index = layer.depth_index
            layer.mlp.register_forward_pre_hook(
                lambda mlp, args, index=index: tokens.setdefault(index, []).append(args[0].shape[:-1].numel())
            )
    cache = model(ids[:, :10], use_cache=True).past_key_values
    slots = {index: counts[0] if counts else 0 for index, counts in tokens.items()}
    for index, mask in zip(model.depth_config.routed_layers(NUM_LAYERS), masks, strict=True):
        chosen = mask[:, :10].sum(1)
        assert slots.get(index, 0) == chosen.max() * (chosen > 0).sum()  # as many slots as the fullest row needs
    steps_without_work = 0
    for step in range(10, 25):
        tokens.clear()
        model(ids[:, step : step + 1], past_key_values=cache)
        for index, mask in zip(model.depth_config.routed_layers(NUM_LAYERS), masks, strict=True):
            rows = int(mask[:, step].sum())
            assert tokens.get(index, []) == ([rows] if rows else [])
            steps_without_work += rows == 0
    assert steps_without_work > 0


def test_training_forwards_build_no_cache(model):
    ids, _ = left_padded()
    assert model.config.use_cache
    assert model.train()(ids).past_key_values is None
    assert model.eval()(ids).past_key_values is not None


def test_the_cache_is_smaller_by_what_was_skipped():
    model = routed("llama", capacity=0.125)
    ids = token_ids(2, 60)
    routes = decisions(model, ids)
    cache = model(ids, use_cache=True).past_key_values
    per_token = cache.layers[1].keys[0, :, 0].numel() * 8 * 2
    for layer, route in zip((cache.layers[i] for i in (0, 2, 3)), routes, strict=True):
        assert isinstance(layer, RoutedCacheLayer)
        assert layer.num_bytes() == route.count.sum() * per_token
        assert layer.keys.shape[2] == route.count.max()  # a prompt is stored without slack


@pytest.mark.parametrize("name", ["static", "offloaded", "offloaded_static", "quantized"])
def test_caches_that_cannot_be_ragged_are_refused_by_name(model, name):
    with pytest.raises(ValueError, match=f"'{name}' cannot: use the default cache"):
        model.generate(token_ids(), cache_implementation=name, **SETTINGS)


def test_a_static_cache_object_and_continuous_batching_are_refused(model):
    with pytest.raises(ValueError, match="'StaticCache' cannot: use the default cache"):
        model(token_ids(), past_key_values=StaticCache(config=model.config, max_cache_len=32))
    with pytest.raises(ValueError, match="'continuous batching' cannot"):
        model.generate_batch([[5, 6, 7]])


def test_a_cache_that_a_dense_model_filled_is_refused():
    ids = token_ids()
    cache = dense("llama", torch.float64)(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="filled by a model that is not routed"):
        routed("llama")(ids, past_key_values=cache)


def test_top_k_with_a_cache_is_refused():
    model = routed("llama")
    ids = token_ids()
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="takes whole sequences and no past_key_values"):
        model.train()(ids, past_key_values=cache)


def test_a_text_generation_pipeline_works(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(58))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", padding_side="left")
    routed("llama", torch.float32).save_pretrained(tmp_path)
    fast.save_pretrained(tmp_path)
    generator = pipeline("text-generation", model=str(tmp_path))
    assert isinstance(generator.model, mixdepth.hf.RoutedCausalLM)
    outputs = generator(["w1 w2 w3", "w4"], batch_size=2, max_new_tokens=5, do_sample=False)
    assert [out[0]["generated_text"].startswith(start) for out, start in zip(outputs, ("w1 w2 w3", "w4"), strict=True)]
