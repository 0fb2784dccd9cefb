"""Means with confidence intervals."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

BLOCK = 32
"""How many neighbouring tokens the bootstrap draws together. Neighbours are similar, so they are not independent."""

MIN_BLOCKS = 8
"""The bootstrap over fewer blocks would give no useful interval."""


class Interval(NamedTuple):
    """A mean with its 95 % confidence interval. The bounds are None where there is no estimate of the error."""

    mean: float
    low: float | None
    high: float | None

    def to_dict(self) -> dict[str, Any]:
        return self._asdict()

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:+.4f}"
        return f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


def interval(values: Sequence[float], weights: Sequence[float]) -> Interval:
    """Compute the weighted mean of independent values with its interval, by the normal approximation.

    >>> interval([1.0, 2.0, 3.0], [1, 1, 1]).mean
    2.0
    """
    number = len(values)
    total = math.fsum(weights)
    shares = [weight / total for weight in weights]
    mean = math.fsum(share * value for share, value in zip(shares, values, strict=True))
    if number < 2:  # a single value says nothing about its own error
        return Interval(mean, None, None)
    # The variance of the mean is sum_i (w_i (x_i - mean))^2, with the correction n / (n - 1).
    pairs = zip(shares, values, strict=True)
    squares = math.fsum((share * (value - mean)) ** 2 for share, value in pairs)
    error = 1.96 * math.sqrt(squares * number / (number - 1))
    return Interval(mean, mean - error, mean + error)


def rank_correlation(x: np.ndarray, y: np.ndarray, draws: int = 1000) -> Interval | None:
    """Compute Spearman's correlation of x (T,) and y (T,), with its interval from a bootstrap over blocks of tokens.

    It is None if x or y does not vary. There is no interval if the tokens are few, or vary too rarely.

    >>> rank_correlation(np.arange(9.0), np.arange(9.0) ** 3)
    Interval(mean=1.0, low=None, high=None)
    """
    ranks = np.stack([_ranks(x), _ranks(y)])  # (2, T)
    if not ranks.std(axis=1).all():
        return None
    value = float(round(np.corrcoef(ranks)[0, 1], 12))
    blocks = np.array_split(ranks, max(1, round(len(x) / BLOCK)), axis=1)  # (2, about BLOCK) each
    if len(blocks) < MIN_BLOCKS:
        return Interval(value, None, None)
    drawn = np.random.default_rng(0).integers(len(blocks), size=(draws, len(blocks)))  # (draws, blocks)
    correlations = []
    for row in drawn:
        sample = np.concatenate([blocks[block] for block in row], axis=1)  # (2, about T)
        if not sample.std(axis=1).all():
            return Interval(value, None, None)
        correlations.append(np.corrcoef(sample)[0, 1])
    low, high = np.quantile(correlations, [0.025, 0.975])
    return Interval(value, float(low), float(high))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return the rank of each value; equal values share the mean of their ranks."""
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[where]
