"""Numbers as one writes them, and rows of text in columns."""

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
