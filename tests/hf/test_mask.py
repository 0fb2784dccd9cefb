"""Masks of routed layers, entry by entry against their definition."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mixdepth.hf.mask import real_tokens, routed_mask
from mixdepth.routes import Route


@st.composite
def steps(draw):
    """A route over new tokens, and keys at some columns of what was seen before and of the new ones."""
    num_rows, num_tokens, seen = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(0, 8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    chosen = torch.rand(num_rows, num_tokens, generator=generator) < 0.5
    weight = torch.ones(num_rows, num_tokens)
    num_slots = max(1, int(chosen.sum(1).max()))
    route = Route.choose(chosen, weight, weight, None, torch.ones_like(chosen), num_slots)
    stored = torch.cat([torch.rand(num_rows, seen, generator=generator) < 0.5, chosen], 1)
    num_keys = stored.sum(1)
    columns = (~stored).to(torch.uint8).argsort(dim=1, stable=True)[:, : max(1, int(num_keys.max()))]
    first = draw(st.integers(0, seen))  # a sliding window's mask does not reach back to the first column
    mask = torch.rand(num_rows, 1, num_tokens, seen + num_tokens - first, generator=generator) < 0.7
    return route, columns, num_keys, seen, num_tokens, mask, first


def definition(route, columns, num_keys, seen, allowed):
    """allowed(row, token, column) for every query and key; an unused slot sees the first key besides."""
    rows, num_slots = route.index.shape
    out = torch.zeros(rows, 1, num_slots, columns.shape[1], dtype=torch.bool)
    for row in range(rows):
        for slot in range(num_slots):
            for key in range(columns.shape[1]):
                token, column = route.index[row, slot].item(), columns[row, key].item()
                out[row, 0, slot, key] = key < num_keys[row] and allowed(row, token, column)
                if slot >= route.count[row] and key == 0:
                    out[row, 0, slot, key] = True
    return out


@given(steps())
def test_without_a_mask_a_token_sees_the_keys_up_to_its_own_column(step):
    route, columns, num_keys, seen, num_tokens, _, _ = step
    expected = definition(route, columns, num_keys, seen, lambda row, token, column: column <= seen + token)
    assert torch.equal(routed_mask(None, route, columns, num_keys, seen, num_tokens), expected)


@given(steps())
def test_a_mask_is_taken_at_the_columns_of_queries_and_keys(step):
    route, columns, num_keys, seen, num_tokens, mask, first = step

    def allowed(row, token, column):
        return column >= first and bool(mask[row, 0, token, column - first])

    expected = definition(route, columns, num_keys, seen, allowed)
    assert torch.equal(routed_mask(mask, route, columns, num_keys, seen, num_tokens), expected)
    low = torch.finfo(torch.float64).min
    additive = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, low)
    routed = routed_mask(additive, route, columns, num_keys, seen, num_tokens)
    assert torch.equal(routed, torch.zeros(routed.shape, dtype=torch.float64).masked_fill(~expected, low))


@given(steps())
def test_no_unused_slot_is_left_without_a_key(step):
    """Softmax over nothing is NaN in some kernels, and spoils the gradients of all keys."""
    route, columns, num_keys, seen, num_tokens, mask, _ = step
    routed = routed_mask(torch.zeros_like(mask), route, columns, num_keys, seen, num_tokens)
    assert routed[:, 0].any(-1)[~route.used].all()


@pytest.mark.parametrize("low", [-1e4, -1e9, torch.finfo(torch.float32).min, -torch.inf])
def test_a_token_that_may_not_see_itself_is_padding(low):
    mask = torch.ones(2, 1, 3, 5).tril(2).bool()  # three queries behind two cached tokens
    mask[0, :, :2] = False  # the first two queries
    mask[1, ..., :2] = False  # the cached tokens
    expected = torch.tensor([[False, False, True], [True, True, True]])
    assert torch.equal(real_tokens(mask, 3), expected)
    assert torch.equal(real_tokens(torch.zeros(2, 1, 3, 5).masked_fill(~mask, low), 3), expected)
    assert real_tokens(None, 3) is None
