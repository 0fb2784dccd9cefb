"""Pictures of a study's curves, drawn from fit.json: loss against size at equal FLOPs, as Fig. 3 and 4 of the paper."""

from pathlib import Path
from typing import Any

import numpy as np

from mixdepth.data.corpus import HELD_OUT
from mixdepth.isoflop.results import BestResult, CurveResult, read_curves
from mixdepth.isoflop.study import FITS, Study
from mixdepth.isoflop.variants import parse_variant
from mixdepth.report.figures import DASHES, FAINT, drawing, look, panels, save
from mixdepth.text import short

Look = dict[str, Any]
"""The colour, marker and line of a variant."""


def plot(folder: str | Path, split: str = "validation") -> list[Path]:
    """Draw the results of `fit` as PNG and SVG, and return the paths of the files."""
    if split not in HELD_OUT:
        raise ValueError(f"split must be one of {', '.join(HELD_OUT)}, not {split!r}")
    study = Study.read(folder)
    curves = _read(study.folder / FITS[split], folder, split)
    variants = list(dict.fromkeys(curve.variant for curve in curves))
    looks = {name: look(index) for index, name in enumerate(variants)}
    ending = "" if split == "validation" else f"-{split}"
    # Fig. 3 shows one budget; Fig. 4 needs sizes, and is not drawn for a study of single sizes.
    curves_of_widest = _of_widest_budget(curves)
    pictures = [save(_variants(curves_of_widest, looks, split), study.folder, "variants" + ending)]
    if any(len(curve.points) > 1 for curve in curves):
        pictures.append(save(_budgets(curves, looks, split), study.folder, "budgets" + ending))
    return [path for paths in pictures for path in paths]


def _read(path: Path, folder: str | Path, split: str) -> list[CurveResult]:
    """Read the curves, or say which command makes the file."""
    command = f"mixdepth isoflop fit {folder}"
    if split != "validation":
        command += f" --split {split}"
    if not path.exists():
        raise ValueError(f"{str(folder)!r} has no {path.name}: {command} makes it")
    way_out = f"{command} makes it again"
    if split != "validation":
        way_out = "restore it: the test text is opened once"
    return read_curves(path, way_out)


def _of_widest_budget(curves: list[CurveResult]) -> list[CurveResult]:
    """Select the curves of the budget that has the most; of the first of them if there are several."""
    by_budget: dict[float, list[CurveResult]] = {}
    for curve in curves:
        by_budget.setdefault(curve.budget, []).append(curve)
    return max(by_budget.values(), key=len)


@drawing
def _variants(curves: list[CurveResult], looks: dict[str, Look], split: str) -> Any:
    """Draw all variants at one budget, as Fig. 3: on the left the loss, on the right the cost of a forward pass."""
    figure, (left, right) = panels(11, 4.6, columns=2, width_ratios=(3, 2))
    for curve in curves:
        _draw(left, curve, looks[curve.variant], curve.variant)
    left.set_title(f"{short(curves[0].budget)} training FLOPs")
    _label(left, split)
    left.legend()
    for curve in curves:
        cost = curve.best.flops_per_token / 1e6
        bar = right.barh(curve.variant, cost, color=looks[curve.variant]["color"])
        right.bar_label(bar, [f" {curve.best.shape}: {curve.best.loss:.4f}"])
    right.invert_yaxis()
    right.margins(x=0.45)
    right.set_xlabel("MFLOPs of a forward pass, for each token")
    right.set_title("The best size of each (layers x width: loss)")
    return figure


@drawing
def _budgets(curves: list[CurveResult], looks: dict[str, Look], split: str) -> Any:
    """Draw all budgets, as Fig. 4: on the left the curves, on the right relative to the best dense model."""
    figure, (left, right) = panels(11, 4.6, columns=2, width_ratios=(1, 1))
    best_dense: dict[float, BestResult] = {}
    for curve in curves:
        if parse_variant(curve.variant).depth is None:
            best_dense.setdefault(curve.budget, curve.best)
    budgets = list(dict.fromkeys(curve.budget for curve in curves))
    for curve in curves:
        if len(curve.points) < 2:
            continue
        dashes = DASHES[budgets.index(curve.budget) % len(DASHES)]
        style = looks[curve.variant] | {"linestyle": dashes}
        label = f"{curve.variant}, {short(curve.budget)}"
        _draw(left, curve, style, label)
        if curve.budget in best_dense:
            base = best_dense[curve.budget]
            costs = [point.flops_per_token / base.flops_per_token for point in curve.points]
            losses = [point.loss / base.loss for point in curve.points]
            right.plot(costs, losses, label=label, markersize=5, linewidth=1.2, **style)
    _label(left, split)
    left.legend(fontsize="small")
    right.axhline(1, **FAINT)
    right.axvline(1, **FAINT)
    right.set_xscale("log")
    right.set_xlabel("FLOPs of a forward pass, relative to the best dense model")
    right.set_ylabel("loss, relative to the best dense model")
    right.set_title("Below and left of the cross: better and cheaper")
    return figure


def _draw(axes: Any, curve: CurveResult, style: Look, label: str) -> None:
    """Draw a curve: its seeds as small dots, their means, and the parabola with its lowest point."""
    sizes = [point.parameters for point in curve.points]
    means = [point.loss for point in curve.points]
    line = {name: value for name, value in style.items() if name != "marker"}
    for point in curve.points:
        same_size = [point.parameters] * len(point.losses)
        axes.plot(same_size, list(point.losses.values()), ".", color=style["color"], markersize=3, alpha=0.6)
    axes.plot(sizes, means, style["marker"], color=style["color"])
    axes.plot([], [], linewidth=1.4, label=label, **style)  # so that the legend shows marker and line together
    if curve.parabola is None:
        axes.plot(sizes, means, linewidth=0.8, **line)
        return
    log_sizes = np.linspace(np.log(min(sizes)), np.log(max(sizes)), 200)  # (200,)
    axes.plot(np.exp(log_sizes), np.polyval(curve.parabola, log_sizes), linewidth=1.4, **line)
    axes.plot(curve.optimum.parameters, curve.optimum.loss, "+", color=style["color"], markersize=12)


def _label(axes: Any, split: str) -> None:
    axes.set_xscale("log")
    axes.set_xlabel("parameters")
    axes.set_ylabel(f"{split} loss, causal (nats per token)")
