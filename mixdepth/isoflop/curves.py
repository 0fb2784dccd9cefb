"""Loss against size at one budget: a parabola in the logarithm of the size, and its lowest point."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mixdepth.isoflop.estimates import all_but_one

MIN_SIZES = 3
"""Points that a parabola takes; with fewer sizes the best one stands for the curve."""
SAME_FLOPS = 0.25
"""Octaves of FLOPs for each token within which two sizes are compared where there is no curve."""


class Point(NamedTuple):
    """A variant at one size and budget: the losses of its seeds."""

    shape: str
    parameters: int
    flops_per_token: float
    losses: dict[int, float]
    lookahead_losses: dict[int, float]
    capacities: dict[int, list[float] | None]
    """Realised by the causal rule, for each routed layer."""

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
    num_planned: int
    """Sizes that it is planned with."""

    @property
    def is_ladder(self) -> bool:
        """Whether these are to be enough for a parabola; if not, sizes of equal FLOPs are compared."""
        return self.num_planned >= MIN_SIZES

    @property
    def best(self) -> Point:
        """The best size that was tried."""
        return min(self.points, key=lambda point: point.loss(self.seeds))

    def optimum(self, seeds: Sequence[int]) -> Optimum:
        """Of the means over these seeds."""
        return lowest([point.parameters for point in self.points], [point.loss(seeds) for point in self.points])

    def lowest_loss(self, seeds: Sequence[int]) -> float:
        """Of the sizes that were tried."""
        return min(point.loss(seeds) for point in self.points)

    def is_bracketed(self, seeds: Sequence[int]) -> bool:
        """By the mean over these seeds, and without any one of them."""
        subsets = [seeds, *(all_but_one(seeds) if len(seeds) > 1 else [])]
        return bool(seeds) and all(self.optimum(subset).is_bracketed for subset in subsets)

    def parabola(self, seeds: Sequence[int]) -> list[float]:
        return parabola([point.parameters for point in self.points], [point.loss(seeds) for point in self.points])

    def gap(self, seeds: Sequence[int]) -> float:
        """What causal routing costs, relative to the loss with look-ahead, over all sizes."""
        gaps = [point.losses[seed] / point.lookahead_losses[seed] - 1 for point in self.points for seed in seeds]
        return float(np.mean(gaps))


class Pair(NamedTuple):
    """Two curves of one budget, over seeds that both have."""

    one: Curve
    other: Curve
    seeds: list[int]

    @classmethod
    def of(cls, one: Curve, other: Curve, among: Sequence[int] | None = None) -> "Pair":
        both = set(one.seeds) & set(other.seeds)
        return cls(one, other, sorted(both if among is None else both & set(among)))

    @property
    def has_ladders(self) -> bool:
        """Whether optima are compared; else sizes that cost the same."""
        return self.one.is_ladder and self.other.is_ladder

    @property
    def is_bracketed(self) -> bool:
        return self.one.is_bracketed(self.seeds) and self.other.is_bracketed(self.seeds)

    @property
    def obstacle(self) -> str | None:
        """Why there is nothing to compare."""
        if not self.seeds:
            return "they have no seed in common"
        if self.has_ladders and min(len(self.one.points), len(self.other.points)) < MIN_SIZES:
            return "too few sizes are finished"
        if self.has_ladders:  # the best of the sizes that were tried is a chance find, whose error no jackknife knows
            return None if self.is_bracketed else "an optimum is not bracketed"
        return None if self.same_flops else "they have no size in common"

    @property
    def same_flops(self) -> list[tuple[Point, Point]]:
        pairs = ((a, b) for a in self.one.points for b in self.other.points)
        return [(a, b) for a, b in pairs if abs(math.log2(a.flops_per_token / b.flops_per_token)) <= SAME_FLOPS]

    def relative_loss(self, seeds: Sequence[int]) -> float:
        """The loss of one relative to the other's."""
        if self.has_ladders:
            return self.one.optimum(seeds).loss / self.other.optimum(seeds).loss - 1
        return float(np.mean([a.loss(seeds) / b.loss(seeds) for a, b in self.same_flops])) - 1

    def relative_best(self, seeds: Sequence[int]) -> float:
        """The loss of the best size of one that was tried, relative to the other's."""
        return self.one.lowest_loss(seeds) / self.other.lowest_loss(seeds) - 1

    def relative_size(self, seeds: Sequence[int]) -> float:
        """The logarithm of the ratio of optimal sizes."""
        return math.log(self.one.optimum(seeds).parameters / self.other.optimum(seeds).parameters)

    def crossings(self, seeds: Sequence[int]) -> list[float]:
        """The sizes, among those that both have, where the parabolas meet."""
        low, high = self._common_sizes()
        roots = np.roots(np.subtract(self.one.parabola(seeds), self.other.parabola(seeds)))
        found = [math.exp(root.real) for root in roots if abs(root.imag) < 1e-9 and root.real < 100]
        return sorted(size for size in found if low <= size <= high)

    def relative_crossing(self, seeds: Sequence[int]) -> float:
        """The logarithm of the size where the parabolas meet, relative to the other's optimum; not a number where they
        do not meet exactly once."""
        crossings = self.crossings(seeds)
        return math.log(crossings[0] / self.other.optimum(seeds).parameters) if len(crossings) == 1 else math.nan

    def loss_at_smallest(self, seeds: Sequence[int]) -> float:
        """The parabola's loss relative to the other's, at the smallest size that both have."""
        return self._relative_loss_at(self._common_sizes()[0], seeds)

    def loss_at_largest(self, seeds: Sequence[int]) -> float:
        return self._relative_loss_at(self._common_sizes()[1], seeds)

    def _relative_loss_at(self, size: float, seeds: Sequence[int]) -> float:
        one, other = (np.polyval(curve.parabola(seeds), math.log(size)) for curve in (self.one, self.other))
        return float(one / other) - 1

    def _common_sizes(self) -> tuple[float, float]:
        sizes = [[point.parameters for point in curve.points] for curve in (self.one, self.other)]
        return max(map(min, sizes)), min(map(max, sizes))


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
