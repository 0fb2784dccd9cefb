"""The report of the demo: the models side by side, as a table for the terminal and as one HTML file."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from mixdepth.evaluation.tracing import Trace
from mixdepth.files import write_text, writing
from mixdepth.report.page import document, routing_section
from mixdepth.report.plots import training_curves_svg
from mixdepth.runs.run import Run
from mixdepth.text import columns

TITLE = "Mixture-of-Depths against dense models, at equal training FLOPs"


@dataclass(frozen=True, kw_only=True)
class Column:
    """One model's numbers."""

    name: str
    parameters: int
    flops: float
    """The FLOPs that were spent in training."""
    tokens: int
    """The tokens that the model was trained on."""
    flops_per_token: float
    loss: float
    lookahead_loss: float
    bits_per_byte: float
    difference: dict[str, float] | None
    """The loss minus that of the first model, with its interval; None for the first."""
    capacities: list[float]
    """The realised capacity of each routed layer."""
    training: float
    """Tokens per second in training."""
    decode: dict[int, float]
    """Tokens per second in decoding, by batch size."""
    cache_bytes: int
    """The bytes of the cache of one text."""

    def cells(self) -> dict[str, str]:
        """Return the numbers as text, by the titles of their lines."""
        cells = {
            "parameters": f"{self.parameters:,}",
            "training FLOPs": f"{self.flops:.3g}",
            "training tokens": f"{self.tokens:,}",
            "FLOPs per token, forward": f"{self.flops_per_token:,.0f}",
            "held-out loss, causal (nats per byte)": f"{self.loss:.4f}",
            "  with look-ahead": f"{self.lookahead_loss:.4f}",
            "  bits per byte": f"{self.bits_per_byte:.4f}",
            "  against the first": _interval(self.difference),
            "realised capacity": " ".join(f"{capacity:.1%}" for capacity in self.capacities),
            "training, tokens/s": f"{self.training:,.0f}",
        }
        for size, speed in self.decode.items():
            cells[f"decoding {size} at once, tokens/s"] = f"{speed:,.0f}"
        cells["cache of one text, KiB"] = f"{self.cache_bytes / 1024:.1f}"
        return cells


def summary(models: Sequence[Column]) -> str:
    """Return a table with a column for each model."""
    return columns(_rows(models), left=(0,))


def write_report(
    path: Path,
    models: Sequence[Column],
    verdict: Sequence[str],
    values: dict[str, Any],
    runs: Sequence[Run],
    traced: Trace,
) -> Path:
    """Write the report: the table, the curves, speeds and their limits, samples, and where tokens go.

    `values` are the results of the demo, as results.json holds them.
    """
    # 1. What was found, and the table.
    sections = [f"<p>{escape(sentence)}</p>" for sentence in verdict]
    sections.append(_table(_rows(models)))
    sections.append(
        '<p class="note">One seed and minutes of training: this shows how it works, not which is better. '
        "The comparison over sizes and seeds is mixdepth isoflop.</p>"
    )
    # 2. Training curves.
    sections.append(f'<h2>Training</h2><div class="wide">{training_curves_svg(runs)}</div>')
    # 3. Speeds.
    sections.append("<h2>Speed on this machine, and its limits</h2>")
    for name, value in values.items():
        if name.startswith("speed"):
            sections.append(f'<pre class="table">{escape(value["table"])}</pre>')
    # 4. Samples.
    sections.append("<h2>Samples</h2>")
    for kind, text in values["samples"].items():
        sections.append(f"<h3>{escape(kind)}</h3><pre>{escape(text)}</pre>")
    # 5. Routes.
    sections.append(f"<h2>Where the tokens go</h2>{routing_section(traced)}")
    with writing(path):
        write_text(path, document(TITLE, *sections))
    return path


def _rows(models: Sequence[Column]) -> list[list[str]]:
    cells = [model.cells() for model in models]
    rows = [["", *(model.name for model in models)]]
    for title in cells[0]:
        rows.append([title, *(cells_of_model[title] for cells_of_model in cells)])
    return rows


def _table(rows: list[list[str]]) -> str:
    head, *body = rows
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = ""
    for row in body:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        lines += f"<tr>{cells}</tr>"
    return f'<div class="wide"><table><thead><tr>{names}</tr></thead><tbody>{lines}</tbody></table></div>'


def _interval(value: dict[str, float] | None) -> str:
    if value is None:
        return ""
    return "{mean:+.4f} [{low:+.4f}, {high:+.4f}]".format(**value)
