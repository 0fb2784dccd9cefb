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

from mixdepth.compare import evaluate_runs
from mixdepth.data import HELD_OUT
from mixdepth.files import read_json, write_json
from mixdepth.isoflop.study import TEST, Cell, Hypothesis, Study, short
from mixdepth.isoflop.table import columns
from mixdepth.isoflop.variants import DENSE

DRAWS = 2000
LEVEL = 0.05
MIN_SIZES = 3
"""Points that a parabola takes; with fewer sizes the best one stands for the curve."""


class Point(NamedTuple):
    """A variant at one size and budget: the losses of its seeds."""

    shape: str
    rung: float
    parameters: int
    flops_per_token: float
    losses: dict[int, float]
    lookahead_losses: dict[int, float]

    @property
    def loss(self) -> float:
        return float(np.mean(list(self.losses.values())))


class Optimum(NamedTuple):
    """The lowest point of a curve."""

    parameters: float
    loss: float
    is_bracketed: bool
    """Whether it lies within the sizes that were tried; if not, this is the best of them."""


class Curve(NamedTuple):
    """A variant at one budget, over its sizes."""

    budget: float
    variant: str
    points: tuple[Point, ...]

    @property
    def seeds(self) -> list[int]:
        """Those that all sizes have."""
        return sorted(set.intersection(*(set(point.losses) for point in self.points)))

    @property
    def best(self) -> Point:
        """The best size that was tried."""
        return min(self.points, key=lambda point: point.loss)

    def optimum(self, seeds: Sequence[int]) -> Optimum:
        """Of the means over these seeds, which may come more than once."""
        losses = [float(np.mean([point.losses[seed] for seed in seeds])) for point in self.points]
        return lowest([point.parameters for point in self.points], losses)

    def gap(self, seed: int) -> float:
        """What causal routing costs, relative to the loss with look-ahead, over all sizes."""
        gaps = [point.losses[seed] / point.lookahead_losses[seed] - 1 for point in self.points]
        return float(np.mean(gaps))


def parabola(sizes: Sequence[float], losses: Sequence[float]) -> Any:
    """Coefficients of the loss in the logarithm of the size, the square first."""
    return np.polyfit(np.log(sizes), losses, 2)


def lowest(sizes: Sequence[float], losses: Sequence[float]) -> Optimum:
    """The lowest point of the parabola through these.

    >>> round(lowest([1, 10, 100], [2.0, 1.0, 2.0]).parameters, 6)
    10.0
    """
    if len(sizes) >= MIN_SIZES:
        a, b, c = parabola(sizes, losses)
        lowest_log = -b / (2 * a) if a > 0 else math.inf
        if math.log(min(sizes)) <= lowest_log <= math.log(max(sizes)):
            return Optimum(math.exp(lowest_log), float(c - b**2 / (4 * a)), True)
    index = int(np.argmin(losses))
    return Optimum(sizes[index], losses[index], False)


