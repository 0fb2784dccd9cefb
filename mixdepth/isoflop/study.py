"""A study's folder: which runs it takes, what they are to show, and how far it got.

```
study.json                  the plan: the cells, each with all settings of its run, and the hypotheses
cells/1e13/mod/4x64/
  seed0/                    a cell's run, see `mixdepth.run`
  seed0/test.json           its losses on the test text, which nobody looks at before all cells are done
  seed0.log                 what its process said
  seed0.failed.json         why the last attempt failed
fit.json, fit-test.json     what came out
```
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

from mixdepth.files import check_keys, read_json, write_json
from mixdepth.run import RESULT, Run
from mixdepth.settings import TrainConfig
from mixdepth.trainer import DIVERGED

STUDY, CELLS, TEST = "study.json", "cells", "test.json"
FAILED, LOG = "failed.json", "log"
FITS = {"validation": "fit.json", "test": "fit-test.json"}
FORMAT = 2
READ = ("layers", "width", "context", "learning_rate", "eval_windows")
"""What a cell's settings say at least; an older version may not have known the others."""
OF_CURVES = ("larger", "crosses")
"""Kinds of claims that need a curve over sizes on both sides."""
NOT_A_NUMBER = "it diverged: its loss is not a number"


class Cell(NamedTuple):
    """One run of a study, and what it costs."""

    name: str
    budget: float
    variant: str
    seed: int
    rung: float
    """Its place on the ladder: the FLOPs of a forward pass that were asked for, relative to the ladder's centre."""
    settings: dict[str, Any]
    """Of `mixdepth.TrainConfig`."""
    parameters: int
    flops_per_token: float
    """Of a forward pass."""
    steps: int
    flops: int
    """Training FLOPs, at most the budget."""
    epochs: float
    seconds: float
    """Expected, on one core."""

    @property
    def shape(self) -> str:
        return f"{self.settings['layers']}x{self.settings['width']}"


class Losses(NamedTuple):
    """What a finished cell came to on a held-out text."""

    causal: float
    lookahead: float
    """With the routing of training; of a dense model the same."""
    capacities: list[float] | None
    """What share of the tokens each routed layer chose by its causal rule; None where an older version did not say."""


class Hypothesis(NamedTuple):
    """A claim that is written down before the runs that test it."""

    name: str
    claim: str
    kind: str
    """`less` and `differs` compare the loss of `variant` with that of `against`; `larger` their optimal sizes;
    `crosses` their curves at both ends; `equivalent` the causal loss of `variant` with its look-ahead loss."""
    budget: float
    variant: str
    against: str
    margin: float
    """What is counted as equal, or as the goal, as a share of the loss; 0 where nothing is."""
    family: str
    """`primary` hypotheses are corrected for their number, `exploratory` ones are not, and are no evidence alone."""
    finished_before: int
    """Cells of its variants and seeds that were finished when it was written down: 0 is a prediction."""
    seeds: list[int]
    """What it is tested on: seeds that were planned when it was written down, and none that came later; if possible
    those of which nothing was known."""


class Study(NamedTuple):
    """What study.json says."""

    folder: Path
    corpus_digest: str
    plans: list[dict[str, Any]]
    """What each call of `plan` was asked for."""
    cells: list[Cell]
    hypotheses: list[Hypothesis]

    @classmethod
    def read(cls, folder: str | Path) -> "Study":
        path = Path(folder) / STUDY
        if not path.is_file():
            raise ValueError(f"{str(folder)!r} is not a study: it has no {STUDY}; make one with mixdepth isoflop plan")
        way_out = "restore it, or plan anew in another folder"
        content = read_json(path, ("format",), way_out)
        if content["format"] != FORMAT:
            raise ValueError(f"{str(path)!r} has the format {content['format']!r}; this version reads {FORMAT}")
        try:
            cells = [Cell(**cell) for cell in content["cells"]]
            hypotheses = [Hypothesis(**hypothesis) for hypothesis in content["hypotheses"]]
            for cell in cells:
                check_keys(cell.settings, READ, path, way_out)
            return cls(Path(folder), content["corpus_digest"], content["plans"], cells, hypotheses)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{str(path)!r} is not as mixdepth isoflop plan writes it ({error}): {way_out}") from error

    def write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        content: dict[str, Any] = {"format": FORMAT, "corpus_digest": self.corpus_digest, "plans": self.plans}
        content["hypotheses"] = [hypothesis._asdict() for hypothesis in self.hypotheses]
        content["cells"] = [cell._asdict() for cell in self.cells]
        write_json(self.folder / STUDY, content)

    def run_of(self, cell: Cell) -> Run:
        return Run(self.folder / CELLS / cell.name)

    def is_finished(self, cell: Cell) -> bool:
        """Whether it has a result, and that is its own; it may be that it diverged."""
        return (self.run_of(cell).folder / RESULT).exists() and self.failure(cell) in (None, NOT_A_NUMBER)

    def is_settled(self, cell: Cell) -> bool:
        """Whether it is finished, or has diverged, as it would again."""
        return self.is_finished(cell) or DIVERGED in (self.failure(cell) or "")

    def failure(self, cell: Cell) -> str | None:
        """Why a cell that has no result failed last, or why its result does not count."""
        run, path = self.run_of(cell), self.beside(cell, FAILED)
        try:
            result = run.result
            if result is None:
                return str(read_json(path, keys=("reason",))["reason"]) if path.exists() else None
            if not run.is_of(TrainConfig.from_dict(cell.settings)):
                return "its folder holds a run of other settings"
            if run.about["corpus_digest"] != self.corpus_digest:
                return "it was trained on another text than the study's"
        except (TypeError, ValueError) as error:  # a file of its is damaged
            return str(error)
        losses = [result["validation_loss"], result.get("validation_lookahead_loss", 0.0)]
        return None if all(isinstance(loss, float) and math.isfinite(loss) for loss in losses) else NOT_A_NUMBER

    def beside(self, cell: Cell, ending: str) -> Path:
        """A file of the study's about a cell, beside the run's own folder."""
        folder = self.run_of(cell).folder
        return folder.with_name(f"{folder.name}.{ending}")

    def find(self, name: str) -> Cell:
        for cell in self.cells:
            if cell.name == name:
                return cell
        raise ValueError(f"the study {str(self.folder)!r} has no cell {name!r}; its names are in {STUDY}")
