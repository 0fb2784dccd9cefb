"""The routing profile of a run: what each routed layer does, over training and at its end.

Shapes: N lines of training, L routed layers.
"""

from typing import Any, NamedTuple

import numpy as np

from mixdepth.report.figures import FAINT, RAMP, drawing, panels
from mixdepth.report.logs import Log, Numbers, smooth


class Statistic(NamedTuple):
    """One of the numbers that are logged for each routed layer, and how it is drawn."""

    key: str
    title: str
    unit: str
    is_share: bool


CAPACITY = "causal_capacity"
STATISTICS = (
    Statistic(CAPACITY, "Capacity of the causal rule (dashed: target)", "share of tokens", True),
    Statistic("never_chosen", "Token types that were never chosen", "share of types in the batch", True),
    Statistic("precision", "Precision of the causal rule, against training", "share of its choices", True),
    Statistic("recall", "Recall of the causal rule, against training", "share of training's choices", True),
    Statistic("gate_mean", "Gate of chosen tokens: mean", "weight", False),
    Statistic("gate_std", "Gate of chosen tokens: spread", "standard deviation of weights", False),
)
TARGET = FAINT | {"linestyle": "--", "alpha": 1, "zorder": 4}
"""The look of lines at the configured capacity."""

TOP = 1.03
"""The upper end of an axis of shares."""

MOST_LABELS = 16
"""The most layers that are named below the bars."""


@drawing
def draw_profile(log: Log) -> Any:
    """Draw each statistic twice: over training, and to the right of it as bars over layers with the same axis."""
    number = len(log.routed_layers)
    figure, axes = panels(12, 8.5, rows=3, columns=4, width_ratios=(3, 1.3, 3, 1.3))
    colours = _colours(number)
    pairs = axes.reshape(len(STATISTICS), 2)
    for (wide, narrow), statistic in zip(pairs, STATISTICS, strict=True):
        narrow.sharey(wide)
        _over_training(wide, log, statistic, colours)
        _at_the_end(narrow, log, statistic, colours)
    for wide, narrow in pairs[-2:]:
        wide.set_xlabel("steps")
        narrow.set_xlabel("layer")
    for _, narrow in pairs[:2]:
        narrow.set_title("the last tenth")
    layers = "1 layer" if number == 1 else f"{number} layers"
    figure.suptitle(f"{log.name}: routing in {layers}")
    return figure


def _over_training(panel: Any, log: Log, statistic: Statistic, colours: list[Any]) -> None:
    values = log.routing[statistic.key]  # (N, L)
    lines = smooth(values) if log.is_long else values
    for layer, colour in enumerate(colours):
        if log.is_long:
            panel.plot(log.steps, values[:, layer], color=colour, linewidth=0.6, alpha=0.2, zorder=1)
        panel.plot(log.steps, lines[:, layer], color=colour, linewidth=1.3)
    if statistic.key == CAPACITY:
        for target in np.unique(log.routing["target"], axis=1).T:  # layers may differ
            panel.plot(log.steps, target, **TARGET)
    panel.set_title(statistic.title, loc="left")
    panel.set_ylabel(statistic.unit)
    panel.set_xlim(left=0)
    panel.locator_params(axis="x", nbins=5)
    panel.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    if statistic.is_share:
        panel.set_ylim(0, _top(log, lines) if statistic.key == CAPACITY else TOP)
        panel.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
    else:
        panel.axhline(0, **FAINT)


def _top(log: Log, capacities: Numbers) -> float:
    """Return the upper end of the axis of capacities: half as much again as the highest.

    The first tenth of training does not count: capacities that begin higher come down from above the panel.
    """
    highest = max(log.routing["target"].max(), capacities[len(capacities) // 10 :].max())
    return min(TOP, 1.5 * float(highest))


def _at_the_end(panel: Any, log: Log, statistic: Statistic, colours: list[Any]) -> None:
    places = np.arange(len(colours))
    panel.bar(places, at_the_end(log.routing[statistic.key]), color=colours, width=0.75)
    if statistic.key == CAPACITY:
        target = at_the_end(log.routing["target"])
        panel.hlines(target, places - 0.5, places + 0.5, **TARGET)
    every = -(-len(places) // MOST_LABELS)
    style: dict[str, Any] = {}
    if len(places) > 6:
        style = {"rotation": 90, "fontsize": "small"}
    panel.set_xticks(places[::every], log.routed_layers[::every], **style)
    for label, colour in zip(panel.get_xticklabels(), colours[::every], strict=True):
        label.set_color(colour)
    room = max(0.6, 2 - len(places) / 2)  # so that a single bar does not fill the panel
    panel.set_xlim(-room, len(places) - 1 + room)
    panel.tick_params(labelleft=False)


def at_the_end(values: Numbers) -> Numbers:
    """Return the mean of the last tenth of the lines: (N, L) -> (L,)."""
    mean: Numbers = values[-max(1, len(values) // 10) :].mean(0)
    return mean


def _colours(number: int) -> list[Any]:
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("layers", RAMP)
    return list(colours(np.linspace(0, 1, number)))
