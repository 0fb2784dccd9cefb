"""Numbers over seeds. A statistic is a function of seeds: what comes out of the means over them.

Its value is that of all seeds; its standard error that of the jackknife, which leaves out one seed at a time. Of a
plain mean over seeds these are the mean and its standard error, and the tests are t tests.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

DRAWS = 2000
LEVEL = 0.05

Statistic = Callable[[Sequence[int]], float]


class Estimate(NamedTuple):
    """A statistic of all seeds; without intervals where there is one seed, or where some seeds give no number."""

    value: float
    t_interval: list[float] | None
    """95 %, by the jackknife."""
    bootstrap_interval: list[float] | None
    """The middle 95 % of draws with replacement: with few seeds these are their extremes, and it is too narrow."""
    by_seed: dict[int, float]
    """What each seed alone would have said; without those that say nothing."""


def estimate(statistic: Statistic, seeds: Sequence[int]) -> Estimate:
    """
    >>> losses = {0: 1.0, 1: 2.0, 2: 3.0}
    >>> [round(edge, 2) for edge in estimate(lambda seeds: sum(losses[s] for s in seeds) / len(seeds), [0, 1, 2])[1]]
    [-0.48, 4.48]
    """
    value, alone = statistic(seeds), {seed: statistic([seed]) for seed in seeds}
    by_seed = {seed: found for seed, found in alone.items() if math.isfinite(found)}
    if len(seeds) < 2:
        return Estimate(value, None, None, by_seed)
    half = float(scipy_stats().t.ppf(1 - LEVEL / 2, len(seeds) - 1)) * standard_error(statistic, seeds)
    drawn = np.percentile([statistic(draw) for draw in _draws(seeds)], [2.5, 97.5])
    return Estimate(value, _interval(value - half, value + half), _interval(*drawn), by_seed)


def _interval(low: float, high: float) -> list[float] | None:
    return [float(low), float(high)] if math.isfinite(low) and math.isfinite(high) else None


def standard_error(statistic: Statistic, seeds: Sequence[int]) -> float:
    without = [statistic(rest) for rest in all_but_one(seeds)]
    return float(np.std(without)) * math.sqrt(len(seeds) - 1)


def all_but_one(seeds: Sequence[int]) -> list[list[int]]:
    return [[seed for seed in seeds if seed != left_out] for left_out in seeds]


def p_value(statistic: Statistic, seeds: Sequence[int], edge: float = 0.0, alternative: str = "two-sided") -> float:
    """Of the statistic being `edge`, or beyond it; not a number where the seeds do not differ."""
    error = standard_error(statistic, seeds)
    if error < 1e-12:  # rounding
        return math.nan
    t, tail = (statistic(seeds) - edge) / error, scipy_stats().t(len(seeds) - 1)
    match alternative:
        case "less":
            return float(tail.cdf(t))
        case "greater":
            return float(tail.sf(t))
    return 2 * float(tail.sf(abs(t)))


def _draws(seeds: Sequence[int]) -> list[list[int]]:
    """Seeds with replacement, the same draws for every statistic of these seeds."""
    generator = np.random.default_rng(0)
    return [list(np.array(seeds)[generator.integers(len(seeds), size=len(seeds))]) for _ in range(DRAWS)]


def scipy_stats() -> Any:
    try:
        from scipy import stats
    except ImportError as error:
        raise ValueError("intervals and tests need SciPy: pip install 'mixdepth[study]'") from error
    return stats
