"""Properties of Route and of the top-k choice, over random masks and scores."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mixdepth.routes import Route, edge, top_k


@st.composite
def routes(draw):
    """A route over a random choice, with the choice it was made from."""
    batch_size, num_tokens = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    chosen = torch.rand(batch_size, num_tokens, generator=generator) < draw(st.floats(0, 1))
    num_slots = draw(st.integers(max(1, int(chosen.sum(1).max())), num_tokens))
    weight = torch.randn(batch_size, num_tokens, generator=generator)
    real = chosen | (torch.rand(batch_size, num_tokens, generator=generator) < 0.5)
    return Route.choose(chosen, weight, weight, None, real, num_slots), chosen, weight


@given(routes())
def test_the_route_holds_the_chosen_tokens_first_in_stream_order(drawn):
    route, chosen, weight = drawn
    for row in range(len(chosen)):
        tokens = chosen[row].nonzero()[:, 0].tolist()
        assert route.index[row, : route.count[row]].tolist() == tokens
        assert route.weight[row, : route.count[row]].tolist() == weight[row, tokens].tolist()
        assert not route.weight[row, route.count[row] :].any()
        assert len(set(route.index[row].tolist())) == route.index.shape[1]
    assert torch.equal(route.mask, chosen)


@given(routes())
def test_blending_moves_chosen_tokens_by_their_weight_and_leaves_the_others_to_the_bit(drawn):
    route, chosen, weight = drawn
    x, y = torch.randn(*chosen.shape, 5), torch.randn(*route.index.shape, 5)
    out = route.blend(x, y)
    assert torch.equal(out[~chosen], x[~chosen])
    for row in range(len(chosen)):
        for slot, token in enumerate(chosen[row].nonzero()[:, 0].tolist()):
            expected = x[row, token] + weight[row, token] * (y[row, slot] - x[row, token])
            torch.testing.assert_close(out[row, token], expected)


@given(routes())
def test_blending_at_weight_one_is_the_block_and_at_weight_zero_the_stream_to_the_bit(drawn):
    route, chosen, _ = drawn
    x, y = torch.randn(*chosen.shape, 5), torch.randn(*route.index.shape, 5)
    whole = route.with_weight(torch.ones_like(route.weight)).blend(x, y)
    assert torch.equal(route.gather(whole)[route.used], y[route.used])
    assert torch.equal(whole[~chosen], x[~chosen])  # an unused slot moves nothing, whatever its weight
    assert torch.equal(route.with_weight(torch.zeros_like(route.weight)).blend(x, y), x)


@given(routes())
def test_gathering_takes_each_slots_token_along_any_axis_and_from_a_shared_row(drawn):
    route, chosen, _ = drawn
    batch_size, num_tokens = chosen.shape
    x = torch.randn(batch_size, 3, num_tokens, 2)
    shared = torch.randn(1, num_tokens)
    for row, index in enumerate(route.index):
        assert torch.equal(route.gather(x, 2)[row], x[row][:, index])
        assert torch.equal(route.gather(shared)[row], shared[0, index])


@given(routes(), st.data())
def test_selecting_rows_keeps_them_as_they_were(drawn, data):
    route, chosen, _ = drawn
    rows = data.draw(st.lists(st.integers(0, len(chosen) - 1), min_size=1, unique=True))
    selected = route.select(rows)
    assert torch.equal(selected.mask, chosen[rows])
    assert torch.equal(selected.index, route.index[rows])
    assert selected.predictor_logits is None


@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 12), st.integers(1, 4))
@settings(max_examples=200)
def test_top_k_takes_exactly_k_of_the_best_and_the_earlier_of_equals(seed, batch_size, num_tokens, num_values):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(num_values, (batch_size, num_tokens), generator=generator).float()  # many ties
    k = torch.randint(num_tokens + 1, (batch_size,), generator=generator)
    chosen = top_k(scores, k)
    for row in range(batch_size):
        ranking = sorted(range(num_tokens), key=lambda token: (-scores[row, token], token))
        assert chosen[row].nonzero()[:, 0].tolist() == sorted(ranking[: k[row]])


def test_the_edge_of_a_choice_is_halfway_between_the_worst_chosen_and_the_best_other_candidate():
    scores = torch.tensor([[5.0, 1.0, 2.0, 9.0]])
    chosen = torch.tensor([[True, False, False, False]])
    candidates = torch.tensor([[True, True, True, False]])  # the best score of all is no candidate's
    assert edge(scores, chosen, candidates).tolist() == [3.5]


def test_the_edge_of_a_choice_of_all_candidates_lies_just_below_the_worst_of_them():
    scores = torch.tensor([[5.0, 1.0, 2.0, 9.0]])
    candidates = torch.tensor([[True, True, True, False]])
    (found,) = edge(scores, candidates, candidates).tolist()
    assert 1 - 1e-6 < found < 1


@pytest.mark.parametrize("score", [torch.inf, -torch.inf, torch.nan])
def test_a_score_that_is_not_finite_gives_an_unused_slot_the_weight_zero(score):
    chosen = torch.tensor([[True, False, False], [True, True, True]])
    weight = torch.tensor([[2.0, score, score], [3.0, 4.0, 5.0]])
    route = Route.choose(chosen, weight, weight, None, torch.ones_like(chosen), num_slots=3)
    assert route.weight.tolist() == [[2, 0, 0], [3, 4, 5]]


def test_the_realised_capacity_counts_real_tokens_only():
    chosen = torch.tensor([[True, False, False, False], [True, True, False, False]])
    real = torch.tensor([[True, True, False, False], [True, True, True, True]])
    weight = torch.ones(2, 4)
    assert Route.choose(chosen, weight, weight, None, real, 2).capacity == 0.5
