"""What a routed model does on held-out text: losses, realised capacity, how well the causal rule foresees.

And `calibrate`, which moves the rule's thresholds so that the realised capacity is the one that was meant.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mixdepth.experts import ExpertLoad
from mixdepth.hf.model import RoutedCausalLM, unwrapped
from mixdepth.modes import lookahead
from mixdepth.routes import Route, slots, top_k

Batch = Tensor | Mapping[str, Any]
"""Token ids (B, T), or the model's keyword arguments; without `labels` the ids that are not padding are the labels."""


class LayerRouting(NamedTuple):
    """What a routed layer's causal rule chose, against the top k of the same scores."""

    capacity: float  # realised: chosen tokens per real token
    precision: float  # of the chosen tokens, how many are in the top k
    recall: float  # of the top k, how many were chosen

    @property
    def f1(self) -> float:
        both = self.precision + self.recall
        return 2 * self.precision * self.recall / both if both else 0.0


class Evaluation(NamedTuple):
    """Losses in nats per token, and the routing of each layer that decides, by its index."""

    loss: float
    """With causal routing: what sampling will do."""
    lookahead_loss: float
    """With the routing of training, which sees later tokens."""
    layers: dict[int, LayerRouting]
    loads: dict[int, list[float]]
    """The share of tokens that each expert took, in layers whose experts are routed (`experts=...`)."""
    rows: tuple["Row", ...]
    """The losses of each row of the batches."""

    @property
    def gap(self) -> "Interval":
        """What causal routing costs: causal minus look-ahead loss, with its interval over the rows."""
        return interval([row.loss - row.lookahead_loss for row in self.rows], [row.num_labels for row in self.rows])


class Row(NamedTuple):
    """The losses of a row, in nats per token, and how many tokens were to be foretold."""

    loss: float
    lookahead_loss: float
    num_labels: float


class Interval(NamedTuple):
    """A mean with its 95 % confidence interval."""

    mean: float
    low: float | None  # None: a single value says nothing of how sure it is
    high: float | None


def interval(values: Sequence[float], weights: Sequence[float]) -> Interval:
    """The weighted mean of independent values, by the normal approximation.

    >>> interval([1.0, 2.0, 3.0], [1, 1, 1]).mean
    2.0
    """
    number, shares = len(values), [weight / math.fsum(weights) for weight in weights]
    mean = math.fsum(share * value for share, value in zip(shares, values, strict=True))
    squares = math.fsum((share * (value - mean)) ** 2 for share, value in zip(shares, values, strict=True))
    if number < 2:
        return Interval(mean, None, None)
    error = 1.96 * math.sqrt(squares * number / (number - 1))
    return Interval(mean, mean - error, mean + error)


@torch.no_grad()
def evaluate(model: Any, batches: Iterable[Batch]) -> Evaluation:
    """Evaluate a language model, causally and with look-ahead. Of a dense model the two are the same."""
    model = unwrapped(model)
    with evaluating(model):
        return _evaluate(model, batches)


def _evaluate(model: Any, batches: Iterable[Batch]) -> Evaluation:
    rows: list[Tensor] = []
    counts: dict[int, Tensor] = {}
    taken: dict[int, Tensor] = {}
    for batch in batches:
        inputs = _inputs(batch)
        labels = inputs.pop("labels")
        if not (labels[:, 1:] != -100).any():
            continue
        if isinstance(model, RoutedCausalLM):
            out: Any = model(**inputs, output_routes=True)
            with lookahead(model):
                ahead: Any = model(**inputs)
            _count(model, out, counts, taken)
        else:
            out = ahead = model(**inputs, use_cache=False)
        rows.append(
            torch.stack([_row_losses(out, labels), _row_losses(ahead, labels), (labels[:, 1:] != -100).sum(1)], 1)
        )
    if not rows:
        raise ValueError("there is nothing to evaluate on: the batches hold no labels")
    table = torch.cat(rows).cpu()  # (N, 3)
    table = table[table[:, 2] > 0]
    loss, ahead_loss = (table[:, :2] * table[:, 2:]).sum(0) / table[:, 2].sum()
    layers = {index: layer_routing(*values.tolist()) for index, values in counts.items()}
    loads = {index: (values[:-1] / values[-1]).tolist() for index, values in taken.items()}
    return Evaluation(loss.item(), ahead_loss.item(), layers, loads, tuple(Row(*row) for row in table.tolist()))


def _row_losses(out: Any, labels: Tensor) -> Tensor:
    """(B,) float64: cross-entropy of each row, per label."""
    logits, targets = out.logits[:, :-1].float(), labels[:, 1:].to(out.logits.device)
    losses = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-100, reduction="none")  # (B, T - 1)
    return losses.double().sum(1) / (targets != -100).sum(1).clamp(min=1)


def _count(model: RoutedCausalLM, out: Any, counts: dict[int, Tensor], taken: dict[int, Tensor]) -> None:
    """Add what the layers of a causal pass have chosen."""
    capacities = [router.capacity for router in model.depth_routers]
    for index, route, capacity in zip(model.deciding_layers, out.routes, capacities, strict=True):
        counts[index] = counts.get(index, 0) + _counts(route, capacity)
    for index, load in _loads(model, out):
        both = torch.cat([load.taken.sum((0, 1)), load.used.sum()[None]]).double()
        taken[index] = taken.get(index, 0) + both


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode, and afterwards the mode that was."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _counts(route: Route, capacity: float) -> Tensor:
    """(4,): tokens that were chosen, that top-k would choose, both, and real ones."""
    best = top_of_same_scores(route, capacity)
    return torch.stack([route.mask.sum(), best.sum(), (route.mask & best).sum(), route.real.sum()]).double()


def top_of_same_scores(route: Route, capacity: float) -> Tensor:
    """(B, T) bool: what look-ahead would choose by the scores of this route."""
    k = slots(capacity, route.real.sum(1))
    return top_k(route.logits.masked_fill(~route.candidates, -torch.inf), k) & route.candidates


def layer_routing(chosen: float, best: float, both: float, real: float) -> LayerRouting:
    """From the tokens that were chosen, that top-k would choose, both, and all real ones."""
    return LayerRouting(chosen / max(real, 1), both / max(chosen, 1), both / max(best, 1))


def _loads(model: RoutedCausalLM, out: Any) -> list[tuple[int, ExpertLoad]]:
    pairs = zip(model.layers_with_experts, out.loads or (), strict=True)
    return [(index, load) for index, load in pairs if load is not None]


def _inputs(batch: Batch) -> dict[str, Any]:
    inputs = {"input_ids": batch} if isinstance(batch, Tensor) else dict(batch)
    if inputs.get("labels") is None:
        if inputs.get("input_ids") is None:
            raise ValueError("a batch without input_ids needs labels")
        labels, mask = inputs["input_ids"], inputs.get("attention_mask")
        inputs["labels"] = labels if mask is None or mask.ndim > 2 else labels.masked_fill(mask == 0, -100)
    return inputs


def _checked(model: Any) -> RoutedCausalLM:
    model = unwrapped(model)
    if not isinstance(model, RoutedCausalLM):
        raise ValueError(f"{type(model).__name__} is not a routed language model: call mixdepth.route first")
    return model
