"""Routing losses against their definition, token by token."""

import pytest
import torch

from mixdepth import DepthConfig, Route
from mixdepth.losses import routing_losses


def make_route(seed):
    """Two rows of 7 tokens, the first with 3 padding tokens: two of its slots hold tokens not chosen."""
    torch.manual_seed(seed)
    real = torch.ones(2, 7, dtype=torch.bool)
    real[0, 4:] = False
    chosen = torch.zeros(2, 7, dtype=torch.bool)
    chosen[0, 2] = chosen[1, 0] = chosen[1, 3] = chosen[1, 6] = True
    logits, guess = torch.randn(2, 7), torch.randn(2, 7)
    return Route.choose(chosen, logits, logits, guess, real, num_slots=3), chosen


@pytest.mark.parametrize(("causal", "name"), [("predictor", "predictor_loss"), ("aux_loss", "aux_loss")])
def test_the_rule_is_judged_on_real_tokens_by_whether_it_foresaw_the_choice(causal, name):
    routes, layers = [], []
    for seed in (0, 1):
        route, chosen = make_route(seed)
        logits = route.predictor_logits if causal == "predictor" else route.logits
        terms = []
        for row in range(2):
            for token in range(7):
                if route.real[row, token]:
                    probability = torch.sigmoid(logits[row, token])
                    terms.append(-torch.log(probability if chosen[row, token] else 1 - probability))
        assert len(terms) == 11
        routes.append(route)
        layers.append(torch.stack(terms).mean())
    config = DepthConfig(causal=causal, predictor_loss_coef=0.25, router_aux_loss_coef=0.25)
    (loss,) = routing_losses(routes, [0.5, 0.5], config)
    assert (loss.name, loss.coef) == (name, 0.25)
    torch.testing.assert_close(loss.value, torch.stack(layers).mean())


def test_token_choice_is_held_to_its_capacity_by_its_real_tokens():
    routes, layers = [], []
    capacities = [0.5, 0.25]
    for seed, capacity in enumerate(capacities):
        route, chosen = make_route(seed)
        routes.append(route)
        share = chosen.sum() / 11
        probability = torch.sigmoid(route.logits[route.real]).mean()
        balanced = share * probability / capacity + (1 - share) * (1 - probability) / (1 - capacity)
        layers.append(balanced)
    (loss,) = routing_losses(routes, capacities, DepthConfig(scheme="token_choice"))
    assert loss.name == "capacity_loss"
    torch.testing.assert_close(loss.value, torch.stack(layers).mean())


def test_without_a_causal_rule_there_is_nothing_to_learn():
    assert routing_losses([make_route(0)[0]], [0.5], DepthConfig(causal=None)) == []
