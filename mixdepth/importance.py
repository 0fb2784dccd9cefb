"""How much each layer of a pretrained model matters, so that those are routed that can be spared."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from tqdm import tqdm

from mixdepth.config import Target
from mixdepth.evaluation import evaluating
from mixdepth.hf import route, unroute
from mixdepth.hf.architectures import check_supported, decoder_layers
from mixdepth.router import lookahead

PARTS = {"block": "", "attention": "self_attn", "mlp": "mlp"}
"""The submodule of a layer whose output is what a target adds to the stream; a block's output is the stream itself."""


@torch.no_grad()
def layer_costs(
    model: Any, batches: Iterable[Tensor], capacity: float = 0.5, target: Target = "block"
) -> dict[int, float]:
    """What each layer's absence costs: nats per token by which the loss on these token ids (B, T) rises when that layer
    alone processes only the `capacity` tokens of each row that it moves most.

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
                        router.score = _constant(moves[index])  # type: ignore[method-assign,assignment]
                        losses.append(_loss(routed, batch))
            finally:
                unroute(routed)
            costs[index] = ((torch.stack(losses).cpu() * weights).sum() - before).item()
    return costs


def cheapest(costs: dict[int, float], number: int) -> tuple[int, ...]:
    """The layers that cost least, in order.

    >>> cheapest({0: 0.5, 1: 0.1, 2: 0.3, 3: 0.2}, 2)
    (1, 3)
    """
    return tuple(sorted(sorted(costs, key=costs.__getitem__)[:number]))


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
