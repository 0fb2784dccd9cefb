"""The runs in a folder as a table, read from their JSON files alone."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mixdepth.runs.layout import CHECKPOINT_PREFIX, COMPLETE, RESULT, SETTINGS
from mixdepth.text import columns, short

HEADER = ("run", "kind", "step", "held-out loss", "FLOPs", "state")


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """What the table says about one run. None is unknown."""

    name: str
    state: str
    kind: str | None = None
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    flops: float | None = None

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the row."""
        step = "-" if self.step is None else f"{self.step:,} of {self.steps:,}"
        loss = "-" if self.loss is None else f"{self.loss:.4f}"
        flops = "-" if self.flops is None else short(self.flops)
        return (self.name, self.kind or "-", step, loss, flops, self.state)


def runs_table(folder: str) -> str:
    """Return a table of the runs in a folder and the folders below it."""
    place = Path(folder)
    if not place.is_dir():
        raise ValueError(f"{folder!r} is not a folder: give the folder in which the runs are")
    files = sorted(place.rglob(SETTINGS))
    if not files:
        raise ValueError(f"{folder!r} holds no run: `mixdepth train --out FOLDER` makes one")
    rows = [read_run(file.parent).cells() for file in files]
    return columns([HEADER, *rows], left=(0, 1, 5))


def read_run(folder: Path) -> RunRow:
    """Read what the files of a run say. A file that makes no sense makes the run a damaged one."""
    try:
        return _read_intact(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return RunRow(name=str(folder), state="damaged")


def _read_intact(folder: Path) -> RunRow:
    # 1. The settings, and what follows from them.
    about = _read(folder / SETTINGS)
    steps, flops = int(about["steps"]), float(about["flops"])
    kind = "dense" if about["settings"]["depth"] is None else "routed"

    # 2. A run without a result is where its newest checkpoint is, and has used that share of its FLOPs.
    if not (folder / RESULT).exists():
        step = _kept_step(folder)
        used = flops * step / steps
        return RunRow(name=str(folder), state="unfinished", kind=kind, step=step, steps=steps, flops=used)

    # 3. A finished run has a result.
    result = _read(folder / RESULT)
    return RunRow(
        name=str(folder),
        state="finished",
        kind=kind,
        step=int(result["step"]),
        steps=steps,
        loss=float(result["validation_loss"]),
        flops=float(result["flops"]),
    )


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _kept_step(folder: Path) -> int:
    """Return the step of the newest complete checkpoint, from which the run resumes; 0 if there is none."""
    checkpoints = folder.glob(f"{CHECKPOINT_PREFIX}*/{COMPLETE}")
    steps = [int(file.parent.name.removeprefix(CHECKPOINT_PREFIX)) for file in checkpoints]
    return max(steps, default=0)
