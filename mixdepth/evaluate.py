"""What a routed model does on held-out text: losses, realised capacity, how well the causal rule foresees.

And `calibrate`, which moves the rule's thresholds so that the realised capacity is the one that was meant.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mixdepth.experts import ExpertLoad, ExpertRouter
from mixdepth.hf import RoutedCausalLM, set_capacity
from mixdepth.router import Chooser, lookahead
from mixdepth.routing import Route, slots, top_k

Batch = Tensor | Mapping[str, Any]
"""Token ids (B, T), or the keyword arguments of the model with them; without `labels` the ids are the labels."""


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


class Calibration(NamedTuple):
    """A model before and after its thresholds were moved."""

    before: Evaluation | None  # None where thresholds had never been estimated
    after: Evaluation

    @property
    def cost(self) -> float:
        """What it costs in loss: nats per token, negative for a gain; against look-ahead if there was no before."""
        return self.after.loss - (self.after.lookahead_loss if self.before is None else self.before.loss)


@torch.no_grad()
def evaluate(model: RoutedCausalLM, batches: Iterable[Batch]) -> Evaluation:
    """Evaluate a routed language model, causally and with look-ahead."""
    _check(model)
    was_training = model.training
    model.eval()
    losses = torch.zeros(3, dtype=torch.float64)  # causal, look-ahead, label tokens
    counts: dict[int, Tensor] = {}
    taken: dict[int, Tensor] = {}
    capacities = [router.capacity for router in model.depth_routers]
    for batch in batches:
        inputs = _inputs(batch)
        num_labels = (inputs["labels"][:, 1:] != -100).sum().item()
        out: Any = model(**inputs, output_routes=True)
        with lookahead(model):
            ahead: Any = model(**inputs)
        losses += torch.tensor([out.lm_loss * num_labels, ahead.lm_loss * num_labels, num_labels])
        for index, route, capacity in zip(_deciding(model), out.routes, capacities, strict=True):
            counts[index] = counts.get(index, 0) + _counts(route, capacity)
        for index, load in _loads(model, out):
            both = torch.cat([load.taken.sum((0, 1)), load.used.sum()[None]]).double()
            taken[index] = taken.get(index, 0) + both
    model.train(was_training)
    if not losses[2]:
        raise ValueError("there is nothing to evaluate on: the batches hold no labels")
    layers = {index: _layer_routing(*values.tolist()) for index, values in counts.items()}
    loads = {index: (values[:-1] / values[-1]).tolist() for index, values in taken.items()}
    return Evaluation((losses[0] / losses[2]).item(), (losses[1] / losses[2]).item(), layers, loads)


@torch.no_grad()
def calibrate(
    model: RoutedCausalLM, batches: Iterable[Batch], capacity: float | list[float] | None = None
) -> Calibration:
    """Set the threshold of each layer so that its causal rule chooses the configured share of these batches,
    or less where scores tie.

    Another `capacity` gives one trained model several speeds. Layer by layer, since a layer's scores depend
    on what earlier layers chose: as many passes over the batches as there are routers. The model then
    keeps its thresholds, and saves them.
    """
    _check(model)
    if model.depth_config.scheme in ("random", "soft"):
        raise ValueError(f"scheme={model.depth_config.scheme!r} has no threshold to set")
    batches = list(batches)
    if not batches:
        raise ValueError("there is nothing to calibrate on: batches is empty")
    routers = [*model.depth_routers, *model.depth_expert_routers]
    is_ready = not any(router.estimates and router.threshold.isnan().any() for router in routers)
    before = evaluate(model, batches) if is_ready else None
    if capacity is not None:
        set_capacity(model, capacity)
    was_training = model.training
    model.eval()
    for router in routers:
        router.threshold.nan_to_num_(0.0)
    for index, router in _in_order(model):
        scores, num_tokens = _scores(model, batches, index, router)  # (A or 1, tokens)
        assert router.capacity is not None
        router.threshold.copy_(_cut(scores, slots(router.capacity, num_tokens)).view(router.threshold.shape))
    model.train(was_training)
    return Calibration(before, evaluate(model, batches))


def _cut(scores: Tensor, k: int) -> Tensor:
    """(A,): what the k highest of the scores (A, tokens) exceed, and the others do not."""
    ranked = scores.sort(dim=1, descending=True).values
    if k >= ranked.shape[1]:
        return ranked[:, -1] - 1
    return (ranked[:, k - 1] + ranked[:, k]) / 2


def _scores(model: RoutedCausalLM, batches: list[Batch], index: int, router: Chooser) -> tuple[Tensor, int]:
    """What the causal rule of a layer compares with its threshold, and of how many tokens it may choose."""
    scores, num_tokens = [], 0
    for batch in batches:
        out: Any = model(**_inputs(batch), output_routes=True)
        if isinstance(router, ExpertRouter):
            load = dict(_loads(model, out)).get(index)
            if load is not None:
                scores.append(load.logits.softmax(-1)[load.used].T)
                num_tokens += int(load.used.sum())
        else:
            route: Route = dict(zip(_deciding(model), out.routes, strict=True))[index]
            guess = route.logits if route.predictor_logits is None else route.predictor_logits
            scores.append(guess[route.candidates][None])
            num_tokens += int(route.real.sum())
    return torch.cat(scores, 1), num_tokens


def _in_order(model: RoutedCausalLM) -> Iterable[tuple[int, Chooser]]:
    """The routers with a threshold, in the order in which a forward pass meets them."""
    found: list[tuple[int, Chooser]] = []
    depth = dict(zip(_deciding(model), model.depth_routers, strict=True))
    experts = dict(zip(model.layers_with_experts, model.depth_expert_routers, strict=True))
    for index in sorted({*depth, *experts}):
        if index in depth and depth[index].capacity < 1:
            found.append((index, depth[index]))
        if index in experts and experts[index].experts_choose:
            found.append((index, experts[index]))
    return found


def _counts(route: Route, capacity: float) -> Tensor:
    """(4,): tokens that were chosen, that top-k would choose, both, and real ones."""
    k = slots(capacity, route.real.sum(1))
    best = top_k(route.logits.masked_fill(~route.candidates, -torch.inf), k) & route.candidates
    return torch.stack([route.mask.sum(), best.sum(), (route.mask & best).sum(), route.real.sum()]).double()


def _layer_routing(chosen: float, best: float, both: float, real: float) -> LayerRouting:
    return LayerRouting(chosen / max(real, 1), both / max(chosen, 1), both / max(best, 1))


def _deciding(model: RoutedCausalLM) -> list[int]:
    return list(model.depth_config.routed_layers(model.config.get_text_config(decoder=True).num_hidden_layers))


def _loads(model: RoutedCausalLM, out: Any) -> list[tuple[int, ExpertLoad]]:
    pairs = zip(model.layers_with_experts, out.loads or (), strict=True)
    return [(index, load) for index, load in pairs if load is not None]


def _inputs(batch: Batch) -> dict[str, Any]:
    inputs = {"input_ids": batch} if isinstance(batch, Tensor) else dict(batch)
    return {"labels": inputs["input_ids"], **inputs}


def _check(model: object) -> None:
    if not isinstance(model, RoutedCausalLM):
        raise ValueError(f"{type(model).__name__} is not a routed language model: call mixdepth.route first")
