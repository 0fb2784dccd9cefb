"""Training curves: loss against steps, FLOPs and time, runs side by side."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mixdepth.report.figures import COLOURS, drawing, look, panels
from mixdepth.report.logs import Log, Numbers, smooth
from mixdepth.text import short

BEGINNING = 0.08
"""The share of a long run whose losses may lie above the panel: they fall too far to show what comes later."""
UNITS = (("seconds", 1), ("minutes", 60), ("hours", 3600), ("days", 86400))


@drawing
def draw_curves(logs: Sequence[Log]) -> Any:
    """Three panels that share their losses: against steps, FLOPs and time."""
    figure, (steps, flops, time) = panels(12, 4.6, columns=3, sharey=True)
    longest = max([0.0, *(seconds for log in logs for seconds in log.seconds if not np.isnan(seconds))])
    unit, size = [unit for unit in UNITS if unit[1] == 1 or longest >= 3 * unit[1]][-1]
    for index, log in enumerate(logs):
        for panel, x in ((steps, log.steps), (flops, log.flops), (time, log.seconds / size)):
            _draw(panel, log, x, look(index))
    for panel, label, written in (
        (steps, "steps", lambda x, _: f"{x:,.0f}"),
        (flops, "training FLOPs", lambda x, _: short(x)),
        (time, f"training time ({unit})", lambda x, _: f"{x:g}"),
    ):
        panel.set_xlabel(label)
        panel.margins(x=0.07)  # for what stands beside the end
        panel.set_xlim(left=0)
        panel.locator_params(axis="x", nbins=5)
        panel.xaxis.set_major_formatter(written)
    steps.set_ylabel("loss (nats per token)")
    steps.set_ylim(*_limits(logs))
    handles = _legend(logs)
    fitting = 150 // (9 + max(len(handle.get_label()) for handle in handles))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), max(1, fitting)))
    return figure


def _draw(panel: Any, log: Log, x: Numbers, style: dict[str, Any]) -> None:
    """What was logged, smoothed where it is much; at the end the held-out loss, and beside it that with look-ahead."""
    from matplotlib.transforms import ScaledTranslation

    line = {"color": style["color"], "linestyle": style["linestyle"]}
    if log.is_long:
        panel.plot(x, log.loss, color=style["color"], linewidth=0.7, alpha=0.3, zorder=1)
        panel.plot(x, smooth(log.loss, log.weights), linewidth=1.5, **line)
    else:
        panel.plot(x, log.loss, marker=".", markersize=4, linewidth=1.2, **line)
    known = ~np.isnan(x)
    if not log.evaluations or not known.any():
        return
    places = np.interp([found.step for found in log.evaluations], log.steps[known], x[known])
    losses = [found.loss for found in log.evaluations]
    mark = {"color": style["color"], "linestyle": "", "marker": style["marker"], "zorder": 3}
    panel.plot(places[:-1], losses[:-1], markersize=3.5, **mark)
    panel.plot(places[-1:], losses[-1:], markersize=6.5, **mark)
    lookahead = log.evaluations[-1].lookahead_loss
    if lookahead is not None:
        beside = panel.transData + ScaledTranslation(11 / 72, 0, panel.figure.dpi_scale_trans)
        panel.plot(places[-1:], [lookahead], markersize=6.5, markerfacecolor="none", transform=beside, **mark)


def _limits(logs: Sequence[Log]) -> tuple[float, float]:
    """Around all losses, but for the noise and the steep beginnings of long runs."""
    shown: list[float] = []
    for log in logs:
        losses = smooth(log.loss, log.weights)[int(BEGINNING * len(log.loss)) :] if log.is_long else log.loss
        shown += [*losses, *(found.loss for found in log.evaluations)]
        shown += [found.lookahead_loss for found in log.evaluations[-1:] if found.lookahead_loss is not None]
    shown = [loss for loss in shown if math.isfinite(loss)] or [0.0]
    room = 0.05 * (max(shown) - min(shown)) or 0.1
    return min(shown) - room, max(shown) + room


def _legend(logs: Sequence[Log]) -> list[Any]:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=log.name, markersize=6, **look(index)) for index, log in enumerate(logs)]
    mark: dict[str, Any] = {"color": COLOURS[0], "marker": "o", "linestyle": "", "markersize": 6}
    if any(log.evaluations for log in logs):
        handles.append(Line2D([], [], label="held-out loss, causal", **mark))
    if any(log.evaluations[-1].lookahead_loss is not None for log in logs if log.evaluations):
        handles.append(Line2D([], [], label="held-out loss with look-ahead", markerfacecolor="none", **mark))
    return handles
