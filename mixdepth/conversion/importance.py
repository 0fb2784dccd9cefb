"""How much each layer of a pretrained model matters, and to which tokens: what can be spared is measured."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from tqdm import tqdm

from mixdepth.config import DepthConfig, Target
from mixdepth.evaluation.batches import evaluating
from mixdepth.hf.architectures import check_supported, decoder_layers
from mixdepth.hf.install import route, unroute
from mixdepth.hf.model import RoutedCausalLM
from mixdepth.modes import lookahead
from mixdepth.router import Router, inverse_size

PARTS = {"block": "", "attention": "self_attn", "mlp": "mlp"}
"""The submodule of a layer whose output is what a target adds to the stream; a block's output is the stream itself."""
RIDGE = 0.01
"""Of the fit of routers, relative to the variance of what they read."""
FEWEST_TOKENS = 2
"""That it needs, for each weight of a router."""
SINK_WEIGHT = 0.5
"""What the first token of a row counts in that fit, against all of the row: one of hundreds would not be heard."""


@torch.no_grad()
def layer_costs(
    model: Any, batches: Iterable[Tensor], capacity: float = 0.5, target: Target = "block"
) -> dict[int, float]:
    """What each layer's absence costs: nats per token by which the loss on these token ids (B, T) rises when that layer
    alone processes only the `capacity` tokens of each row that it moves most, and the first: see `fit_routers`.

    How far a layer moves a token is known only after it ran, so this is no routing rule; it is what a router can hope
    to learn. The model is left as it was.
    """
    check_supported(model)
    batches = list(batches)
    if not batches:
        raise ValueError("there is nothing to measure on: batches is empty")
    settings: Any = {"capacity": capacity, "target": target, "gate": "one", "causal": "threshold"}
    with evaluating(model):
        found = [_moves(model, batch, target) for batch in batches]
        weights = torch.tensor([float(batch.shape[0] * (batch.shape[1] - 1)) for batch in batches])  # predicted tokens
        weights /= weights.sum()
        before = (torch.stack([loss for loss, _ in found]).cpu() * weights).sum()
        costs = {}
        for index in tqdm(range(len(decoder_layers(model))), desc="measuring layers", unit="layer", leave=False):
            routed = route(model, layers=(index,), **settings)
            (router,) = routed.depth_routers
            losses = []
            try:
                with lookahead(routed):
                    for batch, (_, moves) in zip(batches, found, strict=True):
                        router.score = _constant(_wanted(moves[index]))  # type: ignore[method-assign,assignment]
                        losses.append(_loss(routed, batch))
            finally:
                unroute(routed)
            costs[index] = ((torch.stack(losses).cpu() * weights).sum() - before).item()
    if not all(map(math.isfinite, costs.values())):
        raise ValueError("the model's loss on this text is no number: its layers cannot be measured")
    return costs


def cheapest(costs: dict[int, float], number: int) -> tuple[int, ...]:
    """The layers that cost least, in order.

    >>> cheapest({0: 0.5, 1: 0.1, 2: 0.3, 3: 0.2}, 2)
    (1, 3)
    """
    return tuple(sorted(sorted(costs, key=costs.__getitem__)[:number]))


def windows_to_fit(model: Any, context: int) -> int:
    """How many windows the routers of this model can be fitted on, at least."""
    width: int = model.config.get_text_config(decoder=True).hidden_size
    return math.ceil(FEWEST_TOKENS * width / context)


@torch.no_grad()
def fit_routers(model: RoutedCausalLM, batches: Iterable[Tensor]) -> None:
    """Start the routers of a converted model where they rank tokens by how far their layer moves them.

    A least-squares fit on these token ids (B, T) to the logarithm of the moves, with the first token of each row at the
    top: it hardly moves, but it is the sink that others attend to for want of anything else, and without it
    attention breaks. The model is at capacity 1 and its gate is 1 whatever the score, so that it computes what it did.
    """
    if not isinstance(model, RoutedCausalLM):
        raise ValueError(f"{type(model).__name__} is not a routed language model: call mixdepth.route first")
    check_fit(model.depth_config)
    routers = dict(zip(model.deciding_layers, model.depth_routers, strict=True))
    if any(router.capacity != 1 for router in routers.values()):
        raise ValueError("routers are fitted before a model comes down in capacity: set its capacity to 1")
    sums: dict[int, Tensor] = {}
    batches = list(batches)
    num_tokens, width = sum(batch.numel() for batch in batches), model.depth_routers[0].projection.in_features
    if num_tokens < FEWEST_TOKENS * width:
        raise ValueError(
            f"{num_tokens} tokens are too few to fit the {width} weights of a router: give at least "
            f"{FEWEST_TOKENS * width}"
        )
    with evaluating(model), lookahead(model):
        for batch in tqdm(batches, desc="fitting routers", unit="batch", leave=False):
            streams: dict[int, Tensor] = {}
            try:
                for index, router in routers.items():
                    router.score = _recording(router, streams, index)  # type: ignore[method-assign,assignment]
                _, moves = _moves(model, batch, model.depth_config.target)
            finally:
                for router in routers.values():
                    del router.score
            for index, x in streams.items():
                sums[index] = sums.get(index, 0) + _products(x, moves[index])
    for index, router in routers.items():
        weights = _least_squares(sums[index])
        if not weights.isfinite().all():
            raise ValueError(
                f"layer {index} gives values on this text that are no numbers: its router cannot be fitted"
            )
        router.projection.weight.copy_(weights[None])


