"""Switches for a whole model: look-ahead, updates of thresholds, and the routers that it has."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mixdepth.router import Chooser, Router


@contextmanager
def lookahead(model: nn.Module) -> Iterator[None]:
    """Within this context the model's routers choose in evaluation as in training, seeing later tokens.

    Losses measured so are not those of sampling; `generate()` stays causal.
    """
    routers = choosers(model)
    for router in routers:
        router.forced_lookahead += 1
    try:
        yield
    finally:
        for router in routers:
            router.forced_lookahead -= 1


@torch.no_grad()
def update_routers(model: nn.Module) -> None:
    """Call it once after each optimizer step: `optimizer.step(); mixdepth.update_routers(model)`.

    It moves the running thresholds (`causal="threshold"`, `experts="expert_choice"`) towards what training
    passes saw since the last call, alike on all ranks of a distributed run, and draws new noise for `random`.
    Other models it leaves as they are.
    """
    routers = choosers(model)
    for router in routers:
        if isinstance(router, Router) and router.step is not None:
            router.step += 1
    running = [router for router in routers if router.estimates]
    if not running:
        return
    seen = [router.observed for router in running if isinstance(router.observed, Tensor)]
    if len(seen) < len(running):
        raise ValueError("update_routers needs a training pass since the last call: call it after each optimizer step")
    flat = torch.cat([observed.reshape(-1) for observed in seen])
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(flat)
    for router, observed in zip(running, seen, strict=True):
        router.update(flat[: observed.numel()].view_as(observed))
        flat = flat[observed.numel() :]


def active(router: Any) -> Any:
    """The router itself: peft's `modules_to_save` trains a copy and keeps the original beside it."""
    if not hasattr(router, "modules_to_save"):
        return router
    in_use = [] if router.disable_adapters else [name for name in router.active_adapters if name in router._adapters]
    return router.modules_to_save[in_use[0]] if in_use else router.original_module


def choosers(model: nn.Module) -> list[Chooser]:
    """All modules of the model that choose tokens."""
    idle: set[nn.Module] = set()
    for wrapper in model.modules():
        if hasattr(wrapper, "modules_to_save") and hasattr(wrapper, "original_module"):
            idle |= {wrapper.original_module, *wrapper.modules_to_save.values()} - {active(wrapper)}  # type: ignore[operator]
    found = [module for module in model.modules() if isinstance(module, Chooser) and module not in idle]
    if not found:
        raise ValueError(f"{type(model).__name__} has no routers: it is not routed")
    return found
