"""Loss against size at one budget: a parabola in the logarithm of the size, and its lowest point."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MIN_SIZES = 3
"""Points that a parabola takes; with fewer sizes the best one stands for the curve."""


class Point(NamedTuple):
    """A variant at one size and budget: the losses of its seeds."""

    shape: str
    parameters: int
    flops_per_token: float
    losses: dict[int, float]
    lookahead_losses: dict[int, float]

    def loss(self, seeds: Sequence[int]) -> float:
        """The mean over these seeds, which may come more than once."""
        return float(np.mean([self.losses[seed] for seed in seeds]))


class Optimum(NamedTuple):
    """The lowest point of a curve."""

    parameters: float
    loss: float
    is_bracketed: bool
    """Whether it lies within the sizes that were tried; if not, this is the best of them."""


class Curve(NamedTuple):
    """A variant at one budget, over its sizes, with the seeds that all of them have."""

    budget: float
    variant: str
    points: tuple[Point, ...]
    seeds: list[int]

    @property
    def best(self) -> Point:
        """The best size that was tried."""
        return min(self.points, key=lambda point: point.loss(self.seeds))

    def optimum(self, seeds: Sequence[int]) -> Optimum:
        """Of the means over these seeds."""
        return lowest([point.parameters for point in self.points], [point.loss(seeds) for point in self.points])

    def is_bracketed(self, seeds: Sequence[int]) -> bool:
        """By the mean over these seeds, and by each of them."""
        return bool(seeds) and all(self.optimum(some).is_bracketed for some in (seeds, *([seed] for seed in seeds)))

    def parabola(self, seeds: Sequence[int]) -> list[float]:
        return parabola([point.parameters for point in self.points], [point.loss(seeds) for point in self.points])

    def gap(self, seed: int) -> float:
        """What causal routing costs, relative to the loss with look-ahead, over all sizes."""
        gaps = [point.losses[seed] / point.lookahead_losses[seed] - 1 for point in self.points]
        return float(np.mean(gaps))


def parabola(sizes: Sequence[float], losses: Sequence[float]) -> list[float]:
    """Coefficients of the loss in the logarithm of the size, the square first."""
    return [float(value) for value in np.polyfit(np.log(sizes), losses, 2)]


def lowest(sizes: Sequence[float], losses: Sequence[float]) -> Optimum:
    """The lowest point of the parabola through these.

    >>> round(lowest([1, 10, 100], [2.0, 1.0, 2.0]).parameters, 6)
    10.0
    """
    if len(sizes) >= MIN_SIZES:
        a, b, c = parabola(sizes, losses)
        lowest_log = -b / (2 * a) if a > 0 else math.inf
        if math.log(min(sizes)) <= lowest_log <= math.log(max(sizes)):
            return Optimum(math.exp(lowest_log), c - b**2 / (4 * a), True)
    index = int(np.argmin(losses))
    return Optimum(sizes[index], losses[index], False)
