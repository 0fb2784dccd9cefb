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

from mixdepth.config import DepthConfig
from mixdepth.files import check_name, read_json, write_json
from mixdepth.isoflop import forms
from mixdepth.runs.run import RESULT, SETTINGS, Run
from mixdepth.runs.settings import TrainConfig
from mixdepth.training.trainer import DIVERGED

STUDY, CELLS, TEST = "study.json", "cells", "test.json"
FAILED, LOG = "failed.json", "log"
FITS = {"validation": "fit.json", "test": "fit-test.json"}
FORMAT = 2
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
        check_name(path)
        if not path.is_file():
            raise ValueError(f"{str(folder)!r} is not a study: it has no {STUDY}; make one with mixdepth isoflop plan")
        way_out = "restore it, or plan again in another folder"
        content = read_json(path, ("format",), way_out)
        forms.check(content["format"], forms.COUNT, path, way_out, "format")
        if content["format"] != FORMAT:
            raise ValueError(
                f"{str(path)!r} has the format {content['format']}, and this version reads {FORMAT}: use the version "
                "that wrote it, or plan again in another folder"
            )
        forms.check(content, forms.STUDY, path, way_out)
        cells = [Cell(**cell) for cell in content["cells"]]
        hypotheses = [Hypothesis(**hypothesis) for hypothesis in content["hypotheses"]]
        _check_cells(cells, path, way_out)
        return cls(Path(folder), content["corpus_digest"], content["plans"], cells, hypotheses)

    def write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        content: dict[str, Any] = {"format": FORMAT, "corpus_digest": self.corpus_digest, "plans": self.plans}
        content["hypotheses"] = [hypothesis._asdict() for hypothesis in self.hypotheses]
        content["cells"] = [cell._asdict() for cell in self.cells]
        write_json(self.folder / STUDY, content)

    def run_of(self, cell: Cell) -> Run:
        return Run(self.folder / CELLS / cell.name)

    def has_result(self, cell: Cell) -> bool:
        return (self.run_of(cell).folder / RESULT).exists()

    def is_finished(self, cell: Cell) -> bool:
        """Whether it has a result, and that is its own; it may be that it diverged."""
        return self.has_result(cell) and self.failure(cell) in (None, NOT_A_NUMBER)

    def is_settled(self, cell: Cell) -> bool:
        """Whether it is finished, or has diverged, as it would again."""
        return self.is_finished(cell) or DIVERGED in (self.failure(cell) or "")

    def losses(self, cell: Cell) -> Losses:
        """What a cell with a result came to on the validation text. Losses of a run that diverged are not finite."""
        path = self.run_of(cell).folder / RESULT
        way_out = self._way_out(cell)
        result = read_json(path, ("validation_loss",), way_out)
        forms.check(result, forms.RESULT, path, way_out)
        causal = result["validation_loss"]
        lookahead = result.get("validation_lookahead_loss", causal)
        losses = Losses(causal, lookahead, result.get("validation_capacities"))
        _check_capacities(cell, losses, path, "validation_capacities", way_out)
        return losses

    def sealed_losses(self, cell: Cell) -> Losses:
        """What its test.json says that it came to on the test text."""
        path = self.run_of(cell).folder / TEST
        way_out = self._way_out(cell)
        sealed = read_json(path, way_out=way_out)
        forms.check(sealed, forms.SEALED, path, way_out)
        losses = Losses(sealed["loss"], sealed["lookahead_loss"], sealed.get("capacities"))
        _check_capacities(cell, losses, path, "capacities", way_out)
        return losses

    def failure(self, cell: Cell) -> str | None:
        """Why a cell that has no result failed last, or why its result does not count."""
        run = self.run_of(cell)
        try:
            if not self.has_result(cell):
                return self._reason(cell)
            losses = self.losses(cell)
            self._check_about(cell)
        except ValueError as error:  # one of its files is damaged
            return str(error)
        if not run.is_of(TrainConfig.from_dict(cell.settings)):
            return "its folder holds a run of other settings"
        if run.about["corpus_digest"] != self.corpus_digest:
            return "it was trained on another text than the study's"
        has_numbers = math.isfinite(losses.causal) and math.isfinite(losses.lookahead)
        return None if has_numbers else NOT_A_NUMBER

    def _check_about(self, cell: Cell) -> None:
        """Refuse a damaged run.json."""
        run = self.run_of(cell)
        path = run.folder / SETTINGS
        forms.check(run.about, forms.ABOUT, path, self._way_out(cell))
        try:
            run.settings  # noqa: B018 - reading them is the check
        except (TypeError, ValueError) as error:
            raise forms.damaged(path, f"settings: {error}", self._way_out(cell)) from error

    def _way_out(self, cell: Cell) -> str:
        """What to do about a damaged file of a run."""
        return f"restore it, or delete the folder {str(self.run_of(cell).folder)!r} and run the study again"

    def _reason(self, cell: Cell) -> str | None:
        """Why the last attempt failed, if one did."""
        path = self.beside(cell, FAILED)
        if not path.exists():
            return None
        way_out = "delete it, and run the study again"
        failed = read_json(path, ("reason",), way_out)
        forms.check(failed, forms.FAILURE, path, way_out)
        return str(failed["reason"])

    def beside(self, cell: Cell, ending: str) -> Path:
        """A file of the study's about a cell, beside the run's own folder."""
        folder = self.run_of(cell).folder
        return folder.with_name(f"{folder.name}.{ending}")

    def find(self, name: str) -> Cell:
        for cell in self.cells:
            if cell.name == name:
                return cell
        raise ValueError(f"the study {str(self.folder)!r} has no cell {name!r}; its names are in {STUDY}")


def _check_cells(cells: list[Cell], path: Path, way_out: str) -> None:
    """Refuse settings that are no run's, and cells that contradict themselves or each other."""
    names = set()
    for index, cell in enumerate(cells):
        place = f"cells[{index}]"
        try:
            config = TrainConfig.from_dict(cell.settings)
            _num_routed(cell)
        except (TypeError, ValueError) as error:
            raise forms.damaged(path, f"{place}.settings: {error}", way_out) from error
        if cell.name in names:
            raise forms.damaged(path, f"{place}.name is {cell.name!r}, as that of an earlier cell", way_out)
        names.add(cell.name)
        if cell.seed != config.seed:
            raise forms.damaged(path, f"{place}.seed is {cell.seed}, but in its settings {config.seed}", way_out)
        if config.flops is not None and cell.budget != config.flops:
            problem = f"{place}.budget is {cell.budget:g}, but flops in its settings {config.flops:g}"
            raise forms.damaged(path, problem, way_out)


def _check_capacities(cell: Cell, losses: Losses, path: Path, name: str, way_out: str) -> None:
    """Refuse a number of capacities that is not that of the routed layers."""
    num_routed = _num_routed(cell)
    if losses.capacities is not None and len(losses.capacities) != num_routed:
        problem = f"{name} has length {len(losses.capacities)}, but {num_routed} layers are routed"
        raise forms.damaged(path, problem, way_out)


def _num_routed(cell: Cell) -> int:
    """How many layers of its model are routed."""
    if cell.settings["depth"] is None:
        return 0
    return len(DepthConfig.from_dict(cell.settings["depth"]).routed_layers(cell.settings["layers"]))
