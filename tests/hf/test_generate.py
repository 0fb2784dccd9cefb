"""generate(): every way of sampling, through the routed cache, with real skipping."""

import pytest
import torch
from tiny import NUM_LAYERS, decisions, dense, routed, token_ids
from transformers import DynamicCache, StaticCache, pipeline
from variants import ALL_VARIANTS

import mixdepth
from mixdepth.hf.cache import RoutedCacheLayer
from mixdepth.hf.layer import RoutedLayer

SETTINGS = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
SLIDING = "mistral"  # every layer has a window, shorter than the sequences here


@pytest.fixture(params=["llama", SLIDING, "gpt2", "gpt_neox"])
def model(request):
    return routed(request.param)


ANY = [
    *((architecture, "default") for architecture in ("llama", SLIDING, "gpt2", "gpt_neox")),
    *((SLIDING, name) for name in ("threshold", "token_choice", "early_exit", "random", "attention", "mlp")),
    *(("mixtral", name) for name in ("staged-expert_choice", "integrated")),
]


@pytest.fixture(params=ANY, ids=lambda pair: "-".join(pair))
def any_model(request):
    architecture, variant = request.param
    return routed(architecture, **ALL_VARIANTS[variant])


def left_padded():
    ids = token_ids(3, 14)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    mask[1, :2] = 0
    return ids, mask


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 3},
        {"do_sample": True, "num_return_sequences": 2, "temperature": 1.3},
        {"do_sample": True, "num_beams": 2},
        {"num_beams": 2, "max_new_tokens": 40},  # over the sliding window several times
    ],
    ids=["beams", "returned beams", "sampling", "sampled beams", "long"],
)
def test_every_way_of_sampling_equals_recomputation_without_a_cache(any_model, settings):
    ids, mask = left_padded()
    results = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        results.append(any_model.generate(ids, attention_mask=mask, use_cache=use_cache, **{**SETTINGS, **settings}))
    assert torch.equal(*results)


@pytest.mark.parametrize("chunk", [1, 3, 5])
def test_prefill_in_chunks_gives_the_same_tokens(any_model, chunk):
    ids, mask = left_padded()
    expected = any_model.generate(ids, attention_mask=mask, **SETTINGS)
    assert torch.equal(any_model.generate(ids, attention_mask=mask, prefill_chunk_size=chunk, **SETTINGS), expected)


def test_prompt_lookup_gives_the_same_tokens(any_model):
    ids = token_ids(1, 6).repeat(1, 4)  # repetitive, so that candidates are found, kept and dropped
    settings = {**SETTINGS, "max_new_tokens": 30}
    assert torch.equal(
        any_model.generate(ids, prompt_lookup_num_tokens=4, **settings), any_model.generate(ids, **settings)
    )


@pytest.mark.parametrize("assistant", ["dense", "routed"])
def test_assisted_decoding_gives_the_same_tokens(any_model, assistant):
    ids = token_ids(1, 14)
    helper = dense("llama", torch.float64, seed=5) if assistant == "dense" else routed("llama", seed=5)
    settings = {**SETTINGS, "max_new_tokens": 30}
    assert torch.equal(any_model.generate(ids, assistant_model=helper, **settings), any_model.generate(ids, **settings))


def test_a_routed_assistant_equal_to_the_model_is_believed(model):
    """Candidates that all hold: the cache is cropped by nothing, and both caches agree throughout."""
    ids = token_ids(1, 14)
    assert torch.equal(model.generate(ids, assistant_model=model, **SETTINGS), model.generate(ids, **SETTINGS))


def test_generation_continues_from_a_returned_cache(any_model):
    ids, mask = left_padded()
    whole = any_model.generate(ids, attention_mask=mask, **{**SETTINGS, "max_new_tokens": 20})
    first = any_model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **SETTINGS)
    longer = torch.cat([mask, torch.ones(3, 12, dtype=mask.dtype)], 1)
    settings = {**SETTINGS, "max_new_tokens": 8}
    again = any_model.generate(
        first.sequences, attention_mask=longer, past_key_values=first.past_key_values, **settings
    )
    assert torch.equal(again, whole)


def test_prompt_lookup_continues_from_a_returned_cache_that_has_dropped_tokens():
    """Behind a sliding window; without one transformers feeds the cached tokens again, dense models too."""
    model = routed(SLIDING)
    ids = token_ids(1, 6).repeat(1, 4)
    first = model.generate(ids, return_dict_in_generate=True, **SETTINGS)
    settings = {**SETTINGS, "max_new_tokens": 20}
    expected = model.generate(first.sequences, **settings)
    cache = first.past_key_values
    again = model.generate(first.sequences, past_key_values=cache, prompt_lookup_num_tokens=3, **settings)
    assert torch.equal(again, expected)


def test_generation_starts_from_embeddings_too(model):
    ids, mask = left_padded()
    expected = model.generate(ids, attention_mask=mask, **SETTINGS)[:, ids.shape[1] :]
    embeddings = model.get_input_embeddings()(ids)
    assert torch.equal(model.generate(inputs_embeds=embeddings, attention_mask=mask, **SETTINGS), expected)


def test_generation_is_causal_in_training_mode_too(any_model):
    ids, mask = left_padded()
    expected = any_model.generate(ids, attention_mask=mask, **SETTINGS)
    any_model.train()
    assert torch.equal(any_model.generate(ids, attention_mask=mask, **SETTINGS), expected)
    with mixdepth.lookahead(any_model):
        assert torch.equal(any_model.generate(ids, attention_mask=mask, **SETTINGS), expected)
    assert any_model.training


def test_a_cache_made_by_hand_is_put_right_on_first_use(model):
    ids, _ = left_padded()
    expected = model.generate(ids, **SETTINGS)
    assert torch.equal(model.generate(ids, past_key_values=DynamicCache(config=model.config), **SETTINGS), expected)
    assert torch.equal(model.generate(ids, past_key_values=DynamicCache(), **SETTINGS), expected)


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
