"""The sizes of a study's curve: shapes whose cost per token is near a given one."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from mixdepth.isoflop.variants import Variant
from mixdepth.models.flops import count_flops
from mixdepth.models.fresh import make_model
from mixdepth.runs.settings import TrainConfig

OCTAVE = 0.5
"""Between two rungs, in octaves of FLOPs."""


ASPECT_WEIGHT = 0.25
"""What an octave from the aspect counts, against an octave from the rung."""


FARTHEST = 1.0
"""How many octaves beyond the ladder a shape may be."""


FEWEST = 2
"""Times that a model repeats its pattern of dense and routed layers, at least: with one layer that every token passes a
model cannot look up what followed an earlier token, and is another kind of model. See LOG.md, section 5."""


def ladder(sizes: int) -> list[float]:
    """Multiples of the centre.

    >>> [round(rung, 2) for rung in ladder(3)]
    [0.71, 1.0, 1.41]
    """
    return [2 ** (OCTAVE * (i - (sizes - 1) / 2)) for i in range(sizes)]


def shapes_near(
    rungs: Sequence[float], middle: float, variant: Variant, common: TrainConfig, vocab_size: int
) -> list[tuple[int, int]]:
    """For each of the rungs, in FLOPs of a forward pass for each token, a shape near it; no shape twice.

    All have the layers of the shape nearest to the middle and to the variant's aspect.
    """
    costs: dict[tuple[int, int], float] = {}
    for width in itertools.count(16, 16):
        period, logits = _cost(variant, common, width, vocab_size)
        if FEWEST * period + logits > 2 * max(rungs):
            break
        for number in range(FEWEST, math.ceil(2 * max(rungs) / period) + 1):
            costs[number * variant.every, width] = number * period + logits
    nearest = min(costs, key=lambda shape: _distance(shape, costs[shape], middle, variant.aspect), default=(0, 0))
    near = [
        shape
        for shape, cost in sorted(costs.items())
        if shape[0] == nearest[0] and any(abs(math.log2(cost / rung)) <= FARTHEST for rung in rungs)
    ]
    # widths go by 16, and two rungs may be nearest to the same: of each number of rungs the nearest shapes so far
    best: list[tuple[float, tuple[tuple[int, int], ...]]] = [(0.0, ()), *[(math.inf, ())] * len(rungs)]
    for shape in near:
        for number in range(len(rungs), 0, -1):
            apart, shapes = best[number - 1]
            apart += abs(math.log2(costs[shape] / rungs[number - 1]))
            best[number] = min(best[number], (apart, (*shapes, shape)))
    apart, chosen = best[-1]
    if apart == math.inf:
        raise ValueError(
            f"variant {variant.name!r} has no {len(rungs)} shapes of one depth from {min(rungs):.3g} to "
            f"{max(rungs):.3g} FLOPs for each token: raise --centre or the budget, or take fewer --sizes"
        )
    return list(chosen)


def _distance(shape: tuple[int, int], cost: float, rung: float, aspect: float) -> float:
    """In octaves."""
    layers, width = shape
    return abs(math.log2(cost / rung)) + ASPECT_WEIGHT * abs(math.log2(width / layers / aspect))


def _cost(variant: Variant, common: TrainConfig, width: int, vocab_size: int) -> tuple[float, float]:
    """FLOPs for each token, of as many layers as the routing repeats after, and of the logits."""
    own = {**variant.training, "capacity_steps": 0, "depth": variant.depth}
    with torch.device("meta"):
        model = make_model(replace(common, **own, layers=variant.every, width=width), vocab_size)
        count = count_flops(model, common.context)
    logits = count.logits / common.context
    return count.total / common.context - logits, logits
