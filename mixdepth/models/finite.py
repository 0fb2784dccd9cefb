"""Weights that are not finite: with them a model computes nothing, and its routers choose no token, without a word."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from mixdepth.modes import lookahead
from mixdepth.router import Chooser


@torch.no_grad()
def check_finite(model: nn.Module, name: str) -> None:
    """Refuse a model with weights that are NaN or infinite; the first of them is named."""
    for key, tensor in _saved(model):
        problem = _problem(tensor)
        if problem is not None:
            raise ValueError(
                f"the weights of {name!r} are not finite: {key!r} holds {problem}; copy the model again, or go back to "
                "an earlier checkpoint"
            )


@torch.no_grad()
def check_computes(model: Any, name: str) -> None:
    """Refuse a model that computes NaN from finite weights, or cannot compute at all, on a text of two tokens.

    Every layer runs, so that the routing does not matter.
    """
    tokens = torch.arange(2)[None]  # (1, 2)
    is_routed = any(isinstance(module, Chooser) for module in model.modules())
    with lookahead(model) if is_routed else nullcontext():
        logits = model(tokens, use_cache=False).logits  # (1, 2, V)
    if not logits.isfinite().all():
        raise ValueError(
            f"{name!r} computes no numbers, though its weights are finite: its config.json or its weights are "
            "damaged; copy the model again"
        )


def _saved(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers that a folder holds, tied ones once.

    A threshold that was never estimated is NaN, as it should be, and is left out.
    """
    seen = set()
    for prefix, module in model.named_modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if id(tensor) in seen or name in module._non_persistent_buffers_set:
                continue
            seen.add(id(tensor))
            if isinstance(module, Chooser) and tensor is module.threshold and _is_awaited(module):
                continue
            yield f"{prefix}.{name}" if prefix else name, tensor


def _is_awaited(router: Chooser) -> bool:
    """Say whether the router's threshold is still to be estimated."""
    return router.estimates and not router.threshold.is_meta and bool(router.threshold.isnan().all())


def _problem(tensor: Tensor) -> str | None:
    """Say what in the tensor is not finite. Its extremes show it: if there is a NaN, both are NaN."""
    if tensor.is_meta or not tensor.is_floating_point() or not tensor.numel():
        return None
    if tensor.dtype.itemsize == 1:  # torch finds no extremes of 8 bits
        tensor = tensor.float()
    extremes = torch.stack(torch.aminmax(tensor))  # (2,)
    if extremes.isnan().any():
        return "NaN"
    if extremes.isinf().any():
        return "infinity"
    return None
