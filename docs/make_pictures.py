"""Draws the pictures of concepts.md and sample.md. They are drawn by rule, not measured.

python docs/make_pictures.py
"""

from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "pictures"
PAPER, INK, FAINT, LINE = "#f8fafc", "#334155", "#64748b", "#cbd5e1"
PROCESSED, SKIPPED, OTHER = "#1f5fa8", "#e2e8f0", "#d97a1e"

WORDS = ("def", "area", "(", "r", ")", ":", "\\n", "return", "pi", "*", "r", "**", "2", "\\n", "\\n", "print")
CHOSEN = {1: (1, 8), 3: (8, 15), 5: (0, 8), 7: (1, 15)}
"""Layer to the two of 16 tokens that it takes: a capacity of 12.5 %."""
SCORES = (0.55, 0.78, 0.12, 0.36, 0.08, 0.16, 0.22, 0.50, 0.74, 0.30, 0.26, 0.20, 0.40, 0.10, 0.14, 0.90)
CUTOFF = 0.64


def text(
    x: float, y: float, words: str, colour: str = INK, size: int = 13, anchor: str = "start", more: str = ""
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"{more}>'
        f"{escape(words)}</text>"
    )


def box(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}"{more}/>'


def line(x: float, y: float, to_x: float, to_y: float, colour: str = LINE, width: float = 2, more: str = "") -> str:
    return f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{colour}" stroke-width="{width:g}"{more}/>'


