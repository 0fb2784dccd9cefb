"""`calibrate`: move the thresholds of the causal rule until the realised capacity is the configured one.

Shapes: A experts (1 for a router of tokens), N tokens of all batches.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mixdepth import schemes
from mixdepth.evaluation.batches import Batch, evaluating, model_inputs
from mixdepth.evaluation.held_out import Evaluation, evaluate, expert_loads
from mixdepth.experts import ExpertRouter, probabilities
from mixdepth.hf.install import set_capacity
from mixdepth.hf.model import RoutedCausalLM, unwrapped
from mixdepth.modes import choosers
from mixdepth.router import Chooser, Router
from mixdepth.routes import Route, slots


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A model before and after its thresholds were moved."""

    before: Evaluation | None
    """None if some threshold had never been estimated, so that the causal rule could not be evaluated."""
    after: Evaluation

    @property
    def cost(self) -> float:
        """The loss after minus the loss before, in nats per token; look-ahead takes the place of a missing before."""
        reference = self.after.lookahead_loss if self.before is None else self.before.loss
        return self.after.loss - reference

    def to_dict(self) -> dict[str, Any]:
        before = None if self.before is None else self.before.to_dict()
        return {"before": before, "after": self.after.to_dict(), "cost": self.cost}


@torch.no_grad()
def calibrate(
    model: RoutedCausalLM, batches: Iterable[Batch], capacity: float | list[float] | None = None
) -> Calibration:
    """Set the threshold of each layer so that its causal rule chooses the configured share of these batches.

    Where scores tie, it chooses less. Another `capacity` gives one trained model several speeds. The layers are
    calibrated in order, because the scores of a layer depend on what earlier layers chose; this takes as many passes
    over the batches as there are routers. The model keeps its new thresholds, and saves them.
    """
    # 1. Check what can be checked before any work is done.
    model = unwrapped(model)
    if not isinstance(model, RoutedCausalLM):
        raise ValueError(f"{type(model).__name__} is not a routed language model: call mixdepth.route first")
    batches = list(batches)
    if not batches:
        raise ValueError("there is nothing to calibrate on: batches is empty")
    if not has_thresholds(model):
        raise ValueError(f"no router of the model has a threshold to set (scheme={model.depth_config.scheme!r})")
    # 2. Evaluate the model as it is, if its thresholds have been estimated.
    old_capacity = model.depth_config.capacity
    old_thresholds = [router.threshold.clone() for router in choosers(model)]
    before = None
    if _is_estimated(model):
        before = evaluate(model, batches)
    # 3. Move the thresholds. After an error the model is as it was.
    try:
        if capacity is not None:
            set_capacity(model, capacity)
        set_thresholds(model, batches)
        return Calibration(before=before, after=evaluate(model, batches))
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
            scores, num_tokens = _scores(model, batches, index, router)  # (A, N)
            assert router.capacity is not None
            if not scores.numel():  # under early exit no token may get this far
                continue
            cut = _cut(scores, slots(router.capacity, num_tokens))  # (A,)
            router.threshold.copy_(cut.view(router.threshold.shape))


def has_thresholds(model: Any) -> bool:
    """Return whether the model has a threshold that could be calibrated."""
    return isinstance(model, RoutedCausalLM) and any(_has_threshold(router) for router in choosers(model))


def _has_threshold(router: Chooser) -> bool:
    if isinstance(router, ExpertRouter):
        return router.experts_choose and router.capacity != 1
    return isinstance(router, Router) and schemes.has_threshold(router.scheme)


def _is_estimated(model: RoutedCausalLM) -> bool:
    """Return whether every threshold that training estimates has a value."""
    return not any(router.estimates and router.threshold.isnan().any() for router in choosers(model))


def _cut(scores: Tensor, k: int) -> Tensor:
    """Return the threshold (A,) that the k highest of the scores (A, N) exceed, and the others do not."""
    ranked = scores.sort(dim=1, descending=True).values  # (A, N)
    if k >= ranked.shape[1]:
        return ranked[:, -1] - 1
    return (ranked[:, k - 1] + ranked[:, k]) / 2


def _scores(model: RoutedCausalLM, batches: list[Batch], index: int, router: Chooser) -> tuple[Tensor, int]:
    """Return the scores (A, N) that a layer compares with its threshold, and the number of tokens that its share is of.

    That number counts all real tokens, also those that left the stack at an earlier exit.
    """
    scores: list[Tensor] = []  # (A, tokens of the batch) each
    num_tokens = 0
    for batch in batches:
        out: Any = model(**model_inputs(batch), output_routes=True)
        if isinstance(router, ExpertRouter):
            load = dict(expert_loads(model, out)).get(index)
            if load is None:
                continue
            scores.append(probabilities(load.logits)[load.used].T)
            num_tokens += int(load.used.sum())
        else:
            route: Route = dict(zip(model.deciding_layers, out.routes, strict=True))[index]
            guess = route.guess  # (B, T)
            scores.append(guess[route.candidates][None])
            num_tokens += int(route.real.sum())
    if not scores:
        return torch.zeros(1, 0), num_tokens
    return torch.cat(scores, 1), num_tokens


def _in_order(model: RoutedCausalLM) -> list[tuple[int, Chooser]]:
    """Return the routers with a threshold and their layers, in the order in which a forward pass meets them."""
    depth: dict[int, Chooser] = dict(zip(model.deciding_layers, model.depth_routers, strict=True))
    experts: dict[int, Chooser] = dict(zip(model.layers_with_experts, model.depth_expert_routers, strict=True))
    routers = []
    for index in sorted({*depth, *experts}):
        for router in (depth.get(index), experts.get(index)):
            if router is not None and router.capacity != 1 and _has_threshold(router):
                routers.append((index, router))
    return routers
