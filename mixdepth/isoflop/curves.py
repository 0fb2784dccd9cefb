"""Loss against size at one budget: a parabola in the logarithm of the size, and its lowest point."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mixdepth.isoflop.estimates import all_but_one

MIN_SIZES = 3
"""The number of points that a parabola needs. With fewer sizes the best one stands for the curve."""
SAME_FLOPS = 0.25
"""The largest distance, in octaves of FLOPs per token, at which two sizes are compared where there is no curve."""
MAX_LOG_SIZE = 100
"""The largest logarithm of a size that a crossing may have. Larger ones would overflow."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A variant at one size and budget, with the losses of its seeds."""

    shape: str
    parameters: int
    flops_per_token: float
    losses: dict[int, float]
    lookahead_losses: dict[int, float]
    capacities: dict[int, list[float] | None]
    """The share of the tokens that the causal rule chose, for each routed layer."""

    def loss(self, seeds: Sequence[int]) -> float:
        """Average the loss over these seeds. A seed may occur more than once."""
        return float(np.mean([self.losses[seed] for seed in seeds]))


class Optimum(NamedTuple):
    """The lowest point of a curve."""

    parameters: float
    loss: float
    is_bracketed: bool
    """Whether it lies within the sizes that were tried. If it does not, this is the best of them."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A variant at one budget, over its sizes, with the seeds that all of them have."""

    budget: float
    variant: str
    points: tuple[Point, ...]
    seeds: list[int]
    num_planned: int
    """The number of sizes in the plan."""

    @property
    def is_ladder(self) -> bool:
        """Whether enough sizes are planned for a parabola. If not, sizes of equal FLOPs are compared."""
        return self.num_planned >= MIN_SIZES

    @property
    def sizes(self) -> list[int]:
        return [point.parameters for point in self.points]

    @property
    def best(self) -> Point:
        """The best size that was tried."""
        return min(self.points, key=lambda point: point.loss(self.seeds))

    def losses(self, seeds: Sequence[int]) -> list[float]:
        """Average the loss of each size over these seeds."""
        return [point.loss(seeds) for point in self.points]

    def optimum(self, seeds: Sequence[int]) -> Optimum:
        """Find the lowest point of the curve through the means over these seeds."""
        return lowest(self.sizes, self.losses(seeds))

    def lowest_loss(self, seeds: Sequence[int]) -> float:
        """Find the lowest loss among the sizes that were tried."""
        return min(self.losses(seeds))

    def is_bracketed(self, seeds: Sequence[int]) -> bool:
        """Whether the optimum lies within the sizes that were tried, with these seeds and without any one of them."""
        subsets = [list(seeds)]
        if len(seeds) > 1:
            subsets += all_but_one(seeds)
        return bool(seeds) and all(self.optimum(subset).is_bracketed for subset in subsets)

    def parabola(self, seeds: Sequence[int]) -> list[float]:
        return parabola(self.sizes, self.losses(seeds))

    def gap(self, seeds: Sequence[int]) -> float:
        """Average the cost of causal routing, relative to the loss with look-ahead, over all sizes."""
        gaps = []
        for point in self.points:
            gaps += [point.losses[seed] / point.lookahead_losses[seed] - 1 for seed in seeds]
        return float(np.mean(gaps))


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two curves of one budget, over seeds that both have."""

    one: Curve
    other: Curve
    seeds: list[int]

    @classmethod
    def of(cls, one: Curve, other: Curve, among: Sequence[int] | None = None) -> "Pair":
        """Pair two curves over the seeds that both have, or those of them that are `among` the given ones."""
        seeds = set(one.seeds) & set(other.seeds)
        if among is not None:
            seeds &= set(among)
        return cls(one=one, other=other, seeds=sorted(seeds))

    @property
    def has_ladders(self) -> bool:
        """Whether optima are compared. If not, sizes of the same cost are."""
        return self.one.is_ladder and self.other.is_ladder

    @property
    def is_bracketed(self) -> bool:
        return self.one.is_bracketed(self.seeds) and self.other.is_bracketed(self.seeds)

    @property
    def obstacle(self) -> str | None:
        """Why the curves cannot be compared; None if they can."""
        if not self.seeds:
            return "they have no seed in common"
        if not self.has_ladders:
            return None if self.same_flops else "they have no size in common"
        if min(len(self.one.points), len(self.other.points)) < MIN_SIZES:
            return "too few sizes are finished"
        # Without a bracket the best size that was tried is a chance find, and the jackknife does not know its error.
        return None if self.is_bracketed else "an optimum is not bracketed"

    @property
    def same_flops(self) -> list[tuple[Point, Point]]:
        """The pairs of sizes that cost about the same."""
        pairs = []
        for point in self.one.points:
            for other in self.other.points:
                octaves = math.log2(point.flops_per_token / other.flops_per_token)
                if abs(octaves) <= SAME_FLOPS:
                    pairs.append((point, other))
        return pairs

    def relative_loss(self, seeds: Sequence[int]) -> float:
        """Compute the loss of `one` relative to that of `other`, minus 1."""
        if self.has_ladders:
            return self.one.optimum(seeds).loss / self.other.optimum(seeds).loss - 1
        ratios = [point.loss(seeds) / other.loss(seeds) for point, other in self.same_flops]
        return float(np.mean(ratios)) - 1

    def relative_best(self, seeds: Sequence[int]) -> float:
        """Compute the same from the best sizes that were tried."""
        return self.one.lowest_loss(seeds) / self.other.lowest_loss(seeds) - 1

    def relative_size(self, seeds: Sequence[int]) -> float:
        """Compute the logarithm of the ratio of optimal sizes."""
        return math.log(self.one.optimum(seeds).parameters / self.other.optimum(seeds).parameters)

    def crossings(self, seeds: Sequence[int]) -> list[float]:
        """Find where the parabolas meet, among the sizes that both curves have."""
        low, high = self._common_sizes()
        difference = np.subtract(self.one.parabola(seeds), self.other.parabola(seeds))  # (3,)
        crossings = []
        for root in np.roots(difference):  # at most two logarithms of sizes
            if abs(root.imag) < 1e-9 and root.real < MAX_LOG_SIZE:
                size = math.exp(root.real)
                if low <= size <= high:
                    crossings.append(size)
        return sorted(crossings)

    def relative_crossing(self, seeds: Sequence[int]) -> float:
        """Compute the logarithm of the size where the parabolas meet, relative to the optimum of `other`.

        It is not a number if they do not meet exactly once.
        """
        crossings = self.crossings(seeds)
        if len(crossings) != 1:
            return math.nan
        return math.log(crossings[0] / self.other.optimum(seeds).parameters)

    def loss_at_smallest(self, seeds: Sequence[int]) -> float:
        """Compare the parabolas at the smallest size that both curves have."""
        smallest, _ = self._common_sizes()
        return self._relative_loss_at(smallest, seeds)

    def loss_at_largest(self, seeds: Sequence[int]) -> float:
        """Compare the parabolas at the largest size that both curves have."""
        _, largest = self._common_sizes()
        return self._relative_loss_at(largest, seeds)

    def _relative_loss_at(self, size: float, seeds: Sequence[int]) -> float:
        one = np.polyval(self.one.parabola(seeds), math.log(size))
        other = np.polyval(self.other.parabola(seeds), math.log(size))
        return float(one / other) - 1

    def _common_sizes(self) -> tuple[float, float]:
        smallest = max(min(self.one.sizes), min(self.other.sizes))
        largest = min(max(self.one.sizes), max(self.other.sizes))
        return smallest, largest


def parabola(sizes: Sequence[float], losses: Sequence[float]) -> list[float]:
    """Fit the loss by a parabola in the logarithm of the size: its coefficients, the square first."""
    coefficients = np.polyfit(np.log(sizes), losses, 2)  # (3,): loss = a x^2 + b x + c, x = log(size)
    return [float(value) for value in coefficients]


def lowest(sizes: Sequence[float], losses: Sequence[float]) -> Optimum:
    """Find the lowest point of the parabola through these points.

    >>> round(lowest([1, 10, 100], [2.0, 1.0, 2.0]).parameters, 6)
    10.0
    """
    if len(sizes) >= MIN_SIZES:
        a, b, c = parabola(sizes, losses)
        # The lowest point of a x^2 + b x + c with a > 0 is at x = -b / (2 a), where it is c - b^2 / (4 a).
        lowest_log = -b / (2 * a) if a > 0 else math.inf
        if math.log(min(sizes)) <= lowest_log <= math.log(max(sizes)):
            return Optimum(math.exp(lowest_log), c - b**2 / (4 * a), True)
    # Without a lowest point among the sizes the best size that was tried stands for it.
    index = int(np.argmin(losses))
    return Optimum(sizes[index], losses[index], False)
