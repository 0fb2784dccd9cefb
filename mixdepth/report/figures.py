"""How our figures look, and how they become files, or a part of a page."""

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
"""Grey first. They have a contrast of 3 on light and dark pages; with less than full colour vision they are closer, so
that whatever has a colour has a marker, dashes or a place of its own too."""
MARKERS = "osD^vP*X"
DASHES = ("-", "--", ":", "-.")
RAMP = ("#2f66ee", "#8a5bd0", "#c8508a", "#dd6a3c", "#b08a00")
"""From the first of something to the last, as layers are: blue to yellow is a way that everyone sees."""
INK = "#2b2b2c"
"""Of words and axes, and of nothing else: in a page they take the page's own colour."""
FAINT = {"color": "#808080", "linewidth": 0.8, "alpha": 0.6, "zorder": 0}
STYLE = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.linewidth": 0.7,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.hashsalt": "mixdepth",  # the same file each time
    "svg.fonttype": "none",  # words stay words
}
P = ParamSpec("P")


def drawing(draw: Callable[P, Any]) -> Callable[P, Any]:
    """A function that returns a figure, in our look; it needs Matplotlib when it is called."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Any:
        check_matplotlib()
        from matplotlib import rc_context

        with rc_context(STYLE):
            return draw(*args, **kwargs)

    return drawn


def check_matplotlib() -> None:
    """Refuse to draw without it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("plots need Matplotlib: pip install 'mixdepth[plots]'")


def panels(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    """A figure of that many inches, which belongs to no window, and its panels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def look(index: int) -> dict[str, Any]:
    """Colour, marker and dashes of the line with this number: 32 lines differ."""
    dashes = DASHES[index // len(COLOURS) % len(DASHES)]
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)], "linestyle": dashes}


def save(figure: Any, folder: str | Path, name: str) -> list[Path]:
    """Write the figure as PNG and SVG, both whole or neither; the paths."""
    from matplotlib import rc_context

    folder = Path(folder)
    paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
    aside = [path.with_name(f".{path.name}") for path in paths]
    with rc_context(STYLE), writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            for path in aside:
                dated = {"Date": None} if path.suffix == ".svg" else None
                figure.savefig(path, format=path.suffix[1:], dpi=150, metadata=dated)
            for path, final in zip(aside, paths, strict=True):
                path.replace(final)
        finally:
            for path in aside:
                path.unlink(missing_ok=True)
    return paths


def as_svg(figure: Any, about: str) -> str:
    """The figure as an <svg> element of a page, light or dark: transparent, words in the page's colour.

    It is as wide as its place allows, and `about` is read to those who do not see it. Its ids begin with a hash of
    its content, so that figures do not take each other's.
    """
    from matplotlib import rc_context

    file = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with rc_context(STYLE):
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r"\s*<style.*?</style>", "", text, flags=re.DOTALL)  # it would hold for the whole page
    key = "f" + hashlib.sha256(text.encode()).hexdigest()[:10]
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda m: f' id="{key}-{m[1]}"' if m[1] in used else "", text)
    text = re.sub(r'(url\(|href=")#', rf"\g<1>#{key}-", text)
    width = re.search(r' width="([^"]+)"', text)
    assert width is not None
    text = re.sub(r' (width|height)="[^"]+"', "", text, count=2)
    style = f"width: 100%; max-width: {width[1]}; height: auto; stroke-linejoin: round; stroke-linecap: butt"
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(about)}" style="{style}"', 1)
