"""Statistics over seeds.

A statistic is a function of seeds: it is computed from the means over them. Its value is that of all seeds. Its
standard error is that of the jackknife, which leaves out one seed at a time. For a plain mean over seeds these are the
mean and its standard error, and the tests are t tests.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

NUM_DRAWS = 2000
"""The number of bootstrap samples."""
LEVEL = 0.05
"""The level of the tests. Intervals have the coverage 1 - LEVEL."""
ROUNDING = 1e-12
"""A standard error below this is rounding: the seeds do not differ."""

Statistic = Callable[[Sequence[int]], float]


class Estimate(NamedTuple):
    """A statistic of all seeds. It has no intervals for one seed, or where some seeds give no number."""

    value: float
    t_interval: list[float] | None
    """The 95 % interval of Student's t with the jackknife's standard error."""
    bootstrap_interval: list[float] | None
    """The middle 95 % of draws with replacement. With few seeds these are the extremes, and the interval is too
    narrow."""
    by_seed: dict[int, float]
    """The statistic of each seed alone, without the seeds that give no number."""


def estimate(statistic: Statistic, seeds: Sequence[int]) -> Estimate:
    """Estimate a statistic with its intervals.

    >>> losses = {0: 1.0, 1: 2.0, 2: 3.0}
    >>> mean = estimate(lambda seeds: sum(losses[seed] for seed in seeds) / len(seeds), [0, 1, 2])
    >>> [round(bound, 2) for bound in mean.t_interval]
    [-0.48, 4.48]
    """
    value = statistic(seeds)
    by_seed = {}
    for seed in seeds:
        alone = statistic([seed])
        if math.isfinite(alone):
            by_seed[seed] = alone
    if len(seeds) < 2:
        return Estimate(value, None, None, by_seed)
    half_width = float(scipy_stats().t.ppf(1 - LEVEL / 2, len(seeds) - 1)) * standard_error(statistic, seeds)
    drawn = [statistic(draw) for draw in _draws(seeds)]  # (NUM_DRAWS,)
    low, high = np.percentile(drawn, [2.5, 97.5])
    t_interval = _interval(value - half_width, value + half_width)
    return Estimate(value, t_interval, _interval(low, high), by_seed)


def _interval(low: float, high: float) -> list[float] | None:
    if not math.isfinite(low) or not math.isfinite(high):
        return None
    return [float(low), float(high)]


def standard_error(statistic: Statistic, seeds: Sequence[int]) -> float:
    """Compute the jackknife's standard error, sqrt((n - 1) / n * sum of squared deviations)."""
    without_one = [statistic(rest) for rest in all_but_one(seeds)]  # (n,)
    return float(np.std(without_one)) * math.sqrt(len(seeds) - 1)


def all_but_one(seeds: Sequence[int]) -> list[list[int]]:
    """List the seeds without each of them in turn."""
    subsets = []
    for left_out in seeds:
        subsets.append([seed for seed in seeds if seed != left_out])
    return subsets


def p_value(statistic: Statistic, seeds: Sequence[int], bound: float = 0.0, alternative: str = "two-sided") -> float:
    """Test whether a statistic differs from `bound`, or is less or greater than it.

    The p value is not a number if the seeds do not differ.
    """
    error = standard_error(statistic, seeds)
    if error < ROUNDING:
        return math.nan
    t = (statistic(seeds) - bound) / error
    distribution = scipy_stats().t(len(seeds) - 1)
    match alternative:
        case "less":
            return float(distribution.cdf(t))
        case "greater":
            return float(distribution.sf(t))
    return 2 * float(distribution.sf(abs(t)))


def _draws(seeds: Sequence[int]) -> list[list[int]]:
    """Draw seeds with replacement. Every statistic of the same seeds gets the same draws."""
    generator = np.random.default_rng(0)
    all_seeds = np.array(seeds)  # (n,)
    draws = []
    for _ in range(NUM_DRAWS):
        indices = generator.integers(len(seeds), size=len(seeds))  # (n,)
        draws.append(list(all_seeds[indices]))
    return draws


def scipy_stats() -> Any:
    """Import SciPy's statistics, which are an extra of the package."""
    try:
        from scipy import stats
    except ImportError as error:
        raise ValueError("intervals and tests need SciPy: pip install 'mixdepth[study]'") from error
    return stats