def check_fit(depth: DepthConfig) -> None:
    """Refuse to fit routers where their scores have no say, or would change what a pretrained model computes."""
    if depth.scheme != "expert_choice":
        raise ValueError(f"routers are fitted for scheme='expert_choice', not for {depth.scheme!r}: leave out fit")
    if depth.causal == "aux_loss":
        raise ValueError("causal='aux_loss' cuts scores at 0, which fitted ones are not around: use causal='threshold'")
    if depth.experts is not None:
        raise ValueError(f"routers of models with experts={depth.experts!r} are not fitted: leave out fit")
    if depth.gate not in ("straight", "one"):
        raise ValueError(
            f"gate={depth.gate!r} is not 1 for every score: fitted routers need gate='straight', or the model would no "
            "longer compute what it did"
        )


def _recording(router: Router, streams: dict[int, Tensor], index: int) -> Callable[[Tensor], Tensor]:
    """The router's own score, which keeps what it was given, as the router reads it (B, T, D)."""
    score = router.score

    def record(x: Tensor) -> Tensor:
        read = x.to(torch.promote_types(x.dtype, torch.float32))
        streams[index] = read if router.router_input == "stream" else read * inverse_size(read)[..., None]
        return score(x)

    return record


def _products(x: Tensor, moves: Tensor) -> Tensor:
    """(D + 2, D + 2): the weighted sums of all products of what a router reads (B, T, D), the logarithm of the
    moves (B, T) and 1."""
    wanted = _wanted(moves).clamp(min=1e-9).log()
    weight = torch.ones_like(wanted)
    weight[:, 0] = SINK_WEIGHT * wanted.shape[1]
    rows = torch.cat([x, wanted[..., None], torch.ones_like(wanted)[..., None]], -1) * weight.sqrt()[..., None]
    rows = rows.flatten(0, 1).double()
    return rows.T @ rows


def _least_squares(products: Tensor) -> Tensor:
    """(D,): the weights whose scores come nearest to what was wanted, taken with a variance of 1."""
    number = products[-1, -1]
    means = products[-1] / number
    covariance = products / number - means.outer(means)
    width = len(products) - 2
    size = covariance.diagonal()[:width].mean()
    ridge = RIDGE * size * torch.eye(width, dtype=products.dtype, device=products.device)
    spread = covariance[width, width].sqrt().clamp(min=1e-9)
    weights: Tensor = torch.linalg.solve(covariance[:width, :width] + ridge, covariance[:width, width] / spread)
    return weights


def _wanted(moves: Tensor) -> Tensor:
    """Which tokens a layer should not miss: those that it moves most, and before them the sink, the first of a row."""
    return torch.cat([moves.amax(1, keepdim=True), moves[:, 1:]], 1)


def _moves(model: Any, batch: Tensor, target: Target) -> tuple[Tensor, list[Tensor]]:
    """The loss, and for each layer how far it moves each token (B, T), as a share of the token's own length."""
    moves: list[Tensor] = []
    streams: list[Tensor] = []

    def remember(module: Any, args: Any, kwargs: Any) -> None:
        streams.append(args[0] if args else kwargs["hidden_states"])

    def compare(module: Any, args: Any, kwargs: Any, out: Any) -> None:
        x, y = streams.pop().float(), (out[0] if isinstance(out, tuple) else out).float()
        moves.append((y - x if target == "block" else y).norm(dim=-1) / x.norm(dim=-1).clamp(min=1e-6))

    handles: list[RemovableHandle] = []
    for layer in decoder_layers(model):
        handles.append(layer.register_forward_pre_hook(remember, with_kwargs=True))
        handles.append(layer.get_submodule(PARTS[target]).register_forward_hook(compare, with_kwargs=True))
    try:
        return _loss(model, batch), moves
    finally:
        for handle in handles:
            handle.remove()


def _loss(model: Any, batch: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
    return loss


def _constant(scores: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: scores
