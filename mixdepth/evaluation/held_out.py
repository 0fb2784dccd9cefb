"""`evaluate`: losses of a model on held-out text, and what its causal routing rule chooses there.

Shapes: B rows of a batch, T tokens of a row, N rows of all batches.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mixdepth.evaluation.batches import IGNORED_LABEL, Batch, evaluating, model_inputs
from mixdepth.evaluation.intervals import Interval, interval
from mixdepth.experts import ExpertLoad
from mixdepth.hf.model import RoutedCausalLM, unwrapped
from mixdepth.modes import lookahead
from mixdepth.routes import Route, slots, top_k


class LayerRouting(NamedTuple):
    """How the choices of a routed layer's causal rule compare with the top k of the same scores."""

    capacity: float
    """The realised capacity: chosen tokens per real token."""
    precision: float
    """The share of the chosen tokens that are in the top k."""
    recall: float
    """The share of the top k that were chosen."""

    @property
    def f1(self) -> float:
        both = self.precision + self.recall
        return 2 * self.precision * self.recall / both if both else 0.0

    def to_dict(self) -> dict[str, float]:
        return {**self._asdict(), "f1": self.f1}


class RowLosses(NamedTuple):
    """The losses of one row in nats per token, and the number of tokens that were predicted."""

    loss: float
    lookahead_loss: float
    num_labels: float


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Losses in nats per token, and the routing of each layer that decides, by its index."""

    loss: float
    """The loss with causal routing, which is how the model samples."""
    lookahead_loss: float
    """The loss with the routing of training, which sees later tokens."""
    layers: dict[int, LayerRouting]
    loads: dict[int, list[float]]
    """The share of tokens that each expert took, in layers whose experts are routed (`experts=...`)."""
    rows: tuple[RowLosses, ...]
    """The losses of each row of the batches."""

    @property
    def gap(self) -> Interval:
        """The cost of causal routing: causal minus look-ahead loss, with its interval over the rows."""
        differences = [row.loss - row.lookahead_loss for row in self.rows]
        return interval(differences, [row.num_labels for row in self.rows])

    def to_dict(self) -> dict[str, Any]:
        rows = [row._asdict() for row in self.rows]
        return {
            "loss": self.loss,
            "lookahead_loss": self.lookahead_loss,
            "causal_minus_lookahead": self.gap.to_dict(),
            "layers": {index: layer.to_dict() for index, layer in self.layers.items()},
            "loads": self.loads,
            "rows": rows,
        }


@torch.no_grad()
def evaluate(model: Any, batches: Iterable[Batch]) -> Evaluation:
    """Evaluate a language model with causal routing and with look-ahead. For a dense model the two are the same."""
    model = unwrapped(model)
    with evaluating(model):
        return _evaluate(model, batches)


def _evaluate(model: Any, batches: Iterable[Batch]) -> Evaluation:
    rows: list[Tensor] = []  # (B, 3) each
    counts: dict[int, Tensor] = {}  # (4,) for each layer that decides
    expert_counts: dict[int, Tensor] = {}  # (experts + 1,) for each layer with routed experts
    # 1. Run each batch causally and with look-ahead, and add up what the layers choose. All of it stays on the device.
    for batch in batches:
        inputs = model_inputs(batch)
        labels = inputs.pop("labels")  # (B, T)
        num_labels = (labels[:, 1:] != IGNORED_LABEL).sum(1)  # (B,)
        if not num_labels.any():
            continue
        if isinstance(model, RoutedCausalLM):
            causal: Any = model(**inputs, output_routes=True)
            with lookahead(model):
                ahead: Any = model(**inputs)
            _add_counts(model, causal, counts, expert_counts)
        else:
            causal = model(**inputs, use_cache=False)
            ahead = causal
        causal_losses = _row_losses(causal, labels)  # (B,)
        lookahead_losses = _row_losses(ahead, labels)  # (B,)
        rows.append(torch.stack([causal_losses, lookahead_losses, num_labels], 1))
    if not rows:
        raise ValueError("there is nothing to evaluate on: the batches hold no labels")
    # 2. Average over labels, not over rows. Rows without labels do not count.
    table = torch.cat(rows).cpu()  # (N, 3): causal loss, look-ahead loss, number of labels
    table = table[table[:, 2] > 0]
    loss, lookahead_loss = (table[:, :2] * table[:, 2:]).sum(0) / table[:, 2].sum()
    # 3. Turn counts into shares.
    layers = {index: layer_routing(*values.tolist()) for index, values in counts.items()}
    loads = {index: (values[:-1] / values[-1]).tolist() for index, values in expert_counts.items()}
    row_losses = tuple(RowLosses(*row) for row in table.tolist())
    return Evaluation(
        loss=loss.item(), lookahead_loss=lookahead_loss.item(), layers=layers, loads=loads, rows=row_losses
    )


def _row_losses(out: Any, labels: Tensor) -> Tensor:
    """Compute the cross-entropy of each row per label: (B,) float64."""
    logits = out.logits[:, :-1].float()  # (B, T - 1, V)
    targets = labels[:, 1:].to(out.logits.device)  # (B, T - 1)
    losses = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED_LABEL, reduction="none")
    num_labels = (targets != IGNORED_LABEL).sum(1)  # (B,)
    return losses.double().sum(1) / num_labels.clamp(min=1)


def _add_counts(model: RoutedCausalLM, out: Any, counts: dict[int, Tensor], expert_counts: dict[int, Tensor]) -> None:
    """Add what each layer of a causal pass chose to `counts`, and what each expert took to `expert_counts`."""
    capacities = [router.capacity for router in model.depth_routers]
    for index, route, capacity in zip(model.deciding_layers, out.routes, capacities, strict=True):
        counts[index] = counts.get(index, 0) + _counts(route, capacity)
    for index, load in expert_loads(model, out):
        tokens_of_experts = load.processed.sum((0, 1))  # (experts,)
        num_tokens = load.used.sum()[None]  # (1,)
        both = torch.cat([tokens_of_experts, num_tokens]).double()
        expert_counts[index] = expert_counts.get(index, 0) + both


def _counts(route: Route, capacity: float) -> Tensor:
    """Count the chosen tokens, those that top-k would choose, those in both, and the real ones: (4,)."""
    best = top_of_same_scores(route, capacity)  # (B, T)
    both = route.mask & best  # (B, T)
    return torch.stack([route.mask.sum(), best.sum(), both.sum(), route.real.sum()]).double()


def top_of_same_scores(route: Route, capacity: float) -> Tensor:
    """Return which tokens look-ahead would choose by the scores of this route: (B, T) bool."""
    k = slots(capacity, route.real.sum(1))  # (B,)
    scores = route.logits.masked_fill(~route.candidates, -torch.inf)  # (B, T)
    return top_k(scores, k) & route.candidates


def layer_routing(chosen: float, best: float, both: float, real: float) -> LayerRouting:
    """Compare choices by their counts: chosen tokens, tokens of the top k, tokens in both, and real tokens."""
    return LayerRouting(chosen / max(real, 1), both / max(chosen, 1), both / max(best, 1))


def expert_loads(model: RoutedCausalLM, out: Any) -> list[tuple[int, ExpertLoad]]:
    """Return what the experts of a pass took, with the index of each layer whose experts are routed."""
    pairs = zip(model.layers_with_experts, out.loads or (), strict=True)
    return [(index, load) for index, load in pairs if load is not None]