def picture(width: int, height: int, about: str, parts: list[str]) -> str:
    """A light card with a thin edge, which reads on light pages and on dark ones."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="system-ui, sans-serif"><title>{escape(about)}</title>'
    )
    card = f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" fill="{PAPER}" stroke="{LINE}"/>'
    return "\n".join([head, card, *parts, "</svg>\n"])


def layers() -> str:
    """Tokens x layers: who is processed where."""
    left, top, step, row = 150, 24, 34, 30
    bottom = top + 8 * row
    parts = [line(left + step * t, top - 8, left + step * t, bottom + 6) for t in range(16)]
    for layer in range(8):
        y = top + (7 - layer) * row
        is_routed = layer in CHOSEN
        parts.append(text(20, y + 15, f"layer {layer}", INK))
        parts.append(text(76, y + 15, "routed" if is_routed else "dense", PROCESSED if is_routed else FAINT, 12))
        for t in CHOSEN.get(layer, range(16)):
            parts.append(box(left + step * t - 11, y, 22, 20, PROCESSED))
        parts.append(text(left + step * 16 - 6, y + 15, f"{len(CHOSEN.get(layer, WORDS))} of 16", FAINT, 12))
    for t, word in enumerate(WORDS):
        parts.append(text(left + step * t, bottom + 24, word, INK, 11, "middle", ' font-family="monospace"'))
    parts.append(box(left - 11, bottom + 42, 22, 14, PROCESSED))
    parts.append(text(left + 18, bottom + 54, "attention and MLP", FAINT, 12))
    parts.append(line(left + 160, bottom + 42, left + 160, bottom + 56))
    parts.append(text(left + 170, bottom + 54, "the residual stream: the token keeps its value, to the bit", FAINT, 12))
    return picture(770, bottom + 72, "In every second layer 2 of 16 tokens are processed, the others pass by", parts)


def gate() -> str:
    """What the weight does to a token: between itself and its processed self, or between nothing and that."""
    parts = []
    zero, token, processed = 60, 300, 500
    for y, rule, start, note in (
        (70, "x + w * (block(x) - x)", token, "w = 0: the token stays as it was; w = 1: the block, as if not routed"),
        (190, "w * block(x)", zero, "w = 0: the token is gone; only w = 1 keeps the stream at its size"),
    ):
        parts.append(text(zero, y - 38, rule, INK, 15, "start", ' font-family="monospace"'))
        parts.append(line(zero, y, 640, y))
        parts.append(line(start, y, processed, y, PROCESSED, 5))
        for x, name in ((zero, "0"), (token, "x"), (processed, "block(x)")):
            parts.append(f'<circle cx="{x}" cy="{y}" r="5" fill="{INK}"/>')
            parts.append(text(x, y + 22, name, INK, 13, "middle"))
        x = start + 0.2 * (processed - start)
        parts.append(f'<circle cx="{x:g}" cy="{y}" r="6" fill="{OTHER}"/>')
        parts.append(text(x, y - 12, "w = 0.2", OTHER, 12, "middle"))
        parts.append(text(zero, y + 44, note, FAINT, 12))
    return picture(690, 250, "A gate on the update leaves the stream in place; a gate on the output shrinks it", parts)


def bars(left: int, top: int, chosen: list[int], known: int) -> list[str]:
    """Scores of 16 tokens as bars 100 high; those from `known` on are not there yet."""
    parts = [line(left - 6, top + 100, left + 16 * 18, top + 100, FAINT, 1)]
    for t, score in enumerate(SCORES):
        x, height = left + 18 * t, 100 * score
        if t < known:
            parts.append(box(x, top + 100 - height, 12, height, PROCESSED if t in chosen else "#a9b8cc"))
        else:
            dashed = f' stroke="{LINE}" stroke-dasharray="3 3"'
            parts.append(box(x, top + 60, 12, 40, "none", dashed))
            parts.append(text(x + 6, top + 85, "?", FAINT, 12, "middle"))
    return parts


def decision() -> str:
    """Top k of training, against the causal decision of evaluation and sampling."""
    top, left, right = 78, 30, 400
    best = sorted(range(16), key=lambda t: -SCORES[t])[:2]
    known = 10
    above = [t for t in range(known) if SCORES[t] > CUTOFF]
    parts = [
        text(left, 28, "Training: top k of the row", INK, 15),
        text(left, 48, "k = ceil(0.125 x 16) = 2 tokens, exactly", FAINT, 12),
        *bars(left, top, best, 16),
        text(left, top + 122, "The last token takes the place that token 8 would", FAINT, 12),
        text(left, top + 138, "have had: the choice looks ahead.", FAINT, 12),
        text(right, 28, "Sampling: each token by itself", INK, 15),
        text(right, 48, "chosen if its own guess or score exceeds a cut", FAINT, 12),
        *bars(right, top, above, known),
        line(
            right - 6,
            top + 100 * (1 - CUTOFF),
            right + 288,
            top + 100 * (1 - CUTOFF),
            OTHER,
            2,
            ' stroke-dasharray="6 4"',
        ),
        text(right, top + 122, "What comes later changes no decision. How many", FAINT, 12),
        text(right, top + 138, "are chosen is learned, and measured, not fixed.", FAINT, 12),
    ]
    return picture(740, 234, "Training takes the top k of a row; sampling decides token by token", parts)


def cache() -> str:
    """The rows of a dense layer's cache and of a routed one's."""
    left, size, gap = 150, 26, 44
    stored = ((1, 2, 6, 11), (4, 9))  # columns; row 1 begins with three columns of padding
    parts = [text(20, 28, "A dense layer stores every column", INK, 15)]
    for row, padding in enumerate((0, 3)):
        y = 44 + row * 34
        parts.append(text(20, y + 17, f"row {row}", INK))
        for column in range(12):
            fill = SKIPPED if column < padding else PROCESSED
            parts.append(box(left + gap * column, y, gap - 4, size, fill))
            colour, name = (FAINT, "pad") if column < padding else ("#ffffff", str(column))
            parts.append(text(left + gap * column + 20, y + 18, name, colour, 12, "middle"))
    top = 150
    parts.append(text(20, top, "A routed layer stores what it processed, row by row", INK, 15))
    for row, columns in enumerate(stored):
        y = top + 16 + row * 34
        parts.append(text(20, y + 17, f"row {row}", INK))
        for slot in range(4):
            if slot < len(columns):
                parts.append(box(left + gap * slot, y, gap - 4, size, PROCESSED))
                parts.append(text(left + gap * slot + 20, y + 18, str(columns[slot]), "#ffffff", 12, "middle"))
            else:
                parts.append(
                    box(left + gap * slot, y, gap - 4, size, "none", f' stroke="{LINE}" stroke-dasharray="3 3"')
                )
        parts.append(text(left + gap * 4 + 12, y + 18, f"length {len(columns)}, seen 12", FAINT, 12))
    parts.append(
        text(20, top + 108, "Numbers are columns of the sequence: each key keeps its own, and with it its", FAINT, 12)
    )
    parts.append(
        text(
            20,
            top + 124,
            "position and its place in every mask. Dashed: room that is masked and not counted.",
            FAINT,
            12,
        )
    )
    return picture(
        690, top + 142, "Ragged rows: a routed layer's cache holds the processed tokens and their columns", parts
    )


def step() -> str:
    """One step of decoding: four rows, eight layers."""
    left, top, row, size = 150, 56, 27, 34
    chosen = {1: (0,), 3: (), 5: (1, 3), 7: ()}
    parts = [text(left + size * r + 12, top - 12, f"{r}", FAINT, 12, "middle") for r in range(4)]
    parts.append(text(20, top - 12, "rows of the batch", FAINT, 12))
    parts.append(text(left + 160, top - 12, "what runs", FAINT, 12))
    for layer in range(8):
        y = top + (7 - layer) * row
        is_routed = layer in chosen
        rows = chosen.get(layer, range(4))
        parts.append(text(20, y + 14, f"layer {layer}", INK))
        parts.append(text(76, y + 14, "routed" if is_routed else "dense", PROCESSED if is_routed else FAINT, 12))
        parts.extend(box(left + size * r, y, 24, 19, PROCESSED if r in rows else SKIPPED) for r in range(4))
        if not is_routed:
            words = "the block, on 4 rows"
        elif rows:
            words = f"the block, on {len(rows)} row{'s' * (len(rows) > 1)}; one read on the host"
        else:
            words = "the block does not run; one read on the host"
        parts.append(text(left + 160, y + 14, words, INK if rows else OTHER, 12))
    return picture(690, top + 8 * row + 14, "A step of decoding runs a routed block for the rows that chose it", parts)


PICTURES = {"layers": layers, "gate": gate, "decision": decision, "cache": cache, "step": step}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")
