"""Given scores choose the tokens, and observations hold what routers read, decided and moved."""

import copy
import itertools

import pytest
import torch
from tiny import routed, token_ids
from torch import nn

import mixdepth
from mixdepth import DepthConfig, Routed
from mixdepth.router import inverse_size
from mixdepth.routes import slots, top_k

ROUTED_LAYERS = (0, 2, 3)
VARIANTS = {
    "default": {},
    "normed": {"router_input": "normed"},
    "aux_loss": {"causal": "aux_loss"},
    "random": {"scheme": "random"},
    "token_choice": {"scheme": "token_choice"},
    "attention": {"target": "attention"},
    "mlp": {"target": "mlp"},
    "gate_on_mlp": {"gate_on": "mlp"},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def random_scores(ids, layers=ROUTED_LAYERS):
    return {layer: torch.randn(ids.shape, dtype=torch.float64) for layer in layers}


def routes_by_layer(model, ids):
    routes = model(ids, output_routes=True).routes
    return dict(zip(model.deciding_layers, routes, strict=True))


# Given scores


@pytest.mark.parametrize("variant", ["default", "normed", "aux_loss", "random", "mlp"])
def test_the_top_k_of_given_scores_is_chosen(variant):
    model = routed(**VARIANTS[variant])
    ids = token_ids()
    scores = random_scores(ids)
    k = torch.full((len(ids),), slots(0.4, ids.shape[1]))
    with mixdepth.given_scores(model, scores), mixdepth.lookahead(model):
        routes = routes_by_layer(model, ids)
    for layer, route in routes.items():
        assert torch.equal(route.mask, top_k(scores[layer], k))
        assert torch.equal(route.logits, scores[layer])


@pytest.mark.parametrize("variant", ["default", "aux_loss", "token_choice", "attention"])
def test_without_look_ahead_given_scores_above_0_are_chosen(variant):
    model = routed(**VARIANTS[variant])
    ids = token_ids()
    scores = random_scores(ids)
    with mixdepth.given_scores(model, scores):
        routes = routes_by_layer(model, ids)
    for layer, route in routes.items():
        assert torch.equal(route.mask, scores[layer] > 0)


@every_variant
def test_the_routers_own_scores_given_back_change_nothing(variant):
    model = routed(**VARIANTS[variant])
    ids = token_ids()
    with mixdepth.lookahead(model):
        before = model(ids, output_routes=True)
        scores = {layer: route.logits for layer, route in zip(model.deciding_layers, before.routes, strict=True)}
        with mixdepth.given_scores(model, scores):
            after = model(ids)
    assert torch.equal(before.logits, after.logits)


def test_given_scores_leave_the_weights_to_the_router():
    block = Routed(nn.Linear(8, 8), width=8, config=DepthConfig(capacity=0.5, init_std=1.0))
    x = torch.randn(2, 6, 8)
    with mixdepth.given_scores(block, {0: torch.randn(2, 6)}):
        block(x)
    assert torch.equal(block.route.weight, block.route.gather(block.router.score(x)))


def test_routers_that_are_not_named_choose_as_before():
    model = routed()
    ids = token_ids()
    before = routes_by_layer(model, ids)
    with mixdepth.given_scores(model, random_scores(ids, layers=(3,))):
        after = routes_by_layer(model, ids)
    for layer in (0, 2):
        assert torch.equal(before[layer].mask, after[layer].mask)
    assert not torch.equal(before[3].mask, after[3].mask)


def test_a_function_of_what_the_router_reads_gives_scores_in_generate():
    model = routed(router_input="normed")
    projections = {layer: router.projection for layer, router in zip(ROUTED_LAYERS, model.depth_routers, strict=True)}
    functions = {layer: lambda read, p=projection: p(read)[..., 0] for layer, projection in projections.items()}
    by_own_scores = copy.deepcopy(model)
    for router in by_own_scores.depth_routers:
        router.predictor = None
    ids = token_ids(2, 9)
    settings = {"max_new_tokens": 6, "do_sample": False}
    with mixdepth.given_scores(model, functions):
        generated = model.generate(ids, **settings)
    assert torch.equal(generated, by_own_scores.generate(ids, **settings))


def test_a_module_that_gives_scores_becomes_no_part_of_the_model():
    block = Routed(nn.Linear(8, 8), width=8, config=DepthConfig(capacity=0.5))
    before = list(block.state_dict())

    class Mean(nn.Module):
        def forward(self, read):
            return read.mean(-1)

    with mixdepth.given_scores(block, {0: Mean()}):
        block(torch.randn(1, 4, 8))
        assert list(block.state_dict()) == before


def test_contexts_of_given_scores_nest():
    block = Routed(nn.Linear(8, 8), width=8, config=DepthConfig(capacity=0.25))
    x = torch.randn(1, 4, 8)
    chosen = []
    nn.init.zeros_(block.router.projection.weight)  # among equal scores the first token wins
    second = torch.tensor([[0.0, 1.0, 0.0, 0.0]])
    last = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    with mixdepth.given_scores(block, {0: second}):
        with mixdepth.given_scores(block, {0: last}):
            block(x)
            chosen.append(block.route.index.item())
        block(x)
        chosen.append(block.route.index.item())
    block(x)
    chosen.append(block.route.index.item())
    assert chosen == [3, 1, 0]


def test_an_error_within_the_context_leaves_no_scores_behind():
    model = routed()
    with pytest.raises(RuntimeError), mixdepth.given_scores(model, random_scores(token_ids())):
        raise RuntimeError
    assert all(router.given is None for router in model.depth_routers)


def test_a_copy_made_within_the_contexts_is_in_neither_of_them():
    model = routed()
    with mixdepth.given_scores(model, random_scores(token_ids())), mixdepth.observe(model):
        routers = copy.deepcopy(model).depth_routers
    assert all(router.given is None and router.records == () for router in routers)


def test_scores_for_a_layer_without_a_router_are_refused():
    with (
        pytest.raises(ValueError, match="layer 1 has no router; those that have one are 0, 2, 3"),
        mixdepth.given_scores(routed(), {1: torch.zeros(2, 20)}),
    ):
        pass


def test_scores_of_another_shape_are_refused():
    model = routed()
    with (
        mixdepth.given_scores(model, {2: torch.zeros(2, 19)}),
        pytest.raises(ValueError, match=r"given scores must have the shape \(2, 20\) .* not \(2, 19\)"),
    ):
        model(token_ids())


def test_the_predictor_learns_a_given_choice():
    model = routed().train()
    ids = token_ids()
    scores = random_scores(ids)
    with mixdepth.given_scores(model, scores):
        out = model(ids, labels=ids, output_routes=True)
    expected = []
    for route in out.routes:
        loss = nn.functional.binary_cross_entropy_with_logits(route.predictor_logits, route.mask.double())
        expected.append(loss)
    torch.testing.assert_close(out.predictor_loss, torch.stack(expected).mean())


def test_the_layers_of_the_encoder_take_given_scores():
    encoder = mixdepth.MixtureOfDepths.build(embed_dim=3, hidden_size=16, num_layers=2, dropout=0.0)
    scores = {layer: torch.randn(2, 8) for layer in range(2)}
    with mixdepth.given_scores(encoder, scores):
        encoder(torch.randn(2, 8, 3))
    for layer, values in scores.items():
        assert torch.equal(encoder.layers[layer].route.mask, top_k(values, torch.tensor([4, 4])))


# Observation


@pytest.mark.parametrize(("variant", "ahead"), list(itertools.product(VARIANTS, (False, True))))
def test_what_is_observed_is_what_the_routes_say(variant, ahead):
    model = routed(**VARIANTS[variant])
    ids = token_ids()
    with mixdepth.observe(model) as observations:
        if ahead:
            with mixdepth.lookahead(model):
                routes = routes_by_layer(model, ids)
        else:
            routes = routes_by_layer(model, ids)
    assert list(observations) == list(routes)
    for layer, route in routes.items():
        (observation,) = observations[layer]
        assert torch.equal(observation.chosen, route.mask)
        assert torch.equal(observation.scores, route.logits if ahead else observation.scores)
        assert torch.equal(observation.real, route.real)


@every_variant
def test_tokens_that_skip_do_not_move(variant):
    model = routed(**VARIANTS[variant])
    with mixdepth.observe(model) as observations:
        model(token_ids())
    for (observation,) in observations.values():
        assert not observation.moved[~observation.chosen].any()
        assert observation.moved[observation.chosen].any(-1).all()


def test_observing_changes_nothing():
    model = routed()
    ids = token_ids()
    before = model(ids).logits
    with mixdepth.observe(model):
        assert torch.equal(model(ids).logits, before)


def test_what_a_router_reads_and_moves_in_a_block_adds_up():
    block = Routed(nn.Linear(8, 8), width=8, config=DepthConfig(capacity=0.5, router_input="normed"))
    x = torch.randn(2, 6, 8)
    with mixdepth.observe(block) as observations:
        y = block(x)
    (observation,) = observations[0]
    assert torch.equal(observation.read, x * inverse_size(x)[..., None])
    torch.testing.assert_close(observation.own_scores, block.router.score(x))
    assert torch.equal(observation.moved, y - x)


def test_each_pass_and_each_step_of_generate_is_observed():
    model = routed()
    ids = token_ids(2, 9)
    with mixdepth.observe(model) as observations:
        model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    for passes in observations.values():
        assert [tuple(observation.chosen.shape) for observation in passes] == [(2, 9)] + [(2, 1)] * 4


def test_a_layer_that_no_token_reaches_is_not_observed():
    model = routed(scheme="early_exit", layers=(0, 2), capacity=(0.7, 0.4), causal="aux_loss")
    all_leave = torch.full((2, 20), -1.0)
    with mixdepth.observe(model) as observations:
        model(token_ids())
        with mixdepth.given_scores(model, {0: all_leave}):
            model(token_ids())
    assert [len(passes) for passes in observations.values()] == [2, 1]
    assert observations[2][0].moved.any()
    assert not observations[0][1].moved.any()


def test_two_contexts_observe_each_for_itself():
    block = Routed(nn.Linear(8, 8), width=8)
    x = torch.randn(1, 8, 8)
    with mixdepth.observe(block) as outer:
        block(x)
        with mixdepth.observe(block) as inner:
            block(x)
    block(x)
    assert (len(outer[0]), len(inner[0])) == (2, 1)


def test_observations_carry_no_gradient():
    model = routed().train()
    ids = token_ids()
    with mixdepth.observe(model) as observations:
        model(ids, labels=ids).loss.backward()
    for (observation,) in observations.values():
        for value in (observation.read, observation.own_scores, observation.scores, observation.moved):
            assert not value.requires_grad
