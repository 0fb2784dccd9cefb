"""The look of all figures, and how they become files or parts of a page."""

import functools
import hashlib
import importlib.util
import io
import re
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any, ParamSpec

from mixdepth.files import writing

COLOURS = ("#787878", "#2f66ee", "#ee6e10", "#16a866", "#a226c6", "#b06000", "#b06cc4", "#c8144c")
"""The colours of lines, grey first. Their contrast is at least 3 on light and dark pages. Colour-blind readers see
less difference, so everything that has a colour also has a marker, dashes or a place of its own."""

MARKERS = "osD^vP*X"
DASHES = ("-", "--", ":", "-.")

RAMP = ("#2f66ee", "#8a5bd0", "#c8508a", "#dd6a3c", "#b08a00")
"""A sequence of colours for ordered things such as layers. Blue to yellow is safe for colour-blind readers."""

INK = "#2b2b2c"
"""The colour of words and axes, and of nothing else: in a page they take the colour of the page's own words."""

FAINT = {"color": "#808080", "linewidth": 0.8, "alpha": 0.6, "zorder": 0}
"""The look of lines that help to read the others."""

STYLE = {
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.linewidth": 0.7,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.hashsalt": "mixdepth",  # the same figure gives the same file each time
    "svg.fonttype": "none",  # words are written as words, not as outlines
}
P = ParamSpec("P")


def drawing(draw: Callable[P, Any]) -> Callable[P, Any]:
    """Decorate a function that returns a figure: it draws in our style, and needs Matplotlib only when it is called."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Any:
        check_matplotlib()
        from matplotlib import rc_context

        with rc_context(STYLE):
            return draw(*args, **kwargs)

    return drawn


def check_matplotlib() -> None:
    """Refuse to draw without Matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("plots need Matplotlib: pip install 'mixdepth[plots]'")


def panels(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    """Make a figure of that many inches, which belongs to no window, and its panels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def look(index: int) -> dict[str, Any]:
    """Return colour, marker and dashes of the line with this number. The first 32 lines all differ."""
    number = len(COLOURS)  # there are as many markers
    return {
        "color": COLOURS[index % number],
        "marker": MARKERS[index % number],
        "linestyle": DASHES[index // number % len(DASHES)],
    }


def save(figure: Any, folder: str | Path, name: str) -> list[Path]:
    """Write the figure as PNG and SVG, both whole or neither, and return the paths."""
    from matplotlib import rc_context

    folder = Path(folder)
    paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
    aside = [path.with_name(f".{path.name}") for path in paths]
    with rc_context(STYLE), writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            for path in aside:
                undated = {"Date": None} if path.suffix == ".svg" else None  # an SVG would hold the time of writing
                figure.savefig(path, format=path.suffix[1:], dpi=150, metadata=undated)
            for path, final in zip(aside, paths, strict=True):
                path.replace(final)
        finally:
            for path in aside:
                path.unlink(missing_ok=True)
    return paths


def as_svg(figure: Any, label: str) -> str:
    """Return the figure as an <svg> element for a light or dark page: transparent, with words in the page's colour.

    It is as wide as its place allows. Screen readers read the `label`.
    """
    from matplotlib import rc_context

    # 1. Write the figure without metadata.
    file = io.StringIO()
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with rc_context(STYLE):
        figure.savefig(file, format="svg", transparent=True, metadata=no_metadata)
    text = file.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r"\s*<style.*?</style>", "", text, flags=re.DOTALL)  # it would apply to the whole page
    # 2. Begin ids with a hash of the content, so that two figures in a page never share one. Drop unused ids.
    key = "f" + hashlib.sha256(text.encode()).hexdigest()[:10]
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', text))

    def renamed(match: re.Match[str]) -> str:
        return f' id="{key}-{match[1]}"' if match[1] in used else ""

    text = re.sub(r' id="([^"]+)"', renamed, text)
    text = re.sub(r'(url\(|href=")#', rf"\g<1>#{key}-", text)
    # 3. Let the page decide how large it is.
    width = re.search(r' width="([^"]+)"', text)
    assert width is not None
    text = re.sub(r' (width|height)="[^"]+"', "", text, count=2)
    style = f"width: 100%; max-width: {width[1]}; height: auto; stroke-linejoin: round; stroke-linecap: butt"
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(label)}" style="{style}"', 1)
