"""Fit a study: the optima of its curves, their differences, and tests of the claims.

The unit of randomness is the seed, which variants share. A curve is a parabola in the logarithm of the size, through
the means over the seeds; its lowest point is the optimum.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from mixdepth.data.corpus import HELD_OUT
from mixdepth.isoflop.claims import tested
from mixdepth.isoflop.curves import Curve, Optimum, Pair, Point
from mixdepth.isoflop.estimates import estimate
from mixdepth.isoflop.pooled import pooled
from mixdepth.isoflop.results import (
    BestResult,
    CurveResult,
    Fit,
    LeftOut,
    OptimumResult,
    PairResult,
    PointResult,
)
from mixdepth.isoflop.sealed import sealed_losses
from mixdepth.isoflop.study import FITS, Cell, Losses, Study
from mixdepth.isoflop.variants import parse_variant

Key = tuple[float, str]
"""The budget and the variant of a curve."""


def fit(folder: str | Path, split: str = "validation") -> Fit:
    """Fit the finished cells of a study, and write fit.json.

    `split="test"` uses the losses on the test text, by which nothing was chosen; each cell measured them when it ended.
    It writes fit-test.json, once, when everything is finished and decided. After that it only shows what was written.
    """
    if split not in HELD_OUT:
        raise ValueError(f"split must be one of {', '.join(HELD_OUT)}, not {split!r}")
    study = Study.read(folder)
    path = study.folder / FITS[split]
    if split == "test" and path.exists():
        return Fit.read(path, "restore it: the test text is opened once")

    # 1. Which cells are finished? The test text is opened when all of them are.
    finished = [cell for cell in study.cells if study.is_finished(cell)]
    if not finished:
        raise ValueError(f"no cell of the study in {str(folder)!r} is finished: mixdepth isoflop run {folder}")
    unsettled = [cell for cell in study.cells if not study.is_settled(cell)]
    if split == "test" and unsettled:
        raise ValueError(
            f"{len(unsettled)} cells are not finished: the test text is opened once, when all is done and decided"
        )

    # 2. Their losses, and the curves through those that count. `reasons` says why the others do not.
    losses, reasons = _losses(study, finished, split)
    counted = [cell for cell in finished if cell.name in losses]
    curves = _curves(study, counted, losses, reasons)

    # 3. Fit, compare and test.
    pairs = [Pair.of(curve, dense) for curve, dense in _against_dense(curves.values())]
    fitted = Fit(
        split=split,
        finished=len(finished),
        planned=len(study.cells),
        curves=[_curve_result(curve) for curve in curves.values()],
        comparisons=[_pair_result(pair) for pair in pairs],
        tests=tested(study.hypotheses, curves),
        left_out=[LeftOut(cell=name, reason=reason) for name, reason in reasons.items()],
    )

    # 4. Write them, and gather the cells that are not in cells.jsonl yet.
    study.gather()
    fitted.write(path)
    return fitted


def _losses(study: Study, finished: list[Cell], split: str) -> tuple[dict[str, Losses], dict[str, str]]:
    """Read the losses of each cell that counts; and the reasons for which the others do not."""
    reasons: dict[str, str] = {}
    for cell in study.cells:
        failure = study.failure(cell)
        if failure is not None:
            reasons[cell.name] = failure.message
    losses: dict[str, Losses] = {}
    for cell in finished:
        if cell.name in reasons:
            continue
        if split == "validation":
            losses[cell.name] = study.losses(cell)
            continue
        on_test_text = sealed_losses(study, cell)
        if on_test_text is None:
            reasons[cell.name] = "it has no loss on the test text, and its weights are gone"
        else:
            losses[cell.name] = on_test_text
    return losses, reasons


def _curves(study: Study, cells: list[Cell], losses: dict[str, Losses], reasons: dict[str, str]) -> dict[Key, Curve]:
    """Make a curve of each variant at each budget. Cells that are left out of it are added to `reasons`."""
    by_curve: dict[Key, dict[str, list[Cell]]] = {}
    for cell in cells:
        by_shape = by_curve.setdefault((cell.budget, cell.variant), {})
        by_shape.setdefault(cell.shape, []).append(cell)
    planned_shapes: dict[Key, set[str]] = {}
    for cell in study.cells:
        planned_shapes.setdefault((cell.budget, cell.variant), set()).add(cell.shape)
    curves = {}
    for key, by_shape in by_curve.items():
        budget, variant = key
        seeds = _common_seeds(by_shape, reasons)  # a curve takes the same seeds at all of its sizes
        points = [_point(same_shape, seeds, losses, reasons) for same_shape in by_shape.values()]
        points.sort(key=lambda point: point.parameters)
        curves[key] = Curve(
            budget=budget,
            variant=variant,
            points=tuple(points),
            seeds=seeds,
            num_planned=len(planned_shapes[key]),
        )
    return curves


def _common_seeds(by_shape: dict[str, list[Cell]], reasons: dict[str, str]) -> list[int]:
    """Find the seeds that all sizes have. While there are none, drop the size with the fewest seeds."""
    while True:
        seeds = {cell.seed for same_shape in by_shape.values() for cell in same_shape}
        for same_shape in by_shape.values():
            seeds &= {cell.seed for cell in same_shape}
        if seeds:
            return sorted(seeds)
        fewest = min(by_shape, key=lambda shape: len(by_shape[shape]))
        for cell in by_shape.pop(fewest):
            reasons[cell.name] = "its size has too few seeds"


def _point(cells: list[Cell], seeds: list[int], losses: dict[str, Losses], reasons: dict[str, str]) -> Point:
    """Make a point of the cells of one size, with the seeds of the curve."""
    causal: dict[int, float] = {}
    lookahead: dict[int, float] = {}
    capacities: dict[int, list[float] | None] = {}
    for cell in cells:
        if cell.seed not in seeds:
            reasons[cell.name] = "other sizes lack its seed"
            continue
        of_cell = losses[cell.name]
        causal[cell.seed] = of_cell.causal
        lookahead[cell.seed] = of_cell.lookahead
        capacities[cell.seed] = of_cell.capacities
    first = cells[0]  # cells of one size differ in the seed alone
    return Point(
        shape=first.shape,
        parameters=first.parameters,
        flops_per_token=first.flops_per_token,
        losses=causal,
        lookahead_losses=lookahead,
        capacities=capacities,
    )


def _against_dense(curves: Iterable[Curve]) -> list[tuple[Curve, Curve]]:
    """Pair each routed curve with the first dense one of its budget."""
    dense: dict[float, Curve] = {}
    routed: list[Curve] = []
    for curve in curves:
        if parse_variant(curve.variant).depth is None:
            dense.setdefault(curve.budget, curve)
        else:
            routed.append(curve)
    return [(curve, dense[curve.budget]) for curve in routed if curve.budget in dense]


def _curve_result(curve: Curve) -> CurveResult:
    optimum = curve.optimum(curve.seeds)
    return CurveResult(
        budget=curve.budget,
        variant=curve.variant,
        seeds=curve.seeds,
        points=[_point_result(point, curve.seeds) for point in curve.points],
        best=_best_result(curve.best, curve.seeds),
        optimum=_optimum_result(curve, optimum),
        parabola=curve.parabola(curve.seeds) if optimum.is_bracketed else None,
    )


def _point_result(point: Point, seeds: list[int]) -> PointResult:
    return PointResult(
        shape=point.shape,
        parameters=point.parameters,
        flops_per_token=point.flops_per_token,
        losses=point.losses,
        lookahead_losses=point.lookahead_losses,
        capacities=point.capacities,
        loss=point.loss(seeds),
    )


def _best_result(best: Point, seeds: list[int]) -> BestResult:
    losses = [best.losses[seed] for seed in seeds]
    lookahead_losses = [best.lookahead_losses[seed] for seed in seeds]
    std = None
    if len(losses) > 1:
        std = float(np.std(losses, ddof=1))  # of the population that the seeds are drawn from
    return BestResult(
        shape=best.shape,
        parameters=best.parameters,
        flops_per_token=best.flops_per_token,
        loss=best.loss(seeds),
        std=std,
        lookahead_loss=float(np.mean(lookahead_losses)),
        capacities=_mean_capacities([best.capacities[seed] for seed in seeds]),
    )


def _mean_capacities(by_seed: Sequence[list[float] | None]) -> list[float]:
    """Average the capacity of each routed layer over the seeds that have one."""
    present = [capacities for capacities in by_seed if capacities]
    if not present:
        return []
    means = np.mean(present, axis=0)  # (routed layers,)
    return [float(mean) for mean in means]


def _optimum_result(curve: Curve, optimum: Optimum) -> OptimumResult:
    # The size is estimated as a logarithm, in which the curve is a parabola and its scatter is more even.
    log_size = estimate(lambda seeds: math.log(curve.optimum(seeds).parameters), curve.seeds)
    loss = estimate(lambda seeds: curve.optimum(seeds).loss, curve.seeds)
    return OptimumResult(
        parameters=optimum.parameters,
        loss=optimum.loss,
        is_bracketed=curve.is_bracketed(curve.seeds),
        parameters_interval=_exponential(log_size.t_interval),
        loss_interval=loss.t_interval,
        parameters_bootstrap=_exponential(log_size.bootstrap_interval),
        loss_bootstrap=loss.bootstrap_interval,
    )


def _exponential(interval: list[float] | None) -> list[float] | None:
    if interval is None:
        return None
    return [math.exp(bound) for bound in interval]


def _pair_result(pair: Pair) -> PairResult:
    """Compare two curves as far as they can be compared."""
    seeds = pair.seeds
    result = PairResult(
        budget=pair.one.budget,
        variant=pair.one.variant,
        against=pair.other.variant,
        seeds=seeds,
        is_bracketed=pair.has_ladders and pair.obstacle is None,
    )
    # 1. The loss, at the optima or at equal FLOPs.
    if pair.obstacle is None:
        loss = estimate(pair.relative_loss, seeds)
        result = replace(
            result, loss=loss.value, t_interval=loss.t_interval, bootstrap_interval=loss.bootstrap_interval
        )
    # 2. The best sizes that were tried.
    if pair.has_ladders and seeds:
        result = replace(result, best_sizes=pair.relative_best(seeds))
    # 3. What needs both optima: the ratio of sizes, the crossing of the curves, and the interval by runs.
    if result.is_bracketed:
        result = _with_optima(result, pair)
    return result


def _with_optima(result: PairResult, pair: Pair) -> PairResult:
    seeds = pair.seeds
    log_ratio = estimate(pair.relative_size, seeds)
    result = replace(
        result,
        optimum_ratio=math.exp(log_ratio.value),
        optimum_ratio_interval=_exponential(log_ratio.t_interval),
        crossings=pair.crossings(seeds),
        is_lower_above=pair.loss_at_largest(seeds) < 0,
    )
    if len(result.crossings) == 1:
        log_crossing = estimate(pair.relative_crossing, seeds)
        result = replace(
            result,
            crossing_ratio=math.exp(log_crossing.value),
            crossing_ratio_interval=_exponential(log_crossing.t_interval),
        )
    by_runs = pooled(pair)
    if by_runs is not None:
        result = replace(result, pooled_interval=by_runs.interval, noise=by_runs.noise, p_of_seeds=by_runs.p_of_seeds)
    return result
