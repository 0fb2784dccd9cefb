"""Switches for a whole model: look-ahead, given scores, observation, and updates of thresholds.

Shapes: B batch, T tokens, D width.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mixdepth.router import Chooser, GivenScores, Observation, Router

Scores = Tensor | Callable[[Tensor], Tensor]
"""Scores (B, T), or a function that maps what a router reads (B, T, D) to scores (B, T)."""


@contextmanager
def lookahead(model: nn.Module) -> Iterator[None]:
    """Let the model's routers choose in evaluation as in training, where the choice depends on later tokens.

    Losses that are measured this way are not those of sampling. `generate()` stays causal.
    """
    routers = choosers(model)
    for router in routers:
        router.forced_lookahead += 1
    try:
        yield
    finally:
        for router in routers:
            router.forced_lookahead -= 1


@contextmanager
def given_scores(model: nn.Module, scores: Mapping[int, Scores]) -> Iterator[None]:
    """Choose tokens by these scores, and not by those of the routers: oracles, controls, or a router of your own.

    The keys are the layers of a language model, or the numbers of the `Routed` blocks of another model, in order from
    0. Routers that are not named choose as before. A value is a tensor (B, T) with a score for each token of the pass,
    or a function of what the router reads (B, T, D); see `Observation.read`.

    The scores only choose: the weight of a chosen token still follows from the router's own score. Without look-ahead
    a token is chosen if its score exceeds the router's threshold, which is 0 unless it is estimated
    (`causal="threshold"`) or a quantile (`scheme="random"`); predictors decide nothing.

    >>> import mixdepth
    >>> block = mixdepth.Routed(nn.Linear(8, 8), width=8, config=mixdepth.DepthConfig(capacity=0.5))
    >>> with mixdepth.given_scores(block, {0: torch.tensor([[3.0, 1.0, 2.0, 0.0]])}):
    ...     y = block(torch.randn(1, 4, 8))
    >>> block.route.mask
    tensor([[ True, False,  True, False]])
    """
    routers = routers_by_layer(model)
    unknown = [layer for layer in scores if layer not in routers]
    if unknown:
        raise ValueError(f"layer {unknown[0]} has no router; those that have one are {', '.join(map(str, routers))}")
    before = {layer: routers[layer].given for layer in scores}
    for layer, source in scores.items():
        routers[layer].given = GivenScores(source)
    try:
        yield
    finally:
        for layer, given in before.items():
            routers[layer].given = given


@contextmanager
def observe(model: nn.Module) -> Iterator[dict[int, list[Observation]]]:
    """Record what the model's routers read, decide and move: one `Observation` for each forward pass, by layer.

    The keys are those of `given_scores`. Observations keep their tensors on the model's device, without gradients. A
    layer that no token reaches (early exit) is not observed, and a layer that is computed again for activation
    checkpointing is observed again.

    >>> import mixdepth
    >>> block = mixdepth.Routed(nn.Linear(8, 8), width=8, config=mixdepth.DepthConfig(capacity=0.5))
    >>> with mixdepth.observe(block) as observations:
    ...     y = block(torch.randn(1, 4, 8))
    >>> observations[0][-1].chosen.sum()
    tensor(2)
    """
    routers = routers_by_layer(model)
    observations: dict[int, list[Observation]] = {layer: [] for layer in routers}
    for layer, router in routers.items():
        router.records = (*router.records, observations[layer])
    try:
        yield observations
    finally:
        for layer, router in routers.items():
            remaining = [record for record in router.records if record is not observations[layer]]
            router.records = tuple(remaining)


@torch.no_grad()
def update_routers(model: nn.Module) -> None:
    """Update what routers keep between steps. Call it once after each `optimizer.step()`.

    It moves the running thresholds (`causal="threshold"`, `experts="expert_choice"`) towards what training passes
    observed since the last call, in the same way on all ranks of a distributed run, and draws new noise for `random`.
    It leaves other models as they are.
    """
    routers = choosers(model)
    for router in routers:
        if isinstance(router, Router) and router.step is not None:
            router.step += 1
    running = [router for router in routers if router.estimates]
    if not running:
        return
    observed = [router.observed for router in running if isinstance(router.observed, Tensor)]
    if len(observed) < len(running):
        raise ValueError("update_routers needs a training pass since the last call: call it after each optimizer step")
    # One sum over all ranks for all routers together.
    flat = torch.cat([sums.reshape(-1) for sums in observed])
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(flat)
    for router, sums in zip(running, observed, strict=True):
        router.update(flat[: sums.numel()].view_as(sums))
        flat = flat[sums.numel() :]


def routers_by_layer(model: nn.Module) -> dict[int, Router]:
    """Return the model's routers by layer, or by number where they are not in a language model.

    The routers of experts are not among them.
    """
    routers: dict[int, Router] = {}
    for module in choosers(model):
        if isinstance(module, Router):
            layer = module.layer
            if layer is None:
                layer = len(routers)
            routers[layer] = module
    return routers


def active(router: Any) -> Any:
    """Return the router that is in use: peft's `modules_to_save` trains a copy and keeps the original with it."""
    if not hasattr(router, "modules_to_save"):
        return router
    if router.disable_adapters:
        return router.original_module
    in_use = [name for name in router.active_adapters if name in router._adapters]
    if not in_use:
        return router.original_module
    return router.modules_to_save[in_use[0]]


def choosers(model: nn.Module) -> list[Chooser]:
    """Return all modules of the model that choose tokens, without the copies of peft that are not in use."""
    idle: set[nn.Module] = set()
    for wrapper in model.modules():
        if hasattr(wrapper, "modules_to_save") and hasattr(wrapper, "original_module"):
            copies = {wrapper.original_module, *wrapper.modules_to_save.values()}  # type: ignore[operator]
            idle |= copies - {active(wrapper)}
    in_use = [module for module in model.modules() if isinstance(module, Chooser) and module not in idle]
    if not in_use:
        raise ValueError(f"{type(model).__name__} has no routers: it is not routed")
    return in_use
