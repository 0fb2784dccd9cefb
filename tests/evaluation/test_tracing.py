"""A trace says what the model does."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from tiny import dense, routed, token_ids
from variants import VARIANTS

import mixdepth
from mixdepth.data.tokenizers import byte_tokenizer
from mixdepth.evaluation.held_out import evaluate
from mixdepth.evaluation.intervals import rank_correlation
from mixdepth.evaluation.tracing import MAX_TOKENS, token_types, trace_tokens

BYTES = byte_tokenizer()


def bits(rows):
    return torch.tensor([[int(digit) for digit in row] for row in rows]).bool()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_trace_holds_the_routes_and_losses_of_the_model_window_by_window(variant):
    model = routed(dtype=torch.float32, **VARIANTS[variant])
    ids = token_ids(1, 50)[0]
    found = trace_tokens(model, ids.tolist(), BYTES, context=20)
    assert found.layers == list(model.deciding_layers)
    for kind, passed in (("causal", found.causal), ("lookahead", found.lookahead)):
        for window, place in ((ids[:20], slice(0, 20)), (ids[20:40], slice(20, 40)), (ids[40:], slice(40, 50))):
            with mixdepth.lookahead(model) if kind == "lookahead" else torch.no_grad():
                out = model(window[None], output_routes=True)
            assert torch.equal(bits(passed.chosen)[:, place], torch.stack([route.mask[0] for route in out.routes]))
            for row, route in zip(passed.scores, out.routes, strict=True):
                assert row[place] == pytest.approx(route.logits[0].tolist(), rel=1e-3)
            for row, route in zip(passed.gates, out.routes, strict=True):
                chosen, weights = route.index[0][route.used[0]], route.weight[0][route.used[0]]
                assert [row[place][t] for t in chosen] == pytest.approx(weights.tolist(), rel=1e-3)
            losses = F.cross_entropy(out.logits[0, :-1].float(), window[1:], reduction="none")
            assert passed.surprise[place][0] is None
            assert passed.surprise[place][1:] == pytest.approx(losses.tolist(), rel=1e-3)
            entropies = torch.distributions.Categorical(logits=out.logits[0].float()).entropy()
            assert passed.entropy[place] == pytest.approx(entropies.tolist(), rel=1e-3)
    json.dumps(found.to_dict(), allow_nan=False)


def test_its_numbers_are_those_of_an_evaluation_of_the_same_windows():
    model = routed(dtype=torch.float32)
    ids = token_ids(3, 20)
    whole = evaluate(model, [ids])
    found = trace_tokens(model, ids.flatten().tolist(), BYTES, context=20)
    assert found.causal.loss == pytest.approx(whole.loss, rel=1e-5)
    assert found.lookahead.loss == pytest.approx(whole.lookahead_loss, rel=1e-5)
    for layer, (index, expected) in zip(found.causal.layers, whole.layers.items(), strict=True):
        assert layer == pytest.approx(expected), index
    assert all(row.count("1") == 3 * 8 for row in found.lookahead.chosen)  # exactly k of each window
    assert found.lookahead.chosen == found.lookahead.best


def test_the_model_stays_as_it_was_and_what_has_no_routes_is_refused():
    model = routed(dtype=torch.float32).train()
    trace_tokens(model, [40, 41, 42], BYTES)
    assert model.training
    assert not any(router.forced_lookahead for router in model.depth_routers)
    with pytest.raises(ValueError, match="has no routed layers"):
        trace_tokens(dense(), [40], BYTES, name="m")
    with pytest.raises(ValueError, match="there is no text to route"):
        trace_tokens(model, [], BYTES)
    with pytest.raises(ValueError, match="context must be a whole number of at least 2, not 1"):
        mixdepth.trace(model, "!!", tokenizer=BYTES, context=1)


def test_a_long_text_is_cut_and_says_so():
    model = routed(dtype=torch.float32)
    found = trace_tokens(model, [40] * (MAX_TOKENS + 1), BYTES, context=512)
    assert len(found.tokens) == MAX_TOKENS
    assert found.note == "the first 4,096 of 4,097 tokens"
    assert found.causal.correlation is None or -1 <= found.causal.correlation.mean <= 1


def test_a_model_that_is_given_as_an_object_needs_tokenizer_and_text_and_text_must_be_utf8():
    model = routed(dtype=torch.float32)
    for incomplete in ({"text": "!!"}, {"tokenizer": BYTES}):
        with pytest.raises(ValueError, match="needs its tokenizer and a text too"):
            mixdepth.trace(model, **incomplete)
    with pytest.raises(ValueError, match="cannot be written in UTF-8"):
        mixdepth.trace(model, "a\udcffb", tokenizer=BYTES)
    with pytest.raises(ValueError, match="context=10000 is beyond the model's"):
        mixdepth.trace(model, "!!", tokenizer=BYTES, context=10000)


def test_token_choice_makes_no_error_since_training_and_sampling_choose_the_same_way():
    model = routed(dtype=torch.float32, scheme="token_choice", capacity=0.99)
    found = trace_tokens(model, token_ids(1, 50)[0].tolist(), BYTES, context=20)
    assert found.causal.chosen == found.causal.best
    assert all(layer.precision == layer.recall == 1 for layer in found.causal.layers)


def test_one_token_can_be_traced():
    found = trace_tokens(routed(dtype=torch.float32), [40], BYTES)
    assert found.causal.surprise == [None]
    assert found.causal.loss is None


def test_the_rank_correlation_is_spearmans_with_an_interval_around_it():
    generator = np.random.default_rng(0)
    x = generator.integers(4, size=2000)
    y = x + generator.normal(size=2000) * 3
    found = rank_correlation(x, y)
    assert found.mean == pytest.approx(spearmanr(x, y).statistic)
    assert found.low < found.mean < found.high
    assert found.high - found.low == pytest.approx(4 / np.sqrt(2000), rel=0.3)  # what independent tokens would have
    assert rank_correlation(np.ones(2000), y) is None
    rare = rank_correlation(np.arange(400) == 7, generator.normal(size=400))  # one token is no evidence of anything
    assert rare.low is None
    repeated = rank_correlation(x.repeat(16), y.repeat(16))  # equal neighbours are no new evidence
    assert repeated.high - repeated.low == pytest.approx(found.high - found.low, rel=0.5)


def test_token_types_are_ranked_by_their_mean_depth_if_they_occur_often_enough():
    texts = ["a", "b", "a", "b", "a", "b", "c"]
    assert token_types(texts, np.array([2, 0, 2, 1, 2, 0, 2])) == [("a", 2.0, 3), ("b", 0.333, 3)]
