"""Training curves: loss against steps, FLOPs and time, of several runs in the same panels."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mixdepth.report.figures import COLOURS, drawing, look, panels
from mixdepth.report.logs import Log, Numbers, smooth
from mixdepth.text import short

BEGINNING = 0.08
"""The share of a long run whose losses may lie above the panel. They fall too far to show the later ones."""

UNITS = (("seconds", 1), ("minutes", 60), ("hours", 3600), ("days", 86400))


@drawing
def draw_curves(logs: Sequence[Log]) -> Any:
    """Draw three panels that share the axis of losses: against steps, FLOPs and time."""
    figure, (steps, flops, time) = panels(12, 4.6, columns=3, sharey=True)
    # 1. The lines.
    unit, size = _unit_of_time(logs)
    for index, log in enumerate(logs):
        style = look(index)
        _draw(steps, log, log.steps, style)
        _draw(flops, log, log.flops, style)
        _draw(time, log, log.seconds / size, style)
    # 2. The axes.
    _label(steps, "steps", lambda x, _: f"{x:,.0f}")
    _label(flops, "training FLOPs", lambda x, _: short(x))
    _label(time, f"training time ({unit})", lambda x, _: f"{x:g}")
    steps.set_ylabel("loss (nats per token)")
    steps.set_ylim(*_limits(logs))
    # 3. The legend, in as many columns as fit.
    handles = _legend(logs)
    longest_label = max(len(handle.get_label()) for handle in handles)
    fitting = max(1, 150 // (9 + longest_label))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), fitting))
    return figure


def _unit_of_time(logs: Sequence[Log]) -> tuple[str, int]:
    """Return the largest unit that the longest run has three of, and its seconds."""
    longest = 0.0
    for log in logs:
        for seconds in log.seconds:
            if seconds > longest:  # NaN is not
                longest = seconds
    fitting = UNITS[0]
    for unit in UNITS[1:]:
        if longest >= 3 * unit[1]:
            fitting = unit
    return fitting


def _label(panel: Any, label: str, written: Callable[[float, Any], str]) -> None:
    """Label the horizontal axis, whose numbers are written by the function `written`."""
    panel.set_xlabel(label)
    panel.margins(x=0.07)  # room for the mark to the right of the last one
    panel.set_xlim(left=0)
    panel.locator_params(axis="x", nbins=5)
    panel.xaxis.set_major_formatter(written)


def _draw(panel: Any, log: Log, x: Numbers, style: dict[str, Any]) -> None:
    """Draw the losses of a run: the training loss, smoothed in a long log, and marks for the held-out loss.

    The last mark has a hollow one next to it for the loss with look-ahead.
    """
    from matplotlib.transforms import ScaledTranslation

    # 1. The training loss.
    line = {"color": style["color"], "linestyle": style["linestyle"]}
    if log.is_long:
        panel.plot(x, log.loss, color=style["color"], linewidth=0.7, alpha=0.3, zorder=1)
        panel.plot(x, smooth(log.loss, log.weights), linewidth=1.5, **line)
    else:
        panel.plot(x, log.loss, marker=".", markersize=4, linewidth=1.2, **line)
    # 2. The held-out losses, at the places that their steps have on this axis.
    is_number = ~np.isnan(x)  # (N,)
    if not log.evaluations or not is_number.any():
        return
    evaluated_steps = [evaluation.step for evaluation in log.evaluations]
    places = np.interp(evaluated_steps, log.steps[is_number], x[is_number])
    losses = [evaluation.loss for evaluation in log.evaluations]
    mark = {"color": style["color"], "linestyle": "", "marker": style["marker"], "zorder": 3}
    panel.plot(places[:-1], losses[:-1], markersize=3.5, **mark)
    panel.plot(places[-1:], losses[-1:], markersize=6.5, **mark)
    lookahead = log.evaluations[-1].lookahead_loss
    if lookahead is not None:
        next_to_it = panel.transData + ScaledTranslation(11 / 72, 0, panel.figure.dpi_scale_trans)
        panel.plot(places[-1:], [lookahead], markersize=6.5, markerfacecolor="none", transform=next_to_it, **mark)


def _limits(logs: Sequence[Log]) -> tuple[float, float]:
    """Return the ends of the axis of losses: around all, without the noise and the steep beginnings of long runs."""
    losses: list[float] = []
    for log in logs:
        if log.is_long:
            smoothed = smooth(log.loss, log.weights)
            losses += list(smoothed[int(BEGINNING * len(smoothed)) :])
        else:
            losses += list(log.loss)
        losses += [evaluation.loss for evaluation in log.evaluations]
        if log.evaluations and log.evaluations[-1].lookahead_loss is not None:
            losses.append(log.evaluations[-1].lookahead_loss)
    finite = [loss for loss in losses if math.isfinite(loss)]
    if not finite:  # a run that has diverged from the start
        finite = [0.0]
    lowest, highest = min(finite), max(finite)
    room = 0.05 * (highest - lowest) if highest > lowest else 0.1
    return lowest - room, highest + room


def _legend(logs: Sequence[Log]) -> list[Any]:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=log.name, markersize=6, **look(index)) for index, log in enumerate(logs)]
    mark: dict[str, Any] = {"color": COLOURS[0], "marker": "o", "linestyle": "", "markersize": 6}
    last_evaluations = [log.evaluations[-1] for log in logs if log.evaluations]
    if last_evaluations:
        handles.append(Line2D([], [], label="held-out loss, causal", **mark))
    if any(evaluation.lookahead_loss is not None for evaluation in last_evaluations):
        handles.append(Line2D([], [], label="held-out loss with look-ahead", markerfacecolor="none", **mark))
    return handles
