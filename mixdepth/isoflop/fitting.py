"""What a study came to: optima of the curves, their differences, and the tests of what was claimed before.

The unit of randomness is the seed, which variants share. A curve is a parabola in the logarithm of the size, through
the means over the seeds; its lowest point is the optimum.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mixdepth.data.corpus import HELD_OUT
from mixdepth.files import read_json, write_json, writing
from mixdepth.isoflop import forms
from mixdepth.isoflop.claims import tested
from mixdepth.isoflop.curves import Curve, Pair, Point
from mixdepth.isoflop.estimates import estimate
from mixdepth.isoflop.pooled import pooled
from mixdepth.isoflop.sealed import sealed_losses
from mixdepth.isoflop.study import FITS, OF_CURVES, Cell, Losses, Study
from mixdepth.isoflop.variants import parse_variant
from mixdepth.text import columns, short


class Fit(NamedTuple):
    """What a study came to; as text tables."""

    split: str
    finished: int
    planned: int
    curves: list[dict[str, Any]]
    comparisons: list[dict[str, Any]]
    tests: list[dict[str, Any]]
    left_out: list[dict[str, str]]

    def __str__(self) -> str:
        used = sum(len(curve["points"]) * len(curve["seeds"]) for curve in self.curves)
        about = f"{self.finished} of {self.planned} runs, {used} used; losses on the {self.split} text with causal "
        about += "routing; ± is the spread of seeds, [] 95 % by t and the jackknife over seeds"
        tables = [_curve_table(self.curves), _pair_table(self.comparisons), _test_table(self.tests)]
        left_out = [f"left out: {entry['cell']}, {entry['reason']}" for entry in self.left_out]
        return "\n".join([about, "\n\n".join(table for table in tables if table), *left_out])


def _curve_table(curves: list[dict[str, Any]]) -> str:
    rows = [["budget", "variant", "sizes x seeds", "best", "loss", "look-ahead", "realised capacity"]]
    rows[0] += ["optimum (parameters)", "loss there"]
    for curve in curves:
        best, optimum = curve["best"], curve["optimum"]
        spread = "" if best["std"] is None else f" ± {best['std']:.4f}"
        row = [short(curve["budget"]), curve["variant"], f"{len(curve['points'])} x {len(curve['seeds'])}"]
        row += [best["shape"], f"{best['loss']:.4f}{spread}", f"{best['lookahead_loss']:.4f}"]
        row.append(" ".join(f"{capacity:.1%}" for capacity in best["capacities"]))
        if optimum["is_bracketed"]:
            row.append(f"{optimum['parameters']:,.0f} {_range(optimum['parameters_interval'], ',.0f')}")
            row.append(f"{optimum['loss']:.4f} {_range(optimum['loss_interval'], '.4f')}")
        else:
            row += ["not bracketed", ""]
        rows.append(row)
    return columns(rows, left=(1,))


def _pair_table(pairs: list[dict[str, Any]]) -> str:
    rows = [["budget", "variant", "against", "loss", "interval", "bootstrap", "by runs", "best sizes"]]
    rows[0] += ["optimum", "curves cross at"]
    for pair in pairs:
        row = [short(pair["budget"]), pair["variant"], pair["against"], _as(pair["loss"], "+.2%")]
        row += [_range(pair[name], "+.2%") for name in ("t_interval", "bootstrap_interval", "pooled_interval")]
        row[-1] += _as(pair["p_of_seeds"], " (p of seeds {:.2g})")
        row.append(_as(pair["best_sizes"], "+.2%"))
        if pair["best_sizes"] is not None and not pair["is_bracketed"]:
            row.append("not bracketed")
        else:
            row.append(f"{_as(pair['optimum_ratio'], 'x {:.2f}')} {_range(pair['optimum_ratio_interval'], '.2f')}")
        crossing = ", ".join(f"{size:,.0f}" for size in pair["crossings"])
        if pair["crossing_ratio"] is not None:
            lower = pair["variant" if pair["is_lower_above"] else "against"]
            crossing += f", x {pair['crossing_ratio']:.2f} {_range(pair['crossing_ratio_interval'], '.2f')}"
            crossing = f"{crossing.rstrip()}; {lower} is lower above"
        rows.append([*row, crossing])
    return columns(rows, left=(1, 2, 9)) if pairs else ""


def _test_table(tests: list[dict[str, Any]]) -> str:
    rows = [["claim", "found", "interval", "p", "corrected", ""]]
    for test in tests:
        style, found, interval = "+.2%", test["estimate"], test["interval"]
        if test["kind"] in OF_CURVES:  # a logarithm
            style, found, interval = ".2f", None if found is None else math.exp(found), _exp(interval)
        cells = [_as(found, style), _range(interval, style), _as(test["p"], ".2g"), _as(test["p_corrected"], ".2g")]
        rows.append([test["claim"], *cells, test["verdict"]])
    return columns(rows, left=(0, 5)) if tests else ""


def _as(value: float | None, style: str) -> str:
    return "" if value is None else style.format(value) if "{" in style else f"{value:{style}}"


def _range(interval: Sequence[float] | None, style: str) -> str:
    return "" if interval is None else f"[{interval[0]:{style}}, {interval[1]:{style}}]"


def fit(folder: str | Path, split: str = "validation") -> Fit:
    """Fit a study as far as it is finished, and write fit.json.

    `split="test"` takes the losses on the text that nothing was chosen by, which cells have sealed when they ended, and
    writes fit-test.json: once, when everything is finished and decided. After that it only shows what it found.
    """
    if split not in HELD_OUT:
        raise ValueError(f"split must be one of {', '.join(HELD_OUT)}, not {split!r}")
    study = Study.read(folder)
    path = study.folder / FITS[split]
    if split == "test" and path.exists():
        way_out = "restore it: the test text is opened once"
        found = read_json(path, Fit._fields, way_out)
        forms.check(found, forms.FIT, path, way_out)
        return Fit(*(found[name] for name in Fit._fields))
    finished = [cell for cell in study.cells if study.is_finished(cell)]
    if not finished:
        raise ValueError(f"no cell of the study in {str(folder)!r} is finished: mixdepth isoflop run {folder}")
    missing = sum(not study.is_settled(cell) for cell in study.cells)
    if split == "test" and missing:
        raise ValueError(
            f"{missing} cells are not finished: the test text is opened once, when all is done and decided"
        )
    losses, left_out = _losses(study, finished, split)
    curves = _curves(study, [cell for cell in finished if cell.name in losses], losses, left_out)
    comparisons = [_compare(Pair.of(curve, dense)) for curve, dense in _against_dense(curves)]
    reasons = [{"cell": name, "reason": reason} for name, reason in left_out.items()]
    described, tests = [_describe(curve) for curve in curves.values()], tested(study.hypotheses, curves)
    fitted = Fit(split, len(finished), len(study.cells), described, comparisons, tests, reasons)
    with writing(study.folder):
        write_json(path, fitted._asdict())
    return fitted


def _losses(study: Study, finished: list[Cell], split: str) -> tuple[dict[str, Losses], dict[str, str]]:
    """Of each cell that counts; and why the others do not."""
    failures = {cell.name: reason for cell in study.cells if (reason := study.failure(cell)) is not None}
    losses = {}
    for cell in finished:
        if cell.name in failures:
            continue
        found = study.losses(cell) if split == "validation" else sealed_losses(study, cell)
        if found is None:
            failures[cell.name] = "it has no loss on the test text, and its weights are gone"
        else:
            losses[cell.name] = found
    return losses, failures


def _curves(
    study: Study, cells: list[Cell], losses: dict[str, Losses], left_out: dict[str, str]
) -> dict[tuple[float, str], Curve]:
    """A curve takes the seeds that all of its sizes have; what is left out for want of others is added there."""
    groups: dict[tuple[float, str], dict[str, list[Cell]]] = {}
    for cell in cells:
        groups.setdefault((cell.budget, cell.variant), {}).setdefault(cell.shape, []).append(cell)
    curves = {}
    for (budget, variant), shapes in groups.items():
        while not set.intersection(*({cell.seed for cell in same} for same in shapes.values())):
            fewest = min(shapes, key=lambda shape: len(shapes[shape]))
            left_out |= {cell.name: "its size has too few seeds" for cell in shapes.pop(fewest)}
        seeds = sorted(set.intersection(*({cell.seed for cell in same} for same in shapes.values())))
        points = []
        for shape, same in shapes.items():
            left_out |= {cell.name: "other sizes lack its seed" for cell in same if cell.seed not in seeds}
            found = {cell.seed: losses[cell.name] for cell in same if cell.seed in seeds}
            by_seed = ({seed: getattr(found[seed], name) for seed in found} for name in Losses._fields)
            points.append(Point(shape, same[0].parameters, same[0].flops_per_token, *by_seed))
        points.sort(key=lambda point: point.parameters)
        planned = {cell.shape for cell in study.cells if (cell.budget, cell.variant) == (budget, variant)}
        curves[budget, variant] = Curve(budget, variant, tuple(points), seeds, len(planned))
    return curves


def _against_dense(curves: dict[tuple[float, str], Curve]) -> list[tuple[Curve, Curve]]:
    """Each routed curve with the first dense one of its budget."""
    dense: dict[float, Curve] = {}
    for curve in curves.values():
        if parse_variant(curve.variant).depth is None:
            dense.setdefault(curve.budget, curve)
    return [
        (curve, dense[curve.budget])
        for curve in curves.values()
        if curve.budget in dense and parse_variant(curve.variant).depth is not None
    ]


def _describe(curve: Curve) -> dict[str, Any]:
    best, seeds = curve.best, curve.seeds
    values = [best.losses[seed] for seed in seeds]
    found = curve.optimum(seeds)
    size = estimate(lambda some: math.log(curve.optimum(some).parameters), seeds)
    loss = estimate(lambda some: curve.optimum(some).loss, seeds)
    intervals = {"parameters_interval": _exp(size.t_interval), "loss_interval": loss.t_interval}
    intervals |= {"parameters_bootstrap": _exp(size.bootstrap_interval), "loss_bootstrap": loss.bootstrap_interval}
    return {
        "budget": curve.budget,
        "variant": curve.variant,
        "seeds": seeds,
        "points": [{**point._asdict(), "loss": point.loss(seeds)} for point in curve.points],
        "best": {
            "shape": best.shape,
            "parameters": best.parameters,
            "flops_per_token": best.flops_per_token,
            "loss": best.loss(seeds),
            "std": float(np.std(values, ddof=1)) if len(values) > 1 else None,
            "lookahead_loss": float(np.mean([best.lookahead_losses[seed] for seed in seeds])),
            "capacities": _mean_capacities([best.capacities[seed] for seed in seeds]),
        },
        "optimum": {**found._asdict(), "is_bracketed": curve.is_bracketed(seeds), **intervals},
        "parabola": curve.parabola(seeds) if found.is_bracketed else None,
    }


def _mean_capacities(by_seed: Sequence[list[float] | None]) -> list[float]:
    """Of each routed layer, over the seeds that say."""
    known = [capacities for capacities in by_seed if capacities]
    return [float(mean) for mean in np.mean(known, axis=0)] if known else []


def _exp(interval: list[float] | None) -> list[float] | None:
    return None if interval is None else [math.exp(edge) for edge in interval]


def _compare(pair: Pair) -> dict[str, Any]:
    seeds, is_bracketed = pair.seeds, pair.has_ladders and pair.obstacle is None
    loss = estimate(pair.relative_loss, seeds) if pair.obstacle is None else None
    size = estimate(pair.relative_size, seeds) if is_bracketed else None
    crosses = is_bracketed and len(pair.crossings(seeds)) == 1
    crossing = estimate(pair.relative_crossing, seeds) if crosses else None
    by_runs = pooled(pair) if is_bracketed else None
    return {
        "budget": pair.one.budget,
        "variant": pair.one.variant,
        "against": pair.other.variant,
        "seeds": seeds,
        "loss": None if loss is None else loss.value,
        "t_interval": None if loss is None else loss.t_interval,
        "bootstrap_interval": None if loss is None else loss.bootstrap_interval,
        "pooled_interval": None if by_runs is None else by_runs.interval,
        "noise": None if by_runs is None else by_runs.noise,
        "p_of_seeds": None if by_runs is None else by_runs.p_of_seeds,
        "best_sizes": pair.relative_best(seeds) if pair.has_ladders and seeds else None,
        "is_bracketed": is_bracketed,
        "optimum_ratio": None if size is None else math.exp(size.value),
        "optimum_ratio_interval": None if size is None else _exp(size.t_interval),
        "crossings": pair.crossings(seeds) if is_bracketed else [],
        "crossing_ratio": None if crossing is None else math.exp(crossing.value),
        "crossing_ratio_interval": None if crossing is None else _exp(crossing.t_interval),
        "is_lower_above": pair.loss_at_largest(seeds) < 0 if is_bracketed else None,
    }
