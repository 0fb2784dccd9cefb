"""Law 5: any way through the cache gives the logits of one causal pass.

So `generate()` gives with the cache the tokens that it gives without one.
"""

import pytest
import torch
from tiny import decisions, dense, routed, token_ids
from transformers import DynamicCache
from variants import ALL_VARIANTS, assert_close, every_cache_case, every_case, left_padded, shared

import mixdepth

SETTINGS = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
SLIDING = "mistral"  # every layer has a window, shorter than the sequences here
ARCHITECTURES = ("llama", SLIDING, "gpt2", "gpt_neox")
SLIDING_VARIANTS = ("threshold", "token_choice", "early_exit", "random", "attention", "mlp")
EXPERT_VARIANTS = ("staged-expert_choice", "integrated")
GENERATING = [(architecture, "default") for architecture in ARCHITECTURES]
GENERATING += [(SLIDING, variant) for variant in SLIDING_VARIANTS]
GENERATING += [("mixtral", variant) for variant in EXPERT_VARIANTS]


def logits_in_steps(model, ids, lengths, mask=None):
    """Feed ids (B, T) in steps of these lengths through a cache; return the logits (B, T, V) and the cache."""
    start = 0
    cache = None
    logits = []
    for length in lengths:
        end = start + length
        inputs = {}
        if mask is not None:
            position_ids = (mask.cumsum(1) - 1).clamp(min=0)  # (B, T)
            inputs = {"attention_mask": mask[:, :end], "position_ids": position_ids[:, start:end]}
        out = model(ids[:, start:end], past_key_values=cache, use_cache=True, **inputs)
        logits.append(out.logits)
        cache = out.past_key_values
        start = end
    return torch.cat(logits, 1), cache


# ------------------------------------------------------------------------------------------------- logits


@every_case
def test_any_split_of_a_sequence_gives_the_logits_of_one_pass(architecture, variant):
    model, tolerance = shared(architecture, variant)
    ids, mask = left_padded()
    decisions(model, ids, attention_mask=mask)
    expected, _ = logits_in_steps(model, ids, [20], mask)
    for lengths in ([9, 4, 1, 1, 1, 1, 1, 1, 1], [1] * 20, [13, 7]):
        logits, cache = logits_in_steps(model, ids, lengths, mask)
        assert_close(logits[mask == 1], expected[mask == 1], tolerance)
        assert cache.get_seq_length() == 20


@every_cache_case
def test_rows_that_chose_different_numbers_of_tokens_give_the_logits_of_one_pass(architecture, variant):
    """No row is padded, so that the model gives its layers no mask."""
    model, tolerance = shared(architecture, variant)
    ids = token_ids(4)
    routes = decisions(model, ids)
    rows_choose_the_same = model.depth_config.scheme in ("random", "soft")
    if routes and not rows_choose_the_same:
        assert any(route.count.unique().numel() > 1 for route in routes)
    logits, _ = logits_in_steps(model, ids, [1] * 10 + [2] * 5)
    assert_close(logits, model(ids).logits, tolerance)


# ------------------------------------------------------------------------------------------------- generate()


@every_case
def test_batched_generation_equals_recomputation_without_a_cache(architecture, variant):
    model, _ = shared(architecture, variant)
    ids, mask = left_padded()
    settings = {**SETTINGS, "attention_mask": mask, "max_new_tokens": 10}
    with_cache = model.generate(ids, **settings)
    assert torch.equal(with_cache, model.generate(ids, **settings, use_cache=False))
    assert with_cache.shape == (2, 30)


@pytest.fixture(params=ARCHITECTURES)
def model(request):
    return routed(request.param)


@pytest.fixture(params=GENERATING, ids=lambda pair: "-".join(pair))
def any_model(request):
    architecture, variant = request.param
    return routed(architecture, **ALL_VARIANTS[variant])


def three_rows():
    """Three rows of token ids, two of them with padding on the left, and their attention mask."""
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
    ids, mask = three_rows()
    results = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        results.append(any_model.generate(ids, attention_mask=mask, use_cache=use_cache, **{**SETTINGS, **settings}))
    assert torch.equal(*results)


@pytest.mark.parametrize("chunk", [1, 3, 5])
def test_prefill_in_chunks_gives_the_same_tokens(any_model, chunk):
    ids, mask = three_rows()
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
    ids, mask = three_rows()
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
    ids, mask = three_rows()
    expected = model.generate(ids, attention_mask=mask, **SETTINGS)[:, ids.shape[1] :]
    embeddings = model.get_input_embeddings()(ids)
    assert torch.equal(model.generate(inputs_embeds=embeddings, attention_mask=mask, **SETTINGS), expected)


def test_generation_is_causal_in_training_mode_too(any_model):
    ids, mask = three_rows()
    expected = any_model.generate(ids, attention_mask=mask, **SETTINGS)
    any_model.train()
    assert torch.equal(any_model.generate(ids, attention_mask=mask, **SETTINGS), expected)
    with mixdepth.lookahead(any_model):
        assert torch.equal(any_model.generate(ids, attention_mask=mask, **SETTINGS), expected)
    assert any_model.training


def test_a_cache_made_by_hand_is_put_right_on_first_use(model):
    ids, _ = three_rows()
    expected = model.generate(ids, **SETTINGS)
    assert torch.equal(model.generate(ids, past_key_values=DynamicCache(config=model.config), **SETTINGS), expected)
    assert torch.equal(model.generate(ids, past_key_values=DynamicCache(), **SETTINGS), expected)
