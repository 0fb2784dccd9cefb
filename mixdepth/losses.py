"""Routing losses, from routes alone."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mixdepth.config import DepthConfig
from mixdepth.routes import Route


class RoutingLoss(NamedTuple):
    """A loss of the routers, before it is weighted by its coefficient."""

    name: str
    coef: float
    value: Tensor  # ()


def routing_losses(routes: Sequence[Route], capacities: Sequence[float], config: DepthConfig) -> list[RoutingLoss]:
    """What routers learn from the routes of training, beside the gate."""
    if config.scheme == "token_choice":
        return [RoutingLoss("capacity_loss", config.capacity_loss_coef, capacity_loss(routes, capacities))]
    match config.causal:
        case "predictor":
            logits = [route.predictor_logits for route in routes]
            return [RoutingLoss("predictor_loss", config.predictor_loss_coef, choice_loss(routes, logits))]
        case "aux_loss":
            logits = [route.logits for route in routes]
            return [RoutingLoss("aux_loss", config.router_aux_loss_coef, choice_loss(routes, logits))]
    return []


def choice_loss(routes: Sequence[Route], logits: Sequence[Tensor | None]) -> Tensor:
    """Cross-entropy of logits (B, T) for having been chosen: per candidate, then mean over layers."""
    losses = []
    for route, guess in zip(routes, logits, strict=True):
        assert guess is not None
        target = route.mask.to(guess.dtype)
        loss = F.binary_cross_entropy_with_logits(guess, target, weight=route.candidates, reduction="sum")
        losses.append(loss / route.candidates.sum().clamp(min=1))
    return torch.stack(losses).mean()


def capacity_loss(routes: Sequence[Route], capacities: Sequence[float]) -> Tensor:
    """Holds token choice at its capacity c: f p / c + (1 - f) (1 - p) / (1 - c), mean over layers.

    f is the share of tokens that chose the block, p their mean probability of it. This is the balance
    loss of the Switch Transformer for two experts, the block and the way around it, that are to get
    unequal shares: f carries no gradient, and the one through p vanishes exactly where f is c.
    """
    losses = []
    for route, capacity in zip(routes, capacities, strict=True):
        num_real = route.real.sum().clamp(min=1)
        share = (route.count + route.dropped).sum() / num_real
        probability = (route.logits.sigmoid() * route.real).sum() / num_real
        loss = share * probability * (1 - capacity) + (1 - share) * (1 - probability) * capacity
        losses.append(loss / (capacity * (1 - capacity) or 1))  # at capacity 1 all are chosen, and it is 0
    return torch.stack(losses).mean()


def divergence(logits: Tensor, foretold: Tensor, labels: Tensor) -> Tensor:
    """The Kullback-Leibler divergence from what a teacher foretold, summed over the tokens that have a label:
    logits (B, T, V) of both, for labels (B, T)."""
    student, teacher = (x[:, :-1].float().log_softmax(-1) for x in (logits, foretold))
    losses = (teacher.exp() * (teacher - student)).sum(-1)  # (B, T - 1)
    return (losses * (labels[:, 1:] != -100)).sum()
