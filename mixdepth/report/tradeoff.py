"""A plot of loss against decode speed, from a list of measurements."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mixdepth.config import is_number
from mixdepth.files import read_json
from mixdepth.report.figures import COLOURS, FAINT, drawing, look, panels

MOST_LOSS = 1.03
LEAST_SPEED = 1.25
"""The goal, relative to the loss and the speed of the reference."""

PLACES = (
    (8, 0, "left", "center"),
    (-8, 0, "right", "center"),
    (0, 8, "center", "bottom"),
    (0, -8, "center", "top"),
    (7, 7, "left", "bottom"),
    (7, -7, "left", "top"),
    (-7, 7, "right", "bottom"),
    (-7, -7, "right", "top"),
)
"""The places of a name next to its mark, the best one first: points to the right and up, and the alignment."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model's measurements."""

    name: str
    loss: float
    tokens_per_second: float
    low: float | None = None
    """The lower end of an interval of the speed. It comes together with `high`."""
    high: float | None = None
    group: str | None = None
    """The models of a group share colour and marker."""


def read_rows(path: str | Path) -> list[Row]:
    """Read the rows of a JSON file."""
    if not Path(path).is_file():
        raise ValueError(f"{str(path)!r} is not a file: give one with a list of rows, or the folders of runs")
    return as_rows(read_json(Path(path)), repr(str(path)))


def as_rows(rows: Any, where: str = "the list") -> list[Row]:
    """Check rows, and turn those that are mappings into values."""
    if not isinstance(rows, Sequence) or isinstance(rows, str) or not rows:
        raise ValueError(f"{where} must be a list of rows, each with name, loss and tokens_per_second")
    return [_as_row(row, f"row {number} of {where}") for number, row in enumerate(rows, 1)]


def _as_row(row: Any, where: str) -> Row:
    if isinstance(row, Row):
        return row
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} must have name, loss and tokens_per_second, and is {row!r}")
    for name in ("name", "loss", "tokens_per_second"):
        if name not in row:
            raise ValueError(f"{where} has no {name}")
    values = {field.name: row[field.name] for field in fields(Row) if row.get(field.name) is not None}
    for name in ("loss", "tokens_per_second", "low", "high"):
        if name in values and not _is_positive(values[name]):
            raise ValueError(f"{where}: {name} must be a positive number, not {values[name]!r}")
    if ("low" in values) != ("high" in values):
        raise ValueError(f"{where}: low and high come together")
    values["name"] = str(row["name"])
    return Row(**values)


def _is_positive(value: Any) -> bool:
    return is_number(value) and math.isfinite(value) and value > 0


@drawing
def draw_speed(rows: Sequence[Row], reference: str | None = None) -> Any:
    """Draw a mark with a name for each model; with a reference also the goal: nearly its loss, and faster."""
    from matplotlib.lines import Line2D

    figure, panel = panels(8, 5.4)
    # 1. Marks, and lines for the intervals.
    groups = list(dict.fromkeys(row.group for row in rows))
    styles = {group: look(number) for number, group in enumerate(groups, 1)}
    for row in rows:
        style = styles[row.group]
        if row.low is not None:
            panel.plot([row.low, row.high], [row.loss, row.loss], color=style["color"], linewidth=1.3)
        panel.plot([row.tokens_per_second], [row.loss], markersize=8, **style)
    panel.set_xlabel("decode speed (tokens per second)")
    panel.set_ylabel("loss (nats per token)")
    panel.margins(0.15)
    # 2. The goal, and a legend of the groups.
    if reference is not None:
        _draw_goal(panel, _find(rows, reference))
    handles = []
    for group, style in styles.items():
        if group is not None:
            handles.append(Line2D([], [], label=group, **style | {"linestyle": ""}))
    if handles:
        panel.legend(handles=handles)
    # 3. Names come last, because they avoid everything else.
    _write_names(figure, panel, rows)
    return figure


def _find(rows: Sequence[Row], reference: str) -> Row:
    for row in rows:
        if row.name == reference:
            return row
    names = ", ".join(row.name for row in rows)
    raise ValueError(f"the reference {reference!r} is none of the rows: {names}")


def _draw_goal(panel: Any, reference: Row) -> None:
    """Draw lines at the goal, shade its corner of the panel, and circle the reference."""
    x = LEAST_SPEED * reference.tokens_per_second
    y = MOST_LOSS * reference.loss
    panel.plot(reference.tokens_per_second, reference.loss, "o", markersize=15, fillstyle="none", color=COLOURS[0])
    panel.axhline(y, linestyle="--", **FAINT)
    panel.axvline(x, linestyle="--", **FAINT)
    limits = {"xlim": panel.get_xlim(), "ylim": panel.get_ylim()}
    x_low, x_high = limits["xlim"]
    y_low, _ = limits["ylim"]
    panel.fill_between([x, x_high], y_low, y, color=COLOURS[3], alpha=0.08, linewidth=0, zorder=0)
    panel.set(**limits)
    small = {"xytext": (4, 4), "textcoords": "offset points", "fontsize": "small", "color": COLOURS[0]}
    panel.annotate(f"+{100 * (MOST_LOSS - 1):.0f} % loss", (x_low, y), **small)
    panel.annotate(f"{LEAST_SPEED} x speed", (x, y_low), **small)


def _write_names(figure: Any, panel: Any, rows: Sequence[Row]) -> None:
    """Write each name next to its mark, at the place where it covers least of what is there already."""
    figure.draw_without_rendering()  # after this, marks and axes are where they will be
    artists = [*panel.lines, *panel.texts]
    if panel.get_legend() is not None:
        artists.append(panel.get_legend())
    occupied = [artist.get_window_extent().padded(2) for artist in artists]
    for row in rows:
        mark = (row.tokens_per_second, row.loss)
        name = panel.annotate(row.name, mark, (0, 0), textcoords="offset points", fontsize="small", in_layout=False)
        areas = []
        for place in PLACES:
            _move(name, place)
            areas.append(_covered_area(name, panel, occupied))
        best = areas.index(min(areas))
        _move(name, PLACES[best])
        occupied.append(name.get_window_extent())


def _move(name: Any, place: tuple[int, int, str, str]) -> None:
    right, up, horizontal, vertical = place
    name.set(position=(right, up), horizontalalignment=horizontal, verticalalignment=vertical)


def _covered_area(name: Any, panel: Any, occupied: Sequence[Any]) -> float:
    """Return how much a name covers of what is there already, together with its part outside the panel."""
    from matplotlib.transforms import Bbox

    box = name.get_window_extent()
    outside = _area(box) - _area(Bbox.intersection(box, panel.bbox))
    return outside + sum(_area(Bbox.intersection(box, other)) for other in occupied)


def _area(box: Any) -> float:
    if box is None:  # two boxes that do not meet
        return 0.0
    return float(box.width * box.height)
