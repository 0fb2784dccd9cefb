"""`calibrate`: thresholds at which the realised capacity is the one that was meant."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mixdepth.evaluation.held_out import Batch, Evaluation, _checked, _inputs, _loads, evaluate, evaluating
from mixdepth.experts import ExpertRouter, probabilities
from mixdepth.hf.install import set_capacity
from mixdepth.hf.model import RoutedCausalLM
from mixdepth.modes import choosers
from mixdepth.router import Chooser, Router
from mixdepth.routes import Route, slots


class Calibration(NamedTuple):
    """A model before and after its thresholds were moved."""

    before: Evaluation | None  # None where thresholds had never been estimated
    after: Evaluation

    @property
    def cost(self) -> float:
        """What it costs in loss: nats per token, negative for a gain; against look-ahead if there was no before."""
        return self.after.loss - (self.after.lookahead_loss if self.before is None else self.before.loss)


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
    model = _checked(model)
    batches = list(batches)
    if not batches:
        raise ValueError("there is nothing to calibrate on: batches is empty")
    if not has_thresholds(model):
        raise ValueError(f"no router of the model has a threshold to set (scheme={model.depth_config.scheme!r})")
    old_capacity, old_thresholds = model.depth_config.capacity, [r.threshold.clone() for r in choosers(model)]
    is_ready = not any(router.estimates and router.threshold.isnan().any() for router in choosers(model))
    before = evaluate(model, batches) if is_ready else None
    try:
        if capacity is not None:
            set_capacity(model, capacity)
        set_thresholds(model, batches)
        return Calibration(before, evaluate(model, batches))
    except BaseException:
        for router, threshold in zip(choosers(model), old_thresholds, strict=True):
            router.threshold.copy_(threshold)
        if capacity is not None and model.depth_routers:
            set_capacity(model, old_capacity)
        raise


@torch.no_grad()
def set_thresholds(model: RoutedCausalLM, batches: list[Batch]) -> None:
    """Set the threshold of each layer to where the configured share of these batches lies above it."""
    for router in choosers(model):
        router.threshold.nan_to_num_(0.0)
    with evaluating(model):
        for index, router in _in_order(model):
            scores, num_tokens = _scores(model, batches, index, router)  # (A or 1, tokens)
            assert router.capacity is not None
            if scores.numel():  # else nobody gets there
                cut = _cut(scores, slots(router.capacity, num_tokens))
                router.threshold.copy_(cut.view(router.threshold.shape))


def has_thresholds(model: Any) -> bool:
    """Whether there is something to calibrate."""
    return isinstance(model, RoutedCausalLM) and any(_has_threshold(router) for router in choosers(model))


def _has_threshold(router: Chooser) -> bool:
    if isinstance(router, ExpertRouter):
        return router.experts_choose and router.capacity != 1
    return isinstance(router, Router) and router.scheme not in ("random", "soft")


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
                scores.append(probabilities(load.logits)[load.used].T)
                num_tokens += int(load.used.sum())
        else:
            route: Route = dict(zip(model.deciding_layers, out.routes, strict=True))[index]
            guess = route.logits if route.predictor_logits is None else route.predictor_logits
            scores.append(guess[route.candidates][None])
            num_tokens += int(route.real.sum())
    return torch.cat(scores, 1) if scores else torch.zeros(1, 0), num_tokens


def _in_order(model: RoutedCausalLM) -> Iterable[tuple[int, Chooser]]:
    """The routers with a threshold, in the order in which a forward pass meets them."""
    depth: dict[int, Chooser] = dict(zip(model.deciding_layers, model.depth_routers, strict=True))
    experts: dict[int, Chooser] = dict(zip(model.layers_with_experts, model.depth_expert_routers, strict=True))
    for index in sorted({*depth, *experts}):
        for router in (depth.get(index), experts.get(index)):
            if router is not None and router.capacity != 1 and _has_threshold(router):
                yield index, router
