"""Loss against decode speed, from a list of measurements."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mixdepth.config import is_number
from mixdepth.files import read_json
from mixdepth.report.figures import COLOURS, FAINT, drawing, look, panels

MORE_LOSS, FASTER = 1.03, 1.25
"""The goal, relative to the reference: at most so much loss, at least so fast."""
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
"""Where a name may stand beside its mark, the best first: points to the right and up, and its alignment."""


class Row(NamedTuple):
    """One model's measurements."""

    name: str
    loss: float
    tokens_per_second: float
    low: float | None = None
    """The interval of the speed, with `high`."""
    high: float | None = None
    group: str | None = None
    """Models of a group share colour and marker."""


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a JSON file."""
    if not Path(path).is_file():
        raise ValueError(f"{str(path)!r} is no file: give one with a list of rows, or the folders of runs")
    return as_rows(read_json(Path(path)), repr(str(path)))


def as_rows(rows: Any, where: str = "the list") -> list[Row]:
    """Rows as given, checked."""
    if not isinstance(rows, Sequence) or isinstance(rows, str) or not rows:
        raise ValueError(f"{where} must be a list of rows, each with name, loss and tokens_per_second")
    return [row if isinstance(row, Row) else _row(row, f"row {i} of {where}") for i, row in enumerate(rows, 1)]


def _row(row: Any, where: str) -> Row:
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} must have name, loss and tokens_per_second, and is {row!r}")
    for name in ("name", "loss", "tokens_per_second"):
        if name not in row:
            raise ValueError(f"{where} has no {name}")
    given = {name: row[name] for name in Row._fields if row.get(name) is not None}
    for name in ("loss", "tokens_per_second", "low", "high"):
        if name in given and not (is_number(given[name]) and math.isfinite(given[name]) and given[name] > 0):
            raise ValueError(f"{where}: {name} must be a positive number, not {given[name]!r}")
    if ("low" in given) != ("high" in given):
        raise ValueError(f"{where}: low and high come together")
    return Row(**{**given, "name": str(row["name"])})


@drawing
def draw_speed(rows: Sequence[Row], reference: str | None = None) -> Any:
    """A mark for each model, with its name; with a reference also the goal: nearly its loss, and faster."""
    from matplotlib.lines import Line2D

    figure, panel = panels(8, 5.4)
    groups = list(dict.fromkeys(row.group for row in rows))
    styles = {group: look(number + 1) for number, group in enumerate(groups)}
    for row in rows:
        style = styles[row.group]
        if row.low is not None:
            panel.plot([row.low, row.high], [row.loss, row.loss], color=style["color"], linewidth=1.3)
        panel.plot([row.tokens_per_second], [row.loss], markersize=8, **style)
    panel.set_xlabel("decode speed (tokens per second)")
    panel.set_ylabel("loss (nats per token)")
    panel.margins(0.15)
    if reference is not None:
        _draw_goal(panel, _find(rows, reference))
    named = {group: style for group, style in styles.items() if group is not None}
    if named:
        panel.legend(
            handles=[Line2D([], [], label=group, **style | {"linestyle": ""}) for group, style in named.items()]
        )
    _write_names(figure, panel, rows)
    return figure


def _find(rows: Sequence[Row], reference: str) -> Row:
    for row in rows:
        if row.name == reference:
            return row
    raise ValueError(f"the reference {reference!r} is none of the rows: {', '.join(row.name for row in rows)}")


def _draw_goal(panel: Any, reference: Row) -> None:
    """Lines at the goal, and its corner of the panel, of the reference's loss and speed."""
    x, y = FASTER * reference.tokens_per_second, MORE_LOSS * reference.loss
    panel.plot(reference.tokens_per_second, reference.loss, "o", markersize=15, fillstyle="none", color=COLOURS[0])
    panel.axhline(y, linestyle="--", **FAINT)
    panel.axvline(x, linestyle="--", **FAINT)
    (left, right), (low, high) = panel.get_xlim(), panel.get_ylim()
    panel.fill_between([x, right], low, y, color=COLOURS[3], alpha=0.08, linewidth=0, zorder=0)
    panel.set(xlim=(left, right), ylim=(low, high))
    small = {"xytext": (4, 4), "textcoords": "offset points", "fontsize": "small", "color": COLOURS[0]}
    panel.annotate(f"+{100 * (MORE_LOSS - 1):.0f} % loss", (left, y), **small)
    panel.annotate(f"{FASTER} x speed", (x, low), **small)


def _write_names(figure: Any, panel: Any, rows: Sequence[Row]) -> None:
    """Each name beside its mark, at the place where it covers least of what is there already."""
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()  # from here on all is where it will be
    there = [*panel.lines, *panel.texts, *filter(None, [panel.get_legend()])]
    taken = [artist.get_window_extent().padded(2) for artist in there]
    for row in rows:
        at = (row.tokens_per_second, row.loss)
        name = panel.annotate(row.name, at, (0, 0), textcoords="offset points", fontsize="small", in_layout=False)

        def covered(place: tuple[int, int, str, str], name: Any = name) -> float:
            name.set(position=place[:2], horizontalalignment=place[2], verticalalignment=place[3])
            box = name.get_window_extent()
            outside = _area(box) - _area(Bbox.intersection(box, panel.bbox))
            return outside + sum(_area(Bbox.intersection(box, other)) for other in taken)

        covered(min(PLACES, key=covered))
        taken.append(name.get_window_extent())


def _area(box: Any) -> float:
    return 0.0 if box is None else float(box.width * box.height)
