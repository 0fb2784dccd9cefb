"""Routing losses, from routes alone."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mixdepth.config import DepthConfig
from mixdepth.routing import Route


class RoutingLoss(NamedTuple):
    """A loss of the routers, before it is weighted by its coefficient."""

    name: str
    coef: float
    value: Tensor  # ()


def routing_losses(routes: Sequence[Route], config: DepthConfig) -> list[RoutingLoss]:
    """What the causal rule learns from routes that were chosen by top-k: nothing where there is none."""
    match config.causal:
        case "predictor":
            logits = [route.predictor_logits for route in routes]
            return [RoutingLoss("predictor_loss", config.predictor_loss_coef, choice_loss(routes, logits))]
        case "aux_loss":
            logits = [route.logits for route in routes]
            return [RoutingLoss("aux_loss", config.router_aux_loss_coef, choice_loss(routes, logits))]
    return []


def choice_loss(routes: Sequence[Route], logits: Sequence[Tensor | None]) -> Tensor:
    """Cross-entropy of logits (B, T) for having been chosen: per real token, then mean over layers."""
    losses = []
    for route, guess in zip(routes, logits, strict=True):
        assert guess is not None
        target = route.mask.to(guess.dtype)
        loss = F.binary_cross_entropy_with_logits(guess, target, weight=route.real, reduction="sum")
        losses.append(loss / route.real.sum().clamp(min=1))
    return torch.stack(losses).mean()
