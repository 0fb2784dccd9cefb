"""What a study came to: optima of the curves, their differences, and the tests of what was claimed before.

The unit of randomness is the seed, which variants share. A curve is a parabola in the logarithm of the size, through
the means over the seeds; its lowest point is the optimum. Bootstrap intervals draw seeds with replacement, the same
for all curves. Tests and t intervals take one number for each seed, from that seed's own parabolas.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mixdepth.data import HELD_OUT
from mixdepth.files import write_json
from mixdepth.isoflop.curves import MIN_SIZES, Curve, Point
from mixdepth.isoflop.sealed import sealed_losses
from mixdepth.isoflop.study import Cell, Hypothesis, Study
from mixdepth.isoflop.variants import DENSE
from mixdepth.run import writing
from mixdepth.table import columns, short

DRAWS = 2000
LEVEL = 0.05
SAME_FLOPS = 0.25
"""Octaves of FLOPs for each token within which two sizes are compared where there is no curve."""


class Fit(NamedTuple):
    """What a study came to; as text a table."""

    split: str
    finished: int
    planned: int
    curves: list[dict[str, Any]]
    comparisons: list[dict[str, Any]]
    tests: list[dict[str, Any]]
    left_out: list[dict[str, str]]

    def __str__(self) -> str:
        rows = [
            ["budget", "variant", "sizes x seeds", "best", "loss", "look-ahead", "optimum (parameters)", "loss there"]
        ]
        for curve in self.curves:
            best, optimum = curve["best"], curve["optimum"]
            spread = "" if best["std"] is None else f" ± {best['std']:.4f}"
            row = [short(curve["budget"]), curve["variant"], f"{len(curve['points'])} x {len(curve['seeds'])}"]
            row += [best["shape"], f"{best['loss']:.4f}{spread}", f"{best['lookahead_loss']:.4f}"]
            if optimum["is_bracketed"]:
                row.append(f"{optimum['parameters']:,.0f} {_range(optimum['parameters_interval'], ',.0f')}")
                row.append(f"{optimum['loss']:.4f} {_range(optimum['loss_interval'], '.4f')}")
            else:
                row += ["not bracketed", ""]
            rows.append(row)
        about = [f"{self.finished} of {self.planned} runs; losses on the {self.split} text with causal routing"]
        about.append("± is the spread of seeds, [] 95 % by the bootstrap over seeds")
        lines = ["; ".join(about), columns(rows, left=(1,))]
        rows = [["budget", "variant", "against", "loss", "t interval", "bootstrap", "optimum", "curves cross at"]]
        for pair in self.comparisons:
            row = [short(pair["budget"]), pair["variant"], pair["against"], _as(pair["loss"], "+.2%")]
            row += [_range(pair[name], "+.2%") for name in ("t_interval", "bootstrap_interval")]
            row += [_as(pair["optimum_ratio"], "x {:.2f}"), ", ".join(f"{x:,.0f}" for x in pair["crossings"])]
            rows.append(row)
        lines += ["", columns(rows, left=(1, 2))] if self.comparisons else []
        rows = [["claim", "found", "interval", "p", "corrected", ""]]
        for test in self.tests:
            style, (found, interval) = "+.2%", (test["estimate"], test["interval"])
            if test["kind"] == "larger" and found is not None:  # a logarithm
                style, found, interval = ".2f", math.exp(found), [math.exp(edge) for edge in interval]
            cells = [_as(found, style), _range(interval, style), _as(test["p"], ".2g"), _as(test["p_corrected"], ".2g")]
            rows.append([test["claim"], *cells, test["verdict"]])
        lines += ["", columns(rows, left=(0, 5))] if self.tests else []
        lines += [f"left out: {entry['cell']}, {entry['reason']}" for entry in self.left_out]
        return "\n".join(lines)


def _as(value: float | None, style: str) -> str:
    return "" if value is None else style.format(value) if "{" in style else f"{value:{style}}"


def _range(interval: Sequence[float] | None, style: str) -> str:
    return "" if interval is None else f"[{interval[0]:{style}}, {interval[1]:{style}}]"


def fit(folder: str | Path, split: str = "validation") -> Fit:
    """Fit a study as far as it is finished, and write fit.json.

    `split="test"` takes the losses on the text that nothing was chosen by, which cells have sealed when they ended, and
    writes fit-test.json: once, when everything is finished and decided.
    """
    if split not in HELD_OUT:
        raise ValueError(f"split must be one of {', '.join(HELD_OUT)}, not {split!r}")
    study = Study.read(folder)
    finished = [cell for cell in study.cells if study.is_finished(cell)]
    if not finished:
        raise ValueError(f"no cell of the study in {str(folder)!r} is finished: mixdepth isoflop run {folder}")
    missing = sum(not study.is_settled(cell) for cell in study.cells)
    if split == "test" and missing:
        raise ValueError(
            f"{missing} cells are not finished: the test text is opened once, when all is done and decided"
        )
    failures = {cell.name: reason for cell in study.cells if (reason := study.failure(cell)) is not None}
    counted = [cell for cell in finished if cell.name not in failures]
    losses = {}
    for cell in counted:
        found = _validation_losses(study, cell) if split == "validation" else sealed_losses(study, cell)
        if found is None:
            failures[cell.name] = "it has no loss on the test text, and its weights are gone"
        else:
            losses[cell.name] = found
    counted = [cell for cell in counted if cell.name in losses]
    curves = _curves(counted, losses, failures)
    pairs = [(curve, curves.get((curve.budget, DENSE))) for curve in curves.values() if curve.variant != DENSE]
    comparisons = [_compare(curve, dense) for curve, dense in pairs if dense is not None]
    tests = _corrected([_test(claim, curves) for claim in study.hypotheses])
    left_out = [{"cell": name, "reason": reason} for name, reason in failures.items()]
    shown = [_describe(curve) for curve in curves.values()]
    fitted = Fit(split, len(finished), len(study.cells), shown, comparisons, tests, left_out)
    with writing(study.folder):
        write_json(study.folder / fit_file(split), fitted._asdict())
    return fitted


def fit_file(split: str) -> str:
    return "fit.json" if split == "validation" else f"fit-{split}.json"


def _validation_losses(study: Study, cell: Cell) -> tuple[float, float]:
    """Causal and look-ahead."""
    result = study.run_of(cell).result
    assert result is not None
    return result["validation_loss"], result.get("validation_lookahead_loss", result["validation_loss"])


def _curves(
    cells: list[Cell], losses: dict[str, tuple[float, float]], failures: dict[str, str]
) -> dict[tuple[float, str], Curve]:
    """What is left out for want of seeds is added to the failures."""
    groups: dict[tuple[float, str], dict[str, list[Cell]]] = {}
    for cell in cells:
        groups.setdefault((cell.budget, cell.variant), {}).setdefault(cell.shape, []).append(cell)
    curves = {}
    for (budget, variant), shapes in groups.items():
        while not set.intersection(*({cell.seed for cell in same} for same in shapes.values())):
            fewest = min(shapes, key=lambda shape: len(shapes[shape]))
            failures |= {cell.name: "its size has too few seeds" for cell in shapes.pop(fewest)}
        seeds = sorted(set.intersection(*({cell.seed for cell in same} for same in shapes.values())))
        points = []
        for shape, same in shapes.items():
            causal, ahead = ({cell.seed: losses[cell.name][i] for cell in same} for i in (0, 1))
            points.append(Point(shape, same[0].parameters, same[0].flops_per_token, causal, ahead))
        points.sort(key=lambda point: point.parameters)
        curves[budget, variant] = Curve(budget, variant, tuple(points), seeds)
    return curves


def _describe(curve: Curve) -> dict[str, Any]:
    best, seeds = curve.best, curve.seeds
    values = [best.losses[seed] for seed in seeds]
    found = curve.optimum(seeds)
    drawn = [curve.optimum(draw) for draw in _draws(seeds)]
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
        },
        "optimum": {
            **found._asdict(),
            "parameters_interval": _percentiles([optimum.parameters for optimum in drawn]),
            "loss_interval": _percentiles([optimum.loss for optimum in drawn]),
        },
        "parabola": curve.parabola(seeds) if found.is_bracketed else None,
    }


def _draws(seeds: Sequence[int]) -> list[list[int]]:
    """Seeds with replacement, the same draws for every curve of these seeds."""
    if len(seeds) < 2:
        return []
    generator = np.random.default_rng(0)
    return [list(np.array(seeds)[generator.integers(len(seeds), size=len(seeds))]) for _ in range(DRAWS)]


def _percentiles(values: Sequence[float]) -> list[float] | None:
    return [float(x) for x in np.percentile(values, [2.5, 97.5])] if values else None


def _relative(curve: Curve, other: Curve) -> Callable[[Sequence[int]], float] | None:
    """The loss of one curve relative to the other's, as a function of the seeds to take the mean of.

    Where both have ladders these are their optima; else their sizes of the same FLOPs, and None if there are none."""
    if min(len(curve.points), len(other.points)) >= MIN_SIZES:
        return lambda seeds: curve.optimum(seeds).loss / other.optimum(seeds).loss - 1
    pairs = [(a, b) for a in curve.points for b in other.points if _octaves(a, b) <= SAME_FLOPS]
    if not pairs:
        return None
    return lambda seeds: float(np.mean([a.loss(seeds) / b.loss(seeds) for a, b in pairs])) - 1


def _octaves(one: Point, other: Point) -> float:
    return abs(math.log2(one.flops_per_token / other.flops_per_token))


def _compare(curve: Curve, other: Curve) -> dict[str, Any]:
    seeds = sorted(set(curve.seeds) & set(other.seeds))
    relative = _relative(curve, other) if seeds else None
    bracketed = curve.is_bracketed(seeds) and other.is_bracketed(seeds)
    ratio = curve.optimum(seeds).parameters / other.optimum(seeds).parameters if bracketed else None
    return {
        "budget": curve.budget,
        "variant": curve.variant,
        "against": other.variant,
        "seeds": seeds,
        "loss": None if relative is None else relative(seeds),
        "t_interval": None if relative is None else _t_interval([relative([seed]) for seed in seeds]),
        "bootstrap_interval": None if relative is None else _percentiles([relative(draw) for draw in _draws(seeds)]),
        "is_bracketed": bracketed,
        "optimum_ratio": ratio,
        "crossings": _crossings(curve, other, seeds) if bracketed else [],
    }


def _crossings(curve: Curve, other: Curve, seeds: Sequence[int]) -> list[float]:
    """The sizes, among those that both have, where the parabolas meet."""
    low = max(min(point.parameters for point in one.points) for one in (curve, other))
    high = min(max(point.parameters for point in one.points) for one in (curve, other))
    roots = np.roots(np.subtract(curve.parabola(seeds), other.parabola(seeds)))
    found = [math.exp(root.real) for root in roots if abs(root.imag) < 1e-9 and root.real < 100]
    return sorted(size for size in found if low <= size <= high)


def _t_interval(values: Sequence[float]) -> list[float] | None:
    if len(values) < 2:
        return None
    error = _scipy_stats().t.ppf(1 - LEVEL / 2, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    return [float(np.mean(values) - error), float(np.mean(values) + error)]


def _test(claim: Hypothesis, curves: dict[tuple[float, str], Curve]) -> dict[str, Any]:
    """One number for each seed, and a t test of their mean."""
    about: dict[str, Any] = {**claim._asdict(), "claim": f"{short(claim.budget)}: {claim.claim}"}
    nothing = {**about, "values": [], "estimate": None, "interval": None, "p": None, "p_corrected": None}
    one, other = (curves.get((claim.budget, name)) for name in (claim.variant, claim.against))
    if one is None or other is None:
        return {**nothing, "verdict": "not run"}
    seeds = sorted(set(one.seeds) & set(other.seeds))
    is_bracketed = one.is_bracketed(seeds) and other.is_bracketed(seeds)
    relative = _relative(one, other)
    if claim.kind == "equivalent":
        values = [one.gap(seed) for seed in seeds]
    elif claim.kind == "larger":
        if not is_bracketed:
            return {**nothing, "verdict": "an optimum is not bracketed"}
        values = [math.log(one.optimum([s]).parameters / other.optimum([s]).parameters) for s in seeds]
    elif relative is None:
        return {**nothing, "verdict": "they have no size in common"}
    else:
        values = [relative([seed]) for seed in seeds]
    if len(values) < 2:
        return {**nothing, "values": values, "verdict": "too few seeds"}
    p = _p_value(claim, values)
    ladders = min(len(one.points), len(other.points)) >= MIN_SIZES
    note = "; not bracketed" if claim.kind in ("differs", "less") and ladders and not is_bracketed else ""
    return {
        **about,
        "values": values,
        "estimate": float(np.mean(values)),
        "interval": _t_interval(values),
        "p": p if math.isfinite(p) else None,
        "p_corrected": None,
        "verdict": note if math.isfinite(p) else "the seeds do not differ",
    }


def _p_value(claim: Hypothesis, values: list[float]) -> float:
    test = _scipy_stats().ttest_1samp
    if claim.kind == "equivalent":  # two one-sided tests: not below the margin, not above it
        sides = ((-claim.margin, "greater"), (claim.margin, "less"))
        return max(float(test(values, edge, alternative=side).pvalue) for edge, side in sides)
    alternative = {"differs": "two-sided", "less": "less", "larger": "greater"}[claim.kind]
    return float(test(values, 0.0, alternative=alternative).pvalue)


def _corrected(tests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With Holm's correction of the primary tests, for all that were planned; and what each came to."""
    primary = [test for test in tests if test["family"] == "primary"]
    highest = 0.0
    tested = sorted((test for test in primary if test["p"] is not None), key=lambda test: float(test["p"]))
    for rank, test in enumerate(tested):
        highest = max(highest, min(1.0, (len(primary) - rank) * test["p"]))
        test["p_corrected"] = highest
    for test in tests:
        p = test["p"] if test["p_corrected"] is None else test["p_corrected"]
        if p is not None:
            test["verdict"] = _verdict(test, p < LEVEL) + test["verdict"]
            if test["family"] != "primary":
                after = f", thought of after {test['finished_before']} runs" if test["finished_before"] else ""
                test["verdict"] += f" (exploratory{after})"
    return tests


def _verdict(test: dict[str, Any], is_shown: bool) -> str:
    if not is_shown:
        return "not shown"
    if test["kind"] != "differs":
        return "holds"
    side = "lower" if test["estimate"] < 0 else "higher"
    reached = test["margin"] and test["estimate"] <= -test["margin"]
    return f"holds: {side}" + (", and reaches the goal" if reached else "")


def _scipy_stats() -> Any:
    try:
        from scipy import stats
    except ImportError as error:
        raise ValueError("intervals and tests need SciPy: pip install 'mixdepth[study]'") from error
    return stats
