"""How much each layer of a pretrained model matters, and to which tokens: what can be spared is measured.

Shapes: B rows of a batch, T tokens of a row.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from tqdm import tqdm

from mixdepth.config import Target
from mixdepth.evaluation.batches import evaluating
from mixdepth.hf.architectures import check_supported, decoder_layers, target_module
from mixdepth.hf.install import route, unroute
from mixdepth.modes import given_scores, lookahead


@torch.no_grad()
def layer_costs(
    model: Any, batches: Iterable[Tensor], capacity: float = 0.5, target: Target = "block"
) -> dict[int, float]:
    """Measure what the absence of each layer costs, in nats per token, on these token ids (B, T).

    It is the rise of the loss when that layer alone processes only the `capacity` tokens of each row that it moves
    most, and the first token (see `fit_routers`). How far a layer moves a token is known only after it ran, so this is
    not a routing rule; it is what a router can hope to learn. The model is left as it was.
    """
    check_supported(model)
    batches = list(batches)
    if not batches:
        raise ValueError("there is nothing to measure on: batches is empty")
    settings: Any = {"capacity": capacity, "target": target, "gate": "one", "causal": "threshold"}
    with evaluating(model):
        # 1. Measure the dense model: its loss, and how far its layers move each token.
        dense_losses = []  # scalars, one for each batch
        moves_of_batches = []
        for batch in batches:
            loss, moves = moves_of_layers(model, batch, target)
            dense_losses.append(loss)
            moves_of_batches.append(moves)
        num_predicted = [float(batch.shape[0] * (batch.shape[1] - 1)) for batch in batches]
        shares = torch.tensor(num_predicted)  # (batches,)
        shares /= shares.sum()
        dense_loss = (torch.stack(dense_losses).cpu() * shares).sum()
        # 2. Route one layer after the other, by how far it moves tokens, and measure the loss again.
        costs = {}
        for index in tqdm(range(len(decoder_layers(model))), desc="measuring layers", unit="layer", leave=False):
            routed = route(model, layers=(index,), **settings)
            losses = []
            try:
                with lookahead(routed):
                    for batch, moves in zip(batches, moves_of_batches, strict=True):
                        with given_scores(routed, {index: importance_of(moves[index])}):
                            losses.append(_loss(routed, batch))
            finally:
                unroute(routed)
            costs[index] = ((torch.stack(losses).cpu() * shares).sum() - dense_loss).item()
    if not all(map(math.isfinite, costs.values())):
        raise ValueError("the loss of the model on this text is not a number: its layers cannot be measured")
    return costs


def cheapest(costs: dict[int, float], number: int) -> tuple[int, ...]:
    """Return the layers that cost least, in the order of the stack.

    >>> cheapest({0: 0.5, 1: 0.1, 2: 0.3, 3: 0.2}, 2)
    (1, 3)
    """
    by_cost = sorted(costs, key=costs.__getitem__)
    return tuple(sorted(by_cost[:number]))


def importance_of(moves: Tensor) -> Tensor:
    """Return how much a layer should not miss each token (B, T), from how far it moves it (B, T).

    The first token of a row comes before all others. It hardly moves, but it is the sink that other tokens attend to
    when there is nothing else to attend to; without it attention breaks.
    """
    sink = moves.amax(1, keepdim=True)  # (B, 1)
    return torch.cat([sink, moves[:, 1:]], 1)


def moves_of_layers(model: Any, batch: Tensor, target: Target) -> tuple[Tensor, list[Tensor]]:
    """Return the loss on a batch (B, T), and how far each layer moves each token, relative to its norm (B, T)."""
    moves: list[Tensor] = []
    streams: list[Tensor] = []

    def remember_input(module: Any, args: Any, kwargs: Any) -> None:
        streams.append(args[0] if args else kwargs["hidden_states"])

    def compare_output(module: Any, args: Any, kwargs: Any, out: Any) -> None:
        output = out[0] if isinstance(out, tuple) else out
        x = streams.pop().float()  # (B, T, D)
        y = output.float()  # (B, T, D)
        move = y - x if target == "block" else y
        moves.append(move.norm(dim=-1) / x.norm(dim=-1).clamp(min=1e-6))

    handles: list[RemovableHandle] = []
    for layer in decoder_layers(model):
        part = target_module(layer, target)
        handles.append(layer.register_forward_pre_hook(remember_input, with_kwargs=True))
        handles.append(part.register_forward_hook(compare_output, with_kwargs=True))
    try:
        return _loss(model, batch), moves
    finally:
        for handle in handles:
            handle.remove()


def _loss(model: Any, batch: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
    return loss
