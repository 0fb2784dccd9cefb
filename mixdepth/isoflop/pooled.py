"""What two curves differ by if single runs, not seeds, are what varies.

Runs of one seed share the order of the text. If that favours neither variant, each run is as good as another seed: the
scatter of all of them tells how far one run is off, with many more degrees of freedom than there are seeds.
Shapes: P sizes of both curves, S seeds.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mixdepth.isoflop.curves import Curve, Pair
from mixdepth.isoflop.estimates import LEVEL, scipy_stats

NUDGE = 1e-5
"""Nats by which a size is moved to see what the difference owes to it."""


class Pooled(NamedTuple):
    """The relative loss of a pair, by the scatter of its runs."""

    interval: list[float]
    """95 %."""
    noise: float
    """How far a run is off, in nats: the standard deviation about the means of its size and of its seed."""
    p_of_seeds: float
    """That seeds favour neither variant; where it is small they do, and the interval is too narrow."""


def pooled(pair: Pair) -> Pooled | None:
    """None where there is one seed, or no optimum of both; and where runs do not scatter."""
    if len(pair.seeds) < 2 or not (pair.has_ladders and pair.is_bracketed):
        return None
    stats, num_seeds = scipy_stats(), len(pair.seeds)
    losses = [_losses(curve, pair.seeds) for curve in (pair.one, pair.other)]
    scatter = _centred(np.concatenate(losses))  # (P, S)
    degrees = (len(scatter) - 1) * (num_seeds - 1)
    variance = float((scatter**2).sum()) / degrees
    if variance < 1e-20:  # rounding
        return None
    # of means over seeds; what a seed adds to all runs alike moves both curves, and hardly their ratio
    error = math.sqrt(variance / num_seeds) * float(np.linalg.norm(_slopes(pair)))
    half = float(stats.t.ppf(1 - LEVEL / 2, degrees)) * error
    value = pair.relative_loss(pair.seeds)
    apart = sum(float((_centred(own) ** 2).sum()) for own in losses)  # with seeds of each variant's own
    rest = degrees - (num_seeds - 1)
    f = (variance * degrees - apart) / (num_seeds - 1) / (apart / rest)
    return Pooled([value - half, value + half], math.sqrt(variance), float(stats.f.sf(f, num_seeds - 1, rest)))


def _losses(curve: Curve, seeds: list[int]) -> NDArray[np.float64]:
    """(P of this curve, S)"""
    return np.array([[point.losses[seed] for seed in seeds] for point in curve.points])


def _centred(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Without the means of sizes and of seeds."""
    centred: NDArray[np.float64] = losses - losses.mean(1, keepdims=True) - losses.mean(0) + losses.mean()
    return centred


def _slopes(pair: Pair) -> list[float]:
    """(P,): how far the relative loss moves with the mean of each size."""
    moved = [pair._replace(one=curve) for curve in _nudged(pair.one)]
    moved += [pair._replace(other=curve) for curve in _nudged(pair.other)]
    before = pair.relative_loss(pair.seeds)
    return [(after.relative_loss(pair.seeds) - before) / NUDGE for after in moved]


def _nudged(curve: Curve) -> list[Curve]:
    """The curve with each of its sizes moved in turn."""
    nudged = []
    for index, point in enumerate(curve.points):
        moved = point._replace(losses={seed: loss + NUDGE for seed, loss in point.losses.items()})
        nudged.append(curve._replace(points=(*curve.points[:index], moved, *curve.points[index + 1 :])))
    return nudged
