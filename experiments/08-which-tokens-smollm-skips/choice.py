"""Before any tuning: does it matter which tokens skip the routed blocks of SmolLM2-135M?

The blocks of `experiments/07-smollm/smollm.py` process a share of the tokens, chosen in several ways:

- random;
- move: those that the block moves most, known only after it ran;
- gain: those that lower the loss most when they pass, to first order (the gradient at the block's output times what the
  block adds), known only after the text was read to its end;
- fitted: by a linear router that was fitted to `move` on the tuning text, by least squares;
- ..., sink: the same, with the first token of each window at the top, which others attend to when nothing else fits.

All choose with look-ahead, so these are bounds for routers, not models to sample from.

    python choice.py text/ --models models/smollm

The README of experiments/ says which PYTHONPATH a script needs.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe, header, row
from smollm import CONTEXT, DOMAINS, layers_to_route
from torch import Tensor

import mixdepth
from mixdepth.data.corpus import Windows

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("text", type=Path, help="the folder of texts")
parser.add_argument("--models", type=Path, default=Path("models/smollm"), help="where models are")

HELD_OUT, FITTED_ON = 8, 24  # windows
RIDGE = 0.01
SHAPES = ((12, 0.5), (12, 0.75), (8, 0.25))  # blocks, capacity

Scores = dict[int, Tensor]  # (B, T) for each routed layer


def read(model: Any, layers: tuple[int, ...], batch: Tensor) -> tuple[float, Scores, Scores, Scores]:
    """The loss, and for each layer the stream scaled to 1 (B, T, D), how far the layer moves each token, and by how
    much that lowers the loss, to first order."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def watch(index: int) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any, out: Any) -> None:
            y = out[0] if isinstance(out, tuple) else out
            y.retain_grad()
            seen[index] = (args[0].detach(), y)

        return hook

    handles = [model.model.layers[i].register_forward_hook(watch(i), with_kwargs=True) for i in layers]
    loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    model.zero_grad()
    for handle in handles:
        handle.remove()
    streams, moves, gains = {}, {}, {}
    for index, (x, y) in seen.items():
        update, size = y.detach() - x, x.norm(dim=-1)
        streams[index] = x * (x.shape[-1] ** 0.5 / size)[..., None]
        moves[index] = update.norm(dim=-1) / size
        gains[index] = -(y.grad * update).sum(-1)
    return loss.item(), streams, moves, gains


def fitted(streams: Tensor, moves: Tensor) -> Tensor:
    """The weights (D,) of the linear router that comes nearest to the logarithm of the moves."""
    x, y = streams.flatten(0, -2).double(), moves.flatten().double().log()
    x, y = x - x.mean(0), y - y.mean()
    eye = torch.eye(x.shape[1], dtype=x.dtype)
    return torch.linalg.solve(x.T @ x + RIDGE * len(x) * eye, x.T @ y).float()


def with_sink(scores: Scores) -> Scores:
    return {i: torch.cat([score.amax(1, keepdim=True), score[:, 1:]], 1) for i, score in scores.items()}


@contextmanager
def choosing(model: Any, layers: tuple[int, ...], capacity: float) -> Iterator[Callable[[Tensor, Scores], float]]:
    """A function from token ids and scores to the loss when the highest scores pass."""
    routed = mixdepth.route(model, layers=layers, capacity=capacity, gate="one", causal="threshold")

    def loss(batch: Tensor, scores: Scores) -> float:
        with mixdepth.given_scores(routed, {index: scores[index] for index in layers}):
            return routed(input_ids=batch, labels=batch, use_cache=False).loss.item()

    try:
        with torch.no_grad(), mixdepth.lookahead(routed):
            yield loss
    finally:
        mixdepth.unroute(routed)


def windows(text: Path, models: Path, folder: str, number: int) -> list[Tensor]:
    corpus = mixdepth.load_corpus(str(text / folder), str(models / "original"))
    tokens = np.concatenate([corpus.train.tokens, corpus.validation.tokens])
    return list(Windows(tokens, CONTEXT).spread(number).batches(4))


def main(text: Path, models: Path) -> None:
    torch.manual_seed(0)
    layers = layers_to_route(text, models, "block", 12)
    model = mixdepth.load(str(models / "original")).model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.get_input_embeddings().weight.requires_grad_(True)  # so that gradients reach every layer's output
    known = [read(model, layers, batch)[1:3] for batch in windows(text, models, "train", FITTED_ON)]
    streams = {i: torch.cat([found[i] for found, _ in known]) for i in layers}
    plain = {i: fitted(streams[i], torch.cat([moves[i] for _, moves in known])) for i in layers}
    sunk = {i: fitted(streams[i], torch.cat([with_sink(moves)[i] for _, moves in known])) for i in layers}
    print(f"{describe()}\n{HELD_OUT} held-out windows of {CONTEXT} tokens; correlation of fitted and real moves\n")
    header(
        "text", "blocks", "original", "random", "move", "move, sink", "gain", "fitted", "fitted, sink", "correlation"
    )
    for domain in DOMAINS:
        batches = windows(text, models, domain, HELD_OUT)
        found = [read(model, layers, batch) for batch in batches]
        original = statistics.mean(loss for loss, *_ in found)
        guesses = [[{i: x[i] @ weights[i] for i in layers} for _, x, _, _ in found] for weights in (plain, sunk)]
        ways = [
            [{i: torch.rand(batch.shape) for i in layers} for batch in batches],
            [moves for _, _, moves, _ in found],
            [with_sink(moves) for _, _, moves, _ in found],
            [gains for _, _, _, gains in found],
            *guesses,
        ]
        fits = [
            torch.corrcoef(torch.stack([guess[i].flatten(), moves[i].log().flatten()]))[0, 1].item()
            for guess, (_, _, moves, _) in zip(guesses[0], found, strict=True)
            for i in layers
        ]
        for number, capacity in SHAPES:
            with choosing(model, layers_to_route(text, models, "block", number), capacity) as loss:
                rises = [
                    statistics.mean(loss(batch, scores) for batch, scores in zip(batches, way, strict=True)) - original
                    for way in ways
                ]
            cells = [f"+{rise:.2f}" for rise in rises]
            row(domain, f"{number}, {capacity:.0%}", f"{original:.3f}", *cells, f"{min(fits):.2f} to {max(fits):.2f}")


if __name__ == "__main__":
    options = parser.parse_args()
    main(options.text, options.models)
