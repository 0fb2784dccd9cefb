"""Routing losses, computed from routes alone, and the loss of distillation."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mixdepth import schemes
from mixdepth.config import DepthConfig
from mixdepth.routes import Route
from mixdepth.schemes import LossName


class RoutingLoss(NamedTuple):
    """A loss of the routers, before its coefficient multiplies it."""

    name: str
    coef: float
    value: Tensor  # ()


def routing_losses(routes: Sequence[Route], capacities: Sequence[float], config: DepthConfig) -> list[RoutingLoss]:
    """Compute what trains routers and predictors on the routes of training, besides the gate."""
    names = schemes.losses(config.scheme, config.causal)
    return [_routing_loss(name, routes, capacities, config) for name in names]


def _routing_loss(
    name: LossName, routes: Sequence[Route], capacities: Sequence[float], config: DepthConfig
) -> RoutingLoss:
    match name:
        case "predictor_loss":
            logits = [route.predictor_logits for route in routes]
            return RoutingLoss(name, config.predictor_loss_coef, choice_loss(routes, logits))
        case "aux_loss":
            scores = [route.logits for route in routes]
            return RoutingLoss(name, config.router_aux_loss_coef, choice_loss(routes, scores))
        case "capacity_loss":
            return RoutingLoss(name, config.capacity_loss_coef, capacity_loss(routes, capacities))


def choice_loss(routes: Sequence[Route], logits: Sequence[Tensor | None]) -> Tensor:
    """Compute the cross-entropy of logits (B, T) for being chosen: the mean over candidates, then over layers."""
    losses = []
    for route, guess in zip(routes, logits, strict=True):
        assert guess is not None
        target = route.mask.to(guess.dtype)  # (B, T)
        loss = F.binary_cross_entropy_with_logits(guess, target, weight=route.candidates, reduction="sum")
        losses.append(loss / route.candidates.sum().clamp(min=1))
    return torch.stack(losses).mean()


def capacity_loss(routes: Sequence[Route], capacities: Sequence[float]) -> Tensor:
    """Compute the loss that keeps token choice at its capacity, as a mean over layers.

    At capacity c it is f p / c + (1 - f) (1 - p) / (1 - c), where f is the share of tokens that chose the
    block, and p their mean probability of it. This is the balance loss of the Switch Transformer for two experts, the
    block and the way around it, which are to get unequal shares: f carries no gradient, and the gradient through p
    vanishes exactly where f is c.
    """
    losses = []
    for route, capacity in zip(routes, capacities, strict=True):
        num_real = route.real.sum().clamp(min=1)
        share = (route.count + route.dropped).sum() / num_real  # f
        probability = (route.logits.sigmoid() * route.real).sum() / num_real  # p
        loss = share * probability * (1 - capacity) + (1 - share) * (1 - probability) * capacity
        scale = capacity * (1 - capacity)
        if scale == 0:  # at capacity 1 every token is chosen, and the loss is 0
            scale = 1
        losses.append(loss / scale)
    return torch.stack(losses).mean()


def divergence(logits: Tensor, teacher_logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the Kullback-Leibler divergence from a teacher's predictions, summed over the tokens that have a label.

    Both logits have the shape (B, T, V), and labels (B, T).
    """
    student = logits[:, :-1].float().log_softmax(-1)  # (B, T - 1, V)
    teacher = teacher_logits[:, :-1].float().log_softmax(-1)  # (B, T - 1, V)
    losses = (teacher.exp() * (teacher - student)).sum(-1)  # (B, T - 1)
    return (losses * (labels[:, 1:] != -100)).sum()
