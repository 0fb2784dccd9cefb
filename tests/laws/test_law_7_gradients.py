"""Law 7: the router learns from the language model, and the predictor learns from the choice alone."""

import torch
from tiny import routed, token_ids
from variants import ALL_VARIANTS, every_case, precision


def training_pass(architecture, variant):
    """A model in training mode, and what it computes for some ids."""
    dtype, _ = precision(architecture)
    model = routed(architecture, dtype, **ALL_VARIANTS[variant]).train()
    with torch.no_grad():
        for router in model.depth_routers:
            router.projection.weight *= 0.01  # where a squashed gate is not flat
    ids = token_ids()
    return model, model(ids, labels=ids)


@every_case
def test_the_router_learns_from_the_language_model_unless_its_weight_is_one(architecture, variant):
    model, out = training_pass(architecture, variant)
    out.lm_loss.backward()
    for router in model.depth_routers:
        gradient = router.projection.weight.grad
        learns = gradient is not None and bool(gradient.any())
        assert learns == (router.gate != "one")


@every_case
def test_the_predictor_learns_nothing_from_the_language_model(architecture, variant):
    model, out = training_pass(architecture, variant)
    out.lm_loss.backward()
    for router in model.depth_routers:
        if router.predictor is not None:
            assert all(parameter.grad is None for parameter in router.predictor.parameters())


@every_case
def test_the_predictors_loss_reaches_the_predictors_alone(architecture, variant):
    model, out = training_pass(architecture, variant)
    if out.predictor_loss is None:
        return
    out.predictor_loss.backward()
    parameters = dict(model.named_parameters())
    touched = {name for name, p in parameters.items() if p.grad is not None and p.grad.any()}
    assert touched == {name for name in parameters if ".depth_router.predictor." in name}
