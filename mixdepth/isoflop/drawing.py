"""The curves of a study, drawn from fit.json: loss against size at equal FLOPs, as Fig. 3 and 4 of the paper."""

from pathlib import Path
from typing import Any

import numpy as np

from mixdepth.data.corpus import HELD_OUT
from mixdepth.files import read_json
from mixdepth.isoflop import forms
from mixdepth.isoflop.study import FITS, Study
from mixdepth.isoflop.variants import parse_variant
from mixdepth.report.figures import DASHES, FAINT, drawing, look, panels, save
from mixdepth.text import short


def plot(folder: str | Path, split: str = "validation") -> list[Path]:
    """Draw what `fit` has found, as PNG and SVG; the paths of the files."""
    if split not in HELD_OUT:
        raise ValueError(f"split must be one of {', '.join(HELD_OUT)}, not {split!r}")
    study = Study.read(folder)
    path = study.folder / FITS[split]
    command = f"mixdepth isoflop fit {folder}" + ("" if split == "validation" else f" --split {split}")
    if not path.exists():
        raise ValueError(f"{str(folder)!r} has no {path.name}: {command} makes it")
    way_out = f"{command} makes it again" if split == "validation" else "restore it: the test text is opened once"
    curves = _curves(path, way_out)
    budgets = list(dict.fromkeys(curve["budget"] for curve in curves))
    variants = list(dict.fromkeys(curve["variant"] for curve in curves))
    looks = {name: look(index) for index, name in enumerate(variants)}
    widest = max(budgets, key=lambda budget: sum(curve["budget"] == budget for curve in curves))
    ending = "" if split == "validation" else f"-{split}"
    at_widest = [curve for curve in curves if curve["budget"] == widest]
    drawn = [save(_variants(at_widest, looks, split), study.folder, "variants" + ending)]
    if any(len(curve["points"]) > 1 for curve in curves):
        drawn.append(save(_budgets(curves, looks, split), study.folder, "budgets" + ending))
    return [path for paths in drawn for path in paths]


def _curves(path: Path, way_out: str) -> list[dict[str, Any]]:
    content = read_json(path, ("curves",), way_out)
    forms.check(content, forms.CURVES, path, way_out)
    curves: list[dict[str, Any]] = content["curves"]
    return curves


@drawing
def _variants(curves: list[dict[str, Any]], looks: dict[str, Any], split: str) -> Any:
    """Fig. 3: all variants at one budget; left the loss, right what a forward pass costs."""
    figure, (left, right) = panels(11, 4.6, columns=2, width_ratios=(3, 2))
    for curve in curves:
        _draw(left, curve, looks[curve["variant"]], curve["variant"])
    left.set_title(f"{short(curves[0]['budget'])} training FLOPs")
    _label(left, split)
    left.legend()
    names = [curve["variant"] for curve in curves]
    costs = [curve["best"]["flops_per_token"] / 1e6 for curve in curves]
    bars = right.barh(names, costs, color=[looks[name]["color"] for name in names])
    right.bar_label(bars, [f" {curve['best']['shape']}: {curve['best']['loss']:.4f}" for curve in curves])
    right.invert_yaxis()
    right.margins(x=0.45)
    right.set_xlabel("MFLOPs of a forward pass, for each token")
    right.set_title("The best size of each (layers x width: loss)")
    return figure


@drawing
def _budgets(curves: list[dict[str, Any]], looks: dict[str, Any], split: str) -> Any:
    """Fig. 4: left the curves at every budget; right both axes relative to the best dense model of the budget."""
    figure, (left, right) = panels(11, 4.6, columns=2, width_ratios=(1, 1))
    dense: dict[float, dict[str, Any]] = {}
    for curve in curves:
        if parse_variant(curve["variant"]).depth is None:
            dense.setdefault(curve["budget"], curve["best"])
    budgets = list(dict.fromkeys(curve["budget"] for curve in curves))
    for curve in curves:
        if len(curve["points"]) < 2:
            continue
        style = looks[curve["variant"]] | {"linestyle": DASHES[budgets.index(curve["budget"]) % 4]}
        label = f"{curve['variant']}, {short(curve['budget'])}"
        _draw(left, curve, style, label)
        base = dense.get(curve["budget"])
        if base is not None:
            cost = [point["flops_per_token"] / base["flops_per_token"] for point in curve["points"]]
            loss = [point["loss"] / base["loss"] for point in curve["points"]]
            right.plot(cost, loss, label=label, markersize=5, linewidth=1.2, **style)
    _label(left, split)
    left.legend(fontsize="small")
    right.axhline(1, **FAINT)
    right.axvline(1, **FAINT)
    right.set_xscale("log")
    right.set_xlabel("FLOPs of a forward pass, relative to the best dense model")
    right.set_ylabel("loss, relative to the best dense model")
    right.set_title("Below and left of the cross: better and cheaper")
    return figure


def _draw(axes: Any, curve: dict[str, Any], style: dict[str, Any], label: str) -> None:
    """The seeds as small dots, their means, and the parabola with its lowest point."""
    sizes = [point["parameters"] for point in curve["points"]]
    line = {name: value for name, value in style.items() if name != "marker"}
    for point in curve["points"]:
        axes.plot(
            [point["parameters"]] * len(point["losses"]),
            list(point["losses"].values()),
            ".",
            color=style["color"],
            markersize=3,
            alpha=0.6,
        )
    axes.plot(sizes, [point["loss"] for point in curve["points"]], style["marker"], color=style["color"])
    axes.plot([], [], linewidth=1.4, label=label, **style)  # the legend shows how the line is drawn too
    if curve["parabola"] is not None:
        x = np.linspace(np.log(min(sizes)), np.log(max(sizes)), 200)
        axes.plot(np.exp(x), np.polyval(curve["parabola"], x), linewidth=1.4, **line)
        optimum = curve["optimum"]
        axes.plot(optimum["parameters"], optimum["loss"], "+", color=style["color"], markersize=12)
    else:
        axes.plot(sizes, [point["loss"] for point in curve["points"]], linewidth=0.8, **line)


def _label(axes: Any, split: str) -> None:
    axes.set_xscale("log")
    axes.set_xlabel("parameters")
    axes.set_ylabel(f"{split} loss, causal (nats per token)")
