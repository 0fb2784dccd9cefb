"""Law 7: The router learns from the language model, and the predictor learns from the choice alone."""

import torch
from tiny import routed, token_ids
from variants import ALL_VARIANTS, every_case, precision


@every_case
def test_the_router_learns_from_the_language_model_and_the_predictor_only_from_the_choice(architecture, variant):
    dtype, _ = precision(architecture)
    model = routed(architecture, dtype, **ALL_VARIANTS[variant]).train()
    with torch.no_grad():
        for router in model.depth_routers:
            router.projection.weight *= 0.01  # where a squashed gate is not flat
    ids = token_ids()
    out = model(ids, labels=ids)
    out.lm_loss.backward(retain_graph=True)
    for router in model.depth_routers:
        learns = router.projection.weight.grad is not None and router.projection.weight.grad.any()
        assert learns == (router.gate != "one")
        assert router.predictor is None or all(p.grad is None for p in router.predictor.parameters())
    model.zero_grad()
    if out.predictor_loss is not None:
        out.predictor_loss.backward()
        touched = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
        predictors = {name for name, p in model.named_parameters() if ".depth_router.predictor." in name}
        assert touched == predictors
