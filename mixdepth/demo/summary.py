"""The demo's report: models side by side, as a table for the terminal and as one HTML file."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from mixdepth.evaluation.tracing import Trace
from mixdepth.files import write_text, writing
from mixdepth.report.page import document, routing_section
from mixdepth.report.plots import training_curves_svg
from mixdepth.runs.run import Run
from mixdepth.text import columns

TITLE = "Mixture-of-Depths against dense models, at equal training FLOPs"


class Column(NamedTuple):
    """One model's numbers."""

    name: str
    parameters: int
    flops: float
    """Spent in training."""
    tokens: int
    flops_per_token: float
    loss: float
    lookahead_loss: float
    bits_per_byte: float
    difference: dict[str, float] | None
    """Loss minus that of the first model, with its interval; None for the first."""
    capacities: list[float]
    """Realised, of each routed layer."""
    training: float
    """Tokens per second."""
    decode: dict[int, float]
    """Tokens per second, by batch size."""
    cache_bytes: int

    def cells(self) -> dict[str, str]:
        return {
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
            **{f"decoding {size} at once, tokens/s": f"{speed:,.0f}" for size, speed in self.decode.items()},
            "cache of one text, KiB": f"{self.cache_bytes / 1024:.1f}",
        }


def summary(models: Sequence[Column]) -> str:
    """The models side by side."""
    return columns(_rows(models), left=(0,))


def write_report(
    path: Path,
    models: Sequence[Column],
    verdict: Sequence[str],
    found: dict[str, Any],
    runs: Sequence[Run],
    traced: Trace,
) -> Path:
    """Write the report: the table, the curves, speeds and their limits, samples, and where tokens go."""
    samples = "".join(f"<h3>{escape(kind)}</h3><pre>{escape(text)}</pre>" for kind, text in found["samples"].items())
    speeds = [value["table"] for name, value in found.items() if name.startswith("speed")]
    sections = (
        *(f"<p>{escape(sentence)}</p>" for sentence in verdict),
        _table(_rows(models)),
        '<p class="note">One seed and minutes of training: this shows how it works, not which is better. '
        "The comparison over sizes and seeds is mixdepth isoflop.</p>",
        f'<h2>Training</h2><div class="wide">{training_curves_svg(runs)}</div>',
        "<h2>Speed on this machine, and its limits</h2>",
        *(f'<pre class="table">{escape(table)}</pre>' for table in speeds),
        f"<h2>Samples</h2>{samples}",
        f"<h2>Where the tokens go</h2>{routing_section(traced)}",
    )
    with writing(path):
        write_text(path, document(TITLE, *sections))
    return path


def _rows(models: Sequence[Column]) -> list[list[str]]:
    cells = [model.cells() for model in models]
    return [["", *(model.name for model in models)], *([name, *(c[name] for c in cells)] for name in cells[0])]


def _table(rows: list[list[str]]) -> str:
    head, *body = rows
    lines = ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body]
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f'<div class="wide"><table><thead><tr>{names}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _interval(value: dict[str, float] | None) -> str:
    return "" if value is None else f"{value['mean']:+.4f} [{value['low']:+.4f}, {value['high']:+.4f}]"