class Fit(NamedTuple):
    """What a study came to; as text a table."""

    split: str
    curves: list[dict[str, Any]]
    comparisons: list[dict[str, Any]]
    tests: list[dict[str, Any]]
    excluded: list[dict[str, str]]

    def __str__(self) -> str:
        rows = [["budget", "variant", "runs", "best size", "loss", "look-ahead", "optimum (parameters)", "loss there"]]
        for curve in self.curves:
            best, optimum = curve["best"], curve["optimum"]
            spread = "" if best["std"] is None else f" ± {best['std']:.4f}"
            row = [short(curve["budget"]), curve["variant"], str(curve["runs"]), best["shape"]]
            row += [f"{best['loss']:.4f}{spread}", f"{best['lookahead_loss']:.4f}"]
            if optimum["is_bracketed"]:
                row.append(f"{optimum['parameters']:,.0f} {_range(optimum['parameters_interval'], ',.0f')}")
                row.append(f"{optimum['loss']:.4f} {_range(optimum['loss_interval'], '.4f')}")
            else:
                row += ["not bracketed", ""]
            rows.append(row)
        about = f"losses on the {self.split} text with causal routing; ± is the spread of seeds, [] 95 % (bootstrap)"
        lines = [about, columns(rows, left=(1,))]
        rows = [["budget", "variant", "against", "loss", "t interval", "bootstrap", "optimum", "curves cross at"]]
        for pair in self.comparisons:
            ratio = pair["optimum_ratio"]
            row = [short(pair["budget"]), pair["variant"], pair["against"], f"{pair['loss']:+.2%}"]
            row += [_range(pair[name], "+.2%") for name in ("t_interval", "bootstrap_interval")]
            row += ["" if ratio is None else f"x {ratio:.2f}", ", ".join(f"{x:,.0f}" for x in pair["crossings"])]
            rows.append(row)
        lines += ["", columns(rows, left=(1, 2))] if self.comparisons else []
        rows = [["claim", "found", "interval", "p", "corrected", ""]]
        for test in self.tests:
            found = "" if test["estimate"] is None else f"{test['estimate']:+.2%}"
            p_values = ["" if p is None else f"{p:.2g}" for p in (test["p"], test["p_corrected"])]
            rows.append([test["claim"], found, _range(test["interval"], "+.2%"), *p_values, test["verdict"]])
        lines += ["", columns(rows, left=(0, 5))] if self.tests else []
        lines += [f"left out: {entry['cell']}, {entry['reason']}" for entry in self.excluded]
        return "\n".join(lines)


def _range(interval: Sequence[float] | None, style: str) -> str:
    return "" if interval is None else f"[{interval[0]:{style}}, {interval[1]:{style}}]"


def fit(folder: str | Path, split: str = "validation") -> Fit:
    """Fit a study as far as it is finished, and write fit.json.

    `split="test"` evaluates every cell on the text that none was ever evaluated on, and writes fit-test.json: once,
    when everything is finished and decided.
    """
    if split not in HELD_OUT:
        raise ValueError(f"split must be one of {', '.join(HELD_OUT)}, not {split!r}")
    study = Study.read(folder)
    excluded = [(cell, study.failure(cell)) for cell in study.cells]
    left_out = [{"cell": cell.name, "reason": reason} for cell, reason in excluded if reason is not None]
    counted = [cell for cell, reason in excluded if reason is None and study.is_finished(cell)]
    if not counted:
        raise ValueError(f"no cell of the study in {str(folder)!r} is finished: mixdepth isoflop run {folder}")
    if split == "test" and len(counted) + len(left_out) < len(study.cells):
        missing = len(study.cells) - len(counted) - len(left_out)
        raise ValueError(
            f"{missing} cells are not finished: the test text is opened once, when all is done and decided"
        )
    losses = {cell.name: _losses(study, cell, split) for cell in counted}
    curves = _curves(counted, losses)
    comparisons = [
        _compare(curve, curves[budget, DENSE])
        for (budget, name), curve in curves.items()
        if name != DENSE and (budget, DENSE) in curves
    ]
    tests = [_test(claim, curves) for claim in study.hypotheses]
    _correct(tests)
    found = Fit(split, [_describe(curve) for curve in curves.values()], comparisons, tests, left_out)
    write_json(study.folder / fit_file(split), found._asdict())
    return found


def fit_file(split: str) -> str:
    return "fit.json" if split == "validation" else f"fit-{split}.json"


def _losses(study: Study, cell: Cell, split: str) -> tuple[float, float]:
    """Causal and look-ahead."""
    run = study.run_of(cell)
    if split == "test":
        path = run.folder / TEST
        if not path.exists():
            entry = evaluate_runs([str(run.folder)], split="test", windows=cell.settings["eval_windows"]).entries[0]
            found = entry.evaluation
            write_json(path, {"loss": found.loss, "lookahead_loss": found.lookahead_loss, "windows": len(found.rows)})
        tested = read_json(path)
        return tested["loss"], tested["lookahead_loss"]
    result = run.result
    assert result is not None
    return result["validation_loss"], result.get("validation_lookahead_loss", result["validation_loss"])


