"""The difference of two curves, if single runs and not seeds are the unit of randomness.

Runs of one seed share the order of the text. If a seed favours neither variant, each run counts as much as another
seed: the scatter of all runs gives the error of one, with many more degrees of freedom than there are seeds.
Shapes: P sizes of both curves, S seeds.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mixdepth.isoflop.curves import Curve, Pair
from mixdepth.isoflop.estimates import LEVEL, scipy_stats

NUDGE = 1e-5
"""The change of a size's loss, in nats, by which the slope of the difference is measured."""
ROUNDING = 1e-20
"""A variance below this is rounding: the runs do not scatter."""


class Pooled(NamedTuple):
    """The relative loss of a pair, by the scatter of its runs."""

    interval: list[float]
    """The 95 % interval."""
    noise: float
    """The standard deviation of a run about the means of its size and of its seed, in nats."""
    p_of_seeds: float
    """The p value of the hypothesis that no seed favours a variant. If it is small, the interval is too narrow."""


def pooled(pair: Pair) -> Pooled | None:
    """Estimate a pair's relative loss by the scatter of its runs.

    There is no estimate for one seed, without an optimum on both sides, and where runs do not scatter.
    """
    if len(pair.seeds) < 2 or not (pair.has_ladders and pair.is_bracketed):
        return None
    stats, num_seeds = scipy_stats(), len(pair.seeds)

    # 1. The variance of a run: what remains without the means of sizes and of seeds, which both variants share.
    losses = [_losses(curve, pair.seeds) for curve in (pair.one, pair.other)]
    scatter = _centred(np.concatenate(losses))  # (P, S)
    degrees = (len(scatter) - 1) * (num_seeds - 1)
    variance = float((scatter**2).sum()) / degrees
    if variance < ROUNDING:
        return None

    # 2. The error of the relative loss, a function of the means over seeds. A seed that shifts all runs by the same
    #    amount moves both curves, and hardly their ratio.
    error = math.sqrt(variance / num_seeds) * float(np.linalg.norm(_slopes(pair)))
    half_width = float(stats.t.ppf(1 - LEVEL / 2, degrees)) * error
    value = pair.relative_loss(pair.seeds)
    interval = [value - half_width, value + half_width]

    # 3. The F test of the assumption, an analysis of variance: do seed effects of each variant explain more?
    squares_by_variant = [float((_centred(of_curve) ** 2).sum()) for of_curve in losses]
    unexplained = sum(squares_by_variant)
    rest = degrees - (num_seeds - 1)
    f = (variance * degrees - unexplained) / (num_seeds - 1) / (unexplained / rest)
    p_of_seeds = float(stats.f.sf(f, num_seeds - 1, rest))
    return Pooled(interval, math.sqrt(variance), p_of_seeds)


def _losses(curve: Curve, seeds: list[int]) -> NDArray[np.float64]:
    rows = []
    for point in curve.points:
        rows.append([point.losses[seed] for seed in seeds])
    return np.array(rows)  # (P of this curve, S)


def _centred(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Take away the means of sizes and of seeds."""
    centred: NDArray[np.float64] = losses - losses.mean(1, keepdims=True) - losses.mean(0) + losses.mean()
    return centred  # (P, S)


def _slopes(pair: Pair) -> list[float]:
    """Measure how far the relative loss moves with the mean of each size: P numbers."""
    nudged_pairs = [replace(pair, one=curve) for curve in _nudged(pair.one)]
    nudged_pairs += [replace(pair, other=curve) for curve in _nudged(pair.other)]
    # The relative loss is no formula in the means, so its derivative is a difference quotient.
    before = pair.relative_loss(pair.seeds)
    return [(after.relative_loss(pair.seeds) - before) / NUDGE for after in nudged_pairs]


def _nudged(curve: Curve) -> list[Curve]:
    """Make copies of the curve, each with the losses of one size moved."""
    nudged_curves = []
    for index, point in enumerate(curve.points):
        losses = {seed: loss + NUDGE for seed, loss in point.losses.items()}
        points = [*curve.points]
        points[index] = replace(point, losses=losses)
        nudged_curves.append(replace(curve, points=tuple(points)))
    return nudged_curves
