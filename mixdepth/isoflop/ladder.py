"""The sizes of a curve: model shapes whose cost per token is near a given one.

A ladder is a list of rungs, multiples of a central cost, half an octave apart. Costs are FLOPs of a forward pass per
token. All shapes of a ladder have the same number of layers, and their width changes.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from mixdepth.isoflop.variants import Variant
from mixdepth.models.flops import count_flops
from mixdepth.models.fresh import make_model
from mixdepth.runs.settings import TrainConfig

OCTAVES_PER_RUNG = 0.5
"""The distance between two rungs, in octaves of FLOPs."""
ASPECT_WEIGHT = 0.25
"""The cost of an octave away from the variant's aspect, relative to that of an octave away from the rung."""
MAX_OCTAVES = 1.0
"""How many octaves beyond the ladder a shape may be."""
WIDTH_STEP = 16
"""The widths that are tried are multiples of this, the width of a head."""
MIN_PERIODS = 2
"""The least number of repetitions of the pattern of dense and routed layers.

A model with a single dense layer cannot look up what followed an earlier token, and does not belong on the same curve.
See experiments/05-study-settings.
"""

Shape = tuple[int, int]
"""The number of layers, and the width."""


def ladder(sizes: int) -> list[float]:
    """List the rungs, as multiples of the centre.

    >>> [round(rung, 2) for rung in ladder(3)]
    [0.71, 1.0, 1.41]
    """
    middle = (sizes - 1) / 2
    return [2 ** (OCTAVES_PER_RUNG * (index - middle)) for index in range(sizes)]


def shapes_near(
    rungs: Sequence[float], middle: float, variant: Variant, common: TrainConfig, vocab_size: int
) -> list[Shape]:
    """Find a shape near each of the rungs, in FLOPs of a forward pass per token. No shape is used twice.

    All shapes have as many layers as the one that is nearest to the middle and to the variant's aspect.
    """
    costs = _costs(max(rungs), variant, common, vocab_size)
    layers = 0
    if costs:
        nearest = min(costs, key=lambda shape: _distance(shape, costs[shape], middle, variant.aspect))
        layers = nearest[0]
    near = []  # by width, and so by cost
    for shape, cost in sorted(costs.items()):
        if shape[0] == layers and _is_near_a_rung(cost, rungs):
            near.append(shape)
    shapes = _assign(near, costs, rungs)
    if shapes is None:
        raise ValueError(
            f"variant {variant.name!r} has no {len(rungs)} shapes of one depth from {min(rungs):.3g} to "
            f"{max(rungs):.3g} FLOPs for each token: raise --centre or the budget, or take fewer --sizes"
        )
    return shapes


def _costs(highest: float, variant: Variant, common: TrainConfig, vocab_size: int) -> dict[Shape, float]:
    """Compute the cost of every shape up to about twice the highest rung."""
    costs: dict[Shape, float] = {}
    width = WIDTH_STEP
    while True:
        of_period, of_logits = _cost(variant, common, width, vocab_size)
        if MIN_PERIODS * of_period + of_logits > 2 * highest:
            return costs
        max_periods = math.ceil(2 * highest / of_period)
        for num_periods in range(MIN_PERIODS, max_periods + 1):
            shape = (num_periods * variant.every, width)
            costs[shape] = num_periods * of_period + of_logits
        width += WIDTH_STEP


def _assign(near: Sequence[Shape], costs: dict[Shape, float], rungs: Sequence[float]) -> list[Shape] | None:
    """Choose one shape for each rung, in order, with the least sum of distances; None if there are too few shapes.

    Two rungs may be nearest to the same shape, so this is a dynamic programme over the shapes: `best[n]` has the
    smallest sum of distances of the first n rungs to n of the shapes so far, and those shapes.
    """
    best: list[tuple[float, tuple[Shape, ...]]] = [(math.inf, ())] * (len(rungs) + 1)
    best[0] = (0.0, ())
    for shape in near:
        # From the last rung down, so that no shape is used for two rungs.
        for num_rungs in range(len(rungs), 0, -1):
            distance, shapes = best[num_rungs - 1]
            distance += _octaves(costs[shape], rungs[num_rungs - 1])
            best[num_rungs] = min(best[num_rungs], (distance, (*shapes, shape)))
    distance, chosen = best[-1]
    if distance == math.inf:
        return None
    return list(chosen)


def _octaves(cost: float, rung: float) -> float:
    return abs(math.log2(cost / rung))


def _is_near_a_rung(cost: float, rungs: Sequence[float]) -> bool:
    return any(_octaves(cost, rung) <= MAX_OCTAVES for rung in rungs)


def _distance(shape: Shape, cost: float, rung: float, aspect: float) -> float:
    """Measure how far a shape is from a rung and from an aspect, in octaves."""
    layers, width = shape
    return _octaves(cost, rung) + ASPECT_WEIGHT * abs(math.log2(width / layers / aspect))


def _cost(variant: Variant, common: TrainConfig, width: int, vocab_size: int) -> tuple[float, float]:
    """Count the FLOPs per token of one period of the routing pattern, and of the logits."""
    # Capacities that fall change the cost of early steps, not that of the trained model.
    settings = {**variant.training, "capacity_steps": 0, "depth": variant.depth}
    config = replace(common, **settings, layers=variant.every, width=width)
    with torch.device("meta"):
        model = make_model(config, vocab_size)
        count = count_flops(model, common.context)
    # The logits cost the same whatever the number of layers, so they are not part of a period.
    of_logits = count.logits / common.context
    return count.total / common.context - of_logits, of_logits
