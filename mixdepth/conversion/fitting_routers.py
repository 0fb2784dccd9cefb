"""`fit_routers`: start the routers of a converted model from a least-squares fit instead of zero.

Shapes: B rows of a batch, T tokens of a row, D width of the stream.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from mixdepth import schemes
from mixdepth.config import DepthConfig
from mixdepth.conversion.importance import importance_of, moves_of_layers
from mixdepth.evaluation.batches import evaluating
from mixdepth.hf.model import RoutedCausalLM
from mixdepth.modes import lookahead, observe

RIDGE = 0.01
"""The strength of the ridge penalty of the fit, relative to the variance of what routers read."""

MIN_TOKENS_PER_WEIGHT = 2
"""The least number of tokens for each weight of a router in the fit."""

SINK_WEIGHT = 0.5
"""The weight of the first token of a row (the attention sink) relative to the whole row. Unweighted, it would be one
sample among hundreds, and the fit would ignore it."""


def windows_to_fit(model: Any, context: int) -> int:
    """Return the least number of windows that the routers of this model can be fitted on."""
    width: int = model.config.get_text_config(decoder=True).hidden_size
    return math.ceil(MIN_TOKENS_PER_WEIGHT * width / context)


@torch.no_grad()
def fit_routers(model: RoutedCausalLM, batches: Iterable[Tensor]) -> None:
    """Start the routers of a converted model where they rank tokens by how far their layer moves them.

    This is a least-squares fit on these token ids (B, T) to the logarithm of the moves, with the first token of each
    row at the top: it hardly moves, but it is the sink that other tokens attend to when there is nothing else to attend
    to, and without it attention breaks. The model must be at capacity 1, with a gate that is 1 for every score, so that
    it computes what it did before.
    """
    # 1. Check the model and the number of tokens.
    if not isinstance(model, RoutedCausalLM):
        raise ValueError(f"{type(model).__name__} is not a routed language model: call mixdepth.route first")
    check_fit(model.depth_config)
    routers = dict(zip(model.deciding_layers, model.depth_routers, strict=True))
    if any(router.capacity != 1 for router in routers.values()):
        raise ValueError("routers are fitted before a model comes down in capacity: set its capacity to 1")
    batches = list(batches)
    num_tokens = sum(batch.numel() for batch in batches)
    width = model.depth_routers[0].projection.in_features
    least = MIN_TOKENS_PER_WEIGHT * width
    if num_tokens < least:
        raise ValueError(
            f"{num_tokens} tokens are too few to fit the {width} weights of a router: give at least {least}"
        )
    # 2. Add up the products of the normal equations, batch by batch.
    sums: dict[int, Tensor] = {}  # (D + 2, D + 2) for each routed layer
    with evaluating(model), lookahead(model):
        for batch in tqdm(batches, desc="fitting routers", unit="batch", leave=False):
            with observe(model) as observations:
                _, moves = moves_of_layers(model, batch, model.depth_config.target)
            for index, (observation,) in observations.items():
                sums[index] = sums.get(index, 0) + _products(observation.read, moves[index])
    # 3. Solve them for each router.
    for index, router in routers.items():
        weights = _least_squares(sums[index])  # (D,)
        if not weights.isfinite().all():
            raise ValueError(f"the values of layer {index} on this text are not finite: its router cannot be fitted")
        router.projection.weight.copy_(weights[None])


def check_fit(depth: DepthConfig) -> None:
    """Refuse routing whose scores have no influence, or would change what a pretrained model computes."""
    if not schemes.can_be_fitted(depth.scheme):
        raise ValueError(f"routers are fitted for scheme='expert_choice', not for {depth.scheme!r}: leave out fit")
    if depth.causal == "aux_loss":
        raise ValueError(
            "causal='aux_loss' compares scores with 0, and fitted scores do not lie around 0: use causal='threshold'"
        )
    if depth.experts is not None:
        raise ValueError(f"routers of models with experts={depth.experts.scheme!r} are not fitted: leave out fit")
    if depth.gate not in ("straight", "one"):
        raise ValueError(
            f"gate={depth.gate!r} is not 1 for every score: fitted routers need gate='straight', or the model would no "
            "longer compute what it did"
        )


def _products(x: Tensor, moves: Tensor) -> Tensor:
    """Return the weighted sums of all products of x (B, T, D), the logarithm of the moves (B, T) and 1.

    They are a matrix (D + 2, D + 2), which is all that a least-squares fit needs to know of the batch.
    """
    goal = importance_of(moves).clamp(min=1e-9).log()  # (B, T)
    weight = torch.ones_like(goal)  # (B, T)
    weight[:, 0] = SINK_WEIGHT * goal.shape[1]
    one = torch.ones_like(goal)  # (B, T)
    rows = torch.cat([x, goal[..., None], one[..., None]], -1) * weight.sqrt()[..., None]  # (B, T, D + 2)
    rows = rows.flatten(0, 1).double()
    return rows.T @ rows


def _least_squares(products: Tensor) -> Tensor:
    """Return the weights (D,) whose scores come nearest to the goal, after the goal is scaled to a variance of 1."""
    # products[-1] holds the sums of all columns, since the last column is 1.
    number = products[-1, -1]
    means = products[-1] / number  # (D + 2,)
    covariance = products / number - means.outer(means)  # (D + 2, D + 2)
    width = len(products) - 2
    mean_variance = covariance.diagonal()[:width].mean()
    ridge = RIDGE * mean_variance * torch.eye(width, dtype=products.dtype, device=products.device)  # (D, D)
    deviation = covariance[width, width].sqrt().clamp(min=1e-9)
    goal = covariance[:width, width] / deviation  # (D,)
    # (C + ridge I) w = c
    weights: Tensor = torch.linalg.solve(covariance[:width, :width] + ridge, goal)
    return weights
