"""Intervals by the scatter of runs: they hold what they promise, and say when they do not."""

import math

import numpy as np
import pytest

from mixdepth.isoflop.curves import Curve, Pair, Point
from mixdepth.isoflop.estimates import estimate
from mixdepth.isoflop.pooled import pooled

SIZES = [1e5, 1.5e5, 2e5, 3e5, 4e5]
SEEDS = [0, 1, 2]


def draw(generator, noise=0.01, favour=0.0, gain=-0.01, seeds=SEEDS):
    """A pair whose optima differ by `gain`; each seed has its own mean, and favours one by a normal `favour`."""
    common = 0.02 * generator.normal(size=len(seeds))
    curves = []
    for best, loss in ((2.5e5, 1.2 * (1 + gain)), (1.8e5, 1.2)):
        own = common + favour * generator.normal(size=len(seeds))
        points = []
        for size in SIZES:
            values = loss + 0.1 * math.log(size / best) ** 2 + own + noise * generator.normal(size=len(seeds))
            losses = {seed: float(value) for seed, value in zip(seeds, values, strict=True)}
            point = Point(
                shape="1x16",
                parameters=int(size),
                flops_per_token=2 * size,
                losses=losses,
                lookahead_losses=losses,
                capacities=dict.fromkeys(seeds),
            )
            points.append(point)
        curve = Curve(budget=1e13, variant="variant", points=tuple(points), seeds=seeds, num_planned=len(points))
        curves.append(curve)
    return Pair.of(*curves)


def found_of(pairs):
    found = [(pair, result) for pair in pairs if (result := pooled(pair)) is not None]
    assert len(found) > 0.9 * len(pairs)  # now and then an optimum is not bracketed
    return found


def test_95_of_100_intervals_hold_the_truth_and_they_are_narrower_than_those_by_seeds():
    generator = np.random.default_rng(0)
    found = found_of([draw(generator) for _ in range(400)])
    held = np.mean([result.interval[0] < -0.01 < result.interval[1] for _, result in found])
    assert 0.92 < held < 0.98  # 0.95, with a standard error of 0.011
    assert np.median([result.noise for _, result in found]) == pytest.approx(0.01, rel=0.05)
    assert np.mean([result.p_of_seeds < 0.1 for _, result in found]) == pytest.approx(0.1, abs=0.045)
    widths = [np.ptp(result.interval) for _, result in found]
    by_seeds = [np.ptp(estimate(pair.relative_loss, pair.seeds).t_interval) for pair, _ in found[:40]]
    assert np.median(widths) < 0.7 * np.median(by_seeds)


def test_seeds_that_favour_a_variant_are_found():
    generator = np.random.default_rng(0)
    found = found_of([draw(generator, favour=0.03) for _ in range(100)])
    assert np.mean([result.p_of_seeds < 0.05 for _, result in found]) > 0.8
    held = np.mean([result.interval[0] < -0.01 < result.interval[1] for _, result in found])
    assert held < 0.7  # too narrow, as p says


def test_the_p_of_seeds_is_that_of_an_analysis_of_variance():
    from scipy import stats

    pair = draw(np.random.default_rng(3))
    y = np.array(
        [[point.losses[seed] for seed in SEEDS] for curve in (pair.one, pair.other) for point in curve.points]
    )  # (10, 3)

    def unexplained(seeds_of_each):
        columns = [np.repeat(np.eye(10)[i], 3) for i in range(10)]
        for rows in seeds_of_each:
            columns += [np.outer(rows, np.eye(3)[s]).ravel() for s in range(3)]
        x = np.stack(columns, 1)
        residual = y.ravel() - x @ np.linalg.lstsq(x, y.ravel(), rcond=None)[0]
        return residual @ residual

    one, both = np.repeat([1.0, 0.0], 5), np.ones(10)
    shared, by_variant = unexplained([both]), unexplained([one, both - one])
    result = pooled(pair)
    assert result.noise == pytest.approx(math.sqrt(shared / 18))
    assert result.p_of_seeds == pytest.approx(stats.f.sf((shared - by_variant) / 2 / (by_variant / 16), 2, 16))


def test_where_nothing_scatters_there_is_nothing_to_tell():
    assert pooled(draw(np.random.default_rng(0), noise=0.0)) is None
    assert pooled(draw(np.random.default_rng(0), seeds=[0])) is None
