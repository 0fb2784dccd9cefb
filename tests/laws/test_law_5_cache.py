"""Law 5: Any way through the cache gives the logits of one causal pass."""

import torch
from tiny import decisions, token_ids
from variants import assert_close, every_case, left_padded, shared


@every_case
def test_any_split_of_a_sequence_gives_the_logits_of_one_pass(architecture, variant):
    model, tolerance = shared(architecture, variant)
    ids, mask = left_padded()
    decisions(model, ids, attention_mask=mask)
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    whole = model(ids, attention_mask=mask, position_ids=position_ids).logits
    for lengths in ([9, 4, *[1] * 7], [1] * 20, [13, 7]):
        cache, start, logits = None, 0, []
        for end in torch.tensor(lengths).cumsum(0).tolist():
            inputs = {"attention_mask": mask[:, :end], "position_ids": position_ids[:, start:end]}
            out = model(ids[:, start:end], past_key_values=cache, use_cache=True, **inputs)
            cache, start = out.past_key_values, end
            logits.append(out.logits)
        assert_close(torch.cat(logits, 1)[mask == 1], whole[mask == 1], tolerance)
        assert cache.get_seq_length() == 20


@every_case
def test_rows_that_chose_different_numbers_of_tokens_step_by_step_give_the_logits_of_one_pass(architecture, variant):
    model, tolerance = shared(architecture, variant)
    ids = token_ids(4)
    routes = decisions(model, ids)
    if routes and model.depth_config.scheme not in ("random", "soft"):  # those choose the same in every row
        assert any(route.count.unique().numel() > 1 for route in routes)
    whole = model(ids).logits
    cache, logits = None, []
    for step in ids.split([1] * 10 + [2] * 5, dim=1):  # and no mask: no row is padded
        out = model(step, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits)
    assert_close(torch.cat(logits, 1), whole, tolerance)


@every_case
def test_batched_generation_equals_recomputation_without_a_cache(architecture, variant):
    model, _ = shared(architecture, variant)
    ids, mask = left_padded()
    settings = {
        "attention_mask": mask,
        "max_new_tokens": 10,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    with_cache = model.generate(ids, **settings)
    assert torch.equal(with_cache, model.generate(ids, **settings, use_cache=False))
    assert with_cache.shape == (2, 30)