def _curves(cells: list[Cell], losses: dict[str, tuple[float, float]]) -> dict[tuple[float, str], Curve]:
    groups: dict[tuple[float, str], dict[str, list[Cell]]] = {}
    for cell in cells:
        groups.setdefault((cell.budget, cell.variant), {}).setdefault(cell.shape, []).append(cell)
    curves = {}
    for (budget, variant), shapes in groups.items():
        points = []
        for shape, same in shapes.items():
            causal, ahead = ({cell.seed: losses[cell.name][i] for cell in same} for i in (0, 1))
            points.append(Point(shape, same[0].rung, same[0].parameters, same[0].flops_per_token, causal, ahead))
        points.sort(key=lambda point: point.parameters)
        curves[budget, variant] = Curve(budget, variant, tuple(points))
    return curves


def _describe(curve: Curve) -> dict[str, Any]:
    best, seeds = curve.best, curve.seeds
    values = list(best.losses.values())
    found = curve.optimum(seeds) if seeds else Optimum(best.parameters, best.loss, False)
    drawn = [curve.optimum(draw) for draw in _draws(seeds)]
    return {
        "budget": curve.budget,
        "variant": curve.variant,
        "runs": sum(len(point.losses) for point in curve.points),
        "seeds": seeds,
        "points": [{**point._asdict(), "loss": point.loss} for point in curve.points],
        "best": {
            "shape": best.shape,
            "parameters": best.parameters,
            "flops_per_token": best.flops_per_token,
            "loss": best.loss,
            "std": float(np.std(values, ddof=1)) if len(values) > 1 else None,
            "lookahead_loss": float(np.mean(list(best.lookahead_losses.values()))),
        },
        "optimum": {
            **found._asdict(),
            "parameters_interval": _percentiles([optimum.parameters for optimum in drawn]),
            "loss_interval": _percentiles([optimum.loss for optimum in drawn]),
        },
        "parabola": _mean_parabola(curve) if found.is_bracketed else None,
    }


def _mean_parabola(curve: Curve) -> list[float]:
    losses = [float(np.mean([point.losses[seed] for seed in curve.seeds])) for point in curve.points]
    return [float(value) for value in parabola([point.parameters for point in curve.points], losses)]


def _draws(seeds: Sequence[int]) -> list[list[int]]:
    """Seeds with replacement, the same draws for every curve of these seeds."""
    if len(seeds) < 2:
        return []
    generator = np.random.default_rng(0)
    return [list(np.array(seeds)[generator.integers(len(seeds), size=len(seeds))]) for _ in range(DRAWS)]


def _percentiles(values: Sequence[float]) -> list[float] | None:
    return [float(x) for x in np.percentile(values, [2.5, 97.5])] if values else None


def _relative(curve: Curve, other: Curve) -> Callable[[Sequence[int]], float]:
    """The loss of one curve relative to the other's, as a function of the seeds to take the mean of.

    Where both have ladders these are their optima; else the rungs that they share, the best size of each if there
    are none."""
    if min(len(curve.points), len(other.points)) >= MIN_SIZES:
        return lambda seeds: curve.optimum(seeds).loss / other.optimum(seeds).loss - 1
    rungs = {point.rung for point in curve.points} & {point.rung for point in other.points}
    mine, theirs = ({point.rung: point for point in one.points} for one in (curve, other))
    pairs = [(mine[rung], theirs[rung]) for rung in rungs] or [(curve.best, other.best)]

    def relative(seeds: Sequence[int]) -> float:
        ratios = [np.mean([a.losses[s] for s in seeds]) / np.mean([b.losses[s] for s in seeds]) for a, b in pairs]
        return float(np.mean(ratios)) - 1

    return relative


def _compare(curve: Curve, other: Curve) -> dict[str, Any]:
    seeds = sorted(set(curve.seeds) & set(other.seeds))
    relative = _relative(curve, other)
    both = (curve.optimum(seeds), other.optimum(seeds)) if seeds else None
    bracketed = both is not None and both[0].is_bracketed and both[1].is_bracketed
    return {
        "budget": curve.budget,
        "variant": curve.variant,
        "against": other.variant,
        "seeds": seeds,
        "loss": relative(seeds) if seeds else curve.best.loss / other.best.loss - 1,
        "t_interval": _t_interval([relative([seed]) for seed in seeds]),
        "bootstrap_interval": _percentiles([relative(draw) for draw in _draws(seeds)]),
        "optimum_ratio": both[0].parameters / both[1].parameters if both and bracketed else None,
        "crossings": _crossings(curve, other) if bracketed else [],
    }


