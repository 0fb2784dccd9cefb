"""Statistics of routing, against loops over tokens."""

import pytest
import torch
from tiny import VOCAB, routed, token_ids

from mixdepth.training.routing_statistics import describe, routing_counts


@pytest.mark.parametrize("causal", ["predictor", "aux_loss"])
def test_statistics_are_those_of_counting_token_by_token(causal):
    model = routed(causal=causal).train()
    ids = token_ids(3, 24)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    routes = model(ids, attention_mask=mask, labels=ids, output_routes=True).routes
    found = describe(routing_counts(routes, model.depth_routers, ids, VOCAB))
    for layer, (route, router) in enumerate(zip(routes, model.depth_routers, strict=True)):
        real = chosen = guessed = both = 0
        weights, seen, taken = [], set(), set()
        guess = route.guess
        for row in range(3):
            slots = route.index[row, : route.count[row]].tolist()
            weights += route.weight[row, : route.count[row]].tolist()
            for token in range(24):
                if not mask[row, token]:
                    assert token not in slots
                    continue
                would = bool(guess[row, token] > router.threshold)
                real += 1
                chosen += token in slots
                guessed += would
                both += would and token in slots
                seen.add(ids[row, token].item())
                if token in slots:
                    taken.add(ids[row, token].item())
        weights = torch.tensor(weights, dtype=torch.float64)
        expected = {
            "capacity": chosen / real,
            "causal_capacity": guessed / real,
            "precision": both / guessed,
            "recall": both / chosen,
            "gate_mean": weights.mean().item(),
            "gate_std": weights.std(correction=0).item(),
            "never_chosen": 1 - len(taken) / len(seen),
        }
        for name, value in expected.items():
            assert found[name][layer] == pytest.approx(value, abs=1e-6), name
        assert 0 < expected["never_chosen"] < 1


def test_counts_of_parts_add_up_to_those_of_the_whole():
    model = routed().train()
    ids = token_ids(4, 24)
    whole = routing_counts(model(ids, labels=ids, output_routes=True).routes, model.depth_routers, ids, VOCAB)
    parts = [
        routing_counts(model(p, labels=p, output_routes=True).routes, model.depth_routers, p, VOCAB)
        for p in ids.split(2)
    ]
    assert torch.allclose(whole[:, :6], sum(parts)[:, :6])  # types are counted in each part by itself
