"""Numbers as one writes them, and rows of text in columns."""

import sys
from collections.abc import Iterable, Sequence


def columns(rows: Iterable[Sequence[str]], left: Sequence[int] = ()) -> str:
    """To the right, but for the columns named in `left`.

    >>> print(columns([["name", "size"], ["a", "10"]], left=(0,)))
    name  size
    a       10
    """
    rows = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def short(number: float) -> str:
    """As one writes it.

    >>> short(2e9), short(3e13), short(12)
    ('2e9', '3e13', '12')
    """
    digits, _, exponent = f"{number:.3g}".partition("e+")
    return f"{digits}e{int(exponent)}" if exponent else digits


def parse_value(text: str) -> object:
    """A number, a word, a list as in 0.5,0.25, or `none`. The settings say what is wrong with it."""
    if "," in text:
        return tuple(parse_value(part) for part in text.split(",") if part)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return None if text == "none" else text


def tell(sentence: str) -> None:
    print(f"mixdepth: {sentence}", file=sys.stderr, flush=True)