def _crossings(curve: Curve, other: Curve) -> list[float]:
    """The sizes, among those that both have, where the parabolas meet."""
    low, high = (
        bound(end(p.parameters for p in c.points) for c in (curve, other)) for bound, end in ((max, min), (min, max))
    )
    roots = np.roots(np.subtract(_mean_parabola(curve), _mean_parabola(other)))
    found = [math.exp(root.real) for root in roots if abs(root.imag) < 1e-9 and root.real < 100]
    return sorted(size for size in found if low <= size <= high)


def _t_interval(values: Sequence[float]) -> list[float] | None:
    if len(values) < 2:
        return None
    error = _scipy_stats().t.ppf(1 - LEVEL / 2, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    return [float(np.mean(values) - error), float(np.mean(values) + error)]


def _test(claim: Hypothesis, curves: dict[tuple[float, str], Curve]) -> dict[str, Any]:
    """One number for each seed, and a t test of their mean."""
    about: dict[str, Any] = {"name": claim.name, "claim": f"{short(claim.budget)}: {claim.claim}", "kind": claim.kind}
    about |= {"family": claim.family, "finished_before": claim.finished_before, "margin": claim.margin}
    nothing = {**about, "values": [], "estimate": None, "interval": None, "p": None, "p_corrected": None}
    one, other = (curves.get((claim.budget, name)) for name in (claim.variant, claim.against))
    if one is None or other is None:
        return {**nothing, "verdict": "not run"}
    seeds = sorted(set(one.seeds) & set(other.seeds))
    if claim.kind == "equivalent":
        values = [one.gap(seed) for seed in seeds]
    elif claim.kind == "larger":
        if not (seeds and one.optimum(seeds).is_bracketed and other.optimum(seeds).is_bracketed):
            return {**nothing, "verdict": "an optimum is not bracketed"}
        values = [math.log(one.optimum([s]).parameters / other.optimum([s]).parameters) for s in seeds]
    else:
        relative = _relative(one, other)
        values = [relative([seed]) for seed in seeds]
    if len(values) < 2:
        return {**nothing, "values": values, "verdict": "too few seeds"}
    return {
        **about,
        "values": values,
        "estimate": float(np.mean(values)),
        "interval": _t_interval(values),
        "p": _p_value(claim, values),
        "p_corrected": None,
        "verdict": "",
    }


def _p_value(claim: Hypothesis, values: list[float]) -> float:
    test = _scipy_stats().ttest_1samp
    if claim.kind == "equivalent":  # two one-sided tests: not below the margin, not above it
        sides = ((-claim.margin, "greater"), (claim.margin, "less"))
        return max(float(test(values, edge, alternative=side).pvalue) for edge, side in sides)
    alternative = {"differs": "two-sided", "less": "less", "larger": "greater"}[claim.kind]
    return float(test(values, 0.0, alternative=alternative).pvalue)


def _correct(tests: list[dict[str, Any]]) -> None:
    """Holm's correction of the primary tests; and what each came to."""
    primary = sorted((t for t in tests if t["family"] == "primary" and t["p"] is not None), key=lambda t: t["p"])
    highest = 0.0
    for rank, test in enumerate(primary):
        highest = max(highest, min(1.0, (len(primary) - rank) * test["p"]))
        test["p_corrected"] = highest
    for test in tests:
        p = test["p"] if test["p_corrected"] is None else test["p_corrected"]
        if p is not None:
            test["verdict"] = ("holds" if p < LEVEL else "not shown") + (
                "" if test["family"] == "primary" else " (exploratory)"
            )


def _scipy_stats() -> Any:
    try:
        from scipy import stats
    except ImportError as error:
        raise ValueError("intervals and tests need SciPy: pip install 'mixdepth[study]'") from error
    return stats
