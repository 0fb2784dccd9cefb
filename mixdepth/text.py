"""Numbers as people write them, rows of text in columns, and messages to the user."""

import sys
from collections.abc import Iterable, Sequence


def columns(rows: Iterable[Sequence[str]], left: Sequence[int] = ()) -> str:
    """Align the cells of each column to the right, or to the left if its number is in `left`.

    >>> print(columns([["name", "size"], ["a", "10"]], left=(0,)))
    name  size
    a       10
    """
    rows = [list(row) for row in rows]
    widths = []
    for column in zip(*rows, strict=True):
        widths.append(max(len(cell) for cell in column))
    lines = []
    for row in rows:
        cells = []
        for index, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(cell.ljust(width) if index in left else cell.rjust(width))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def short(number: float) -> str:
    """Return a number in a few characters.

    >>> short(2e9), short(3e13), short(12)
    ('2e9', '3e13', '12')
    """
    digits, _, exponent = f"{number:.3g}".partition("e+")
    if not exponent:
        return digits
    return f"{digits}e{int(exponent)}"


def parse_value(text: str) -> object:
    """Read a number, a word, a list as in 0.5,0.25, or `none`. The settings check whether the value makes sense."""
    if "," in text:
        return tuple(parse_value(part) for part in text.split(",") if part)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return None if text == "none" else text


def tell(sentence: str) -> None:
    """Print a message to the user, next to what a command prints as its result."""
    print(f"mixdepth: {sentence}", file=sys.stderr, flush=True)
