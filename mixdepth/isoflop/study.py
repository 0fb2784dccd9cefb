"""A study's folder: which runs the study takes, what they are to show, and how far each of them got.

```
study.json                  the plan: the cells, each with all settings of its run, and the hypotheses
cells.jsonl                 the results of all cells that are settled, see `mixdepth.isoflop.records`
cells/1e13/mod/4x64/        the folders of running cells; they are not needed once a cell is in cells.jsonl
  seed0/                    the run of a cell, see `mixdepth.runs.run`
  seed0/test.json           its losses on the test text, which nothing reads before all cells are finished
  seed0.log                 the output of its process
  seed0.failed.json         the kind of the last failure, and a message
fit.json, fit-test.json     the results of the study
```
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from mixdepth.config import DepthConfig
from mixdepth.files import check_name, read_json, write_json
from mixdepth.isoflop import forms
from mixdepth.isoflop.records import RECORDS, RESTORE_LINE, CellRecord, check_names, read_records, write_records
from mixdepth.runs.layout import RESULT, SETTINGS
from mixdepth.runs.run import Run
from mixdepth.runs.settings import MAY_DIFFER, TrainConfig

STUDY, CELLS, TEST = "study.json", "cells", "test.json"
FAILED, LOG = "failed.json", "log"
FITS = {"validation": "fit.json", "test": "fit-test.json"}
FORMAT = 2
KINDS_OF_CURVES = ("larger", "crosses")
"""The kinds of claims that need a curve over sizes on both sides."""

DIVERGED, ERROR = "diverged", "error"
"""The kinds of failures. A run that diverged would diverge again, so it is not repeated; an error may be gone."""
OLD_SENTENCE_OF_DIVERGENCE = "the run has diverged"
"""Version 0.1 wrote a sentence without a kind; this was part of it."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a study, and its costs."""

    name: str
    budget: float
    variant: str
    seed: int
    rung: float
    """The place of the cell on its ladder: the planned FLOPs of a forward pass, relative to the ladder's centre."""
    settings: dict[str, Any]
    """The run's settings, as `mixdepth.TrainConfig` writes them."""
    parameters: int
    flops_per_token: float
    """The FLOPs of a forward pass."""
    steps: int
    flops: int
    """The training FLOPs. They are at most the budget."""
    epochs: float
    seconds: float
    """The expected time on one core."""

    @property
    def shape(self) -> str:
        return f"{self.settings['layers']}x{self.settings['width']}"


class Losses(NamedTuple):
    """The losses of a finished cell on a held-out text."""

    causal: float
    lookahead: float
    """The loss with the routing of training. A dense model has the same loss as above."""
    capacities: list[float] | None
    """The share of the tokens that each routed layer chose by its causal rule; None where an old version wrote none."""


class Failure(NamedTuple):
    """The reason for which a cell has no result, or for which its result does not count."""

    kind: str
    """`diverged` or `error`."""
    message: str


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
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
    """The difference that counts as equal, or the goal, as a share of the loss; 0 where there is neither."""
    family: str
    """The p values of `primary` hypotheses are corrected for their number. Those of `exploratory` ones are not, and
    they are no evidence by themselves."""
    finished_before: int
    """How many cells of its variants and seeds were finished when it was written down: 0 is a prediction."""
    seeds: list[int]
    """The seeds on which it is tested: they were planned when it was written down. If possible, nothing was known of
    them."""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One part of what a cell came to, and where it was read."""

    content: Any
    path: Path
    way_out: str
    place: str = ""

    def check(self, form: forms.Form) -> None:
        forms.check(self.content, form, self.path, self.way_out, self.place)

    def name_of(self, name: str) -> str:
        """Name a field of this part, for an error."""
        return f"{self.place}.{name}" if self.place else name


@dataclass(frozen=True, kw_only=True)
class Study:
    """The plan of a study, and the results of its cells."""

    folder: Path
    corpus_digest: str
    plans: list[dict[str, Any]]
    """The arguments of each call of `plan`."""
    cells: list[Cell]
    hypotheses: list[Hypothesis]
    records: Mapping[str, CellRecord] = field(default_factory=dict)
    """What cells.jsonl said when the study was read. The folders have the results of the other cells."""

    @classmethod
    def read(cls, folder: str | Path) -> "Study":
        folder = Path(folder)
        path = folder / STUDY
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
        _check_cells(cells, path, way_out)
        records = read_records(folder)
        check_names(records, {cell.name for cell in cells}, folder)
        return cls(
            folder=folder,
            corpus_digest=content["corpus_digest"],
            plans=content["plans"],
            cells=cells,
            hypotheses=[Hypothesis(**hypothesis) for hypothesis in content["hypotheses"]],
            records=records,
        )

    def write(self) -> None:
        """Write the plan, study.json."""
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {
            "format": FORMAT,
            "corpus_digest": self.corpus_digest,
            "plans": self.plans,
            "hypotheses": [asdict(hypothesis) for hypothesis in self.hypotheses],
            "cells": [asdict(cell) for cell in self.cells],
        }
        write_json(self.folder / STUDY, content)

    def find(self, name: str) -> Cell:
        for cell in self.cells:
            if cell.name == name:
                return cell
        raise ValueError(f"the study {str(self.folder)!r} has no cell {name!r}; its names are in {STUDY}")

    def run_of(self, cell: Cell) -> Run:
        return Run(self.folder / CELLS / cell.name)

    def next_to(self, cell: Cell, ending: str) -> Path:
        """Name a file of the study about a cell. It lies next to the folder of the cell's run."""
        folder = self.run_of(cell).folder
        return folder.with_name(f"{folder.name}.{ending}")

    # How far a cell got

    def has_result(self, cell: Cell) -> bool:
        if cell.name in self.records and self.records[cell.name].result is not None:
            return True
        return (self.run_of(cell).folder / RESULT).exists()

    def is_finished(self, cell: Cell) -> bool:
        """Return whether a cell has a result that is its own. A loss that is not a number is a result too."""
        if not self.has_result(cell):
            return False
        failure = self.failure(cell)
        return failure is None or failure.kind == DIVERGED

    def is_settled(self, cell: Cell) -> bool:
        """Return whether a cell needs no further run: it is finished, or it diverged and would diverge again."""
        failure = self.failure(cell)
        if failure is None:
            return self.has_result(cell)
        return failure.kind == DIVERGED

    def failure(self, cell: Cell) -> Failure | None:
        """Say why a cell failed last, or why its result does not count; None if it counts, or the cell has not run."""
        try:
            if not self.has_result(cell):
                return self._last_failure(cell)
            losses = self.losses(cell)
            run = self._checked_run(cell)
        except ValueError as error:  # one of its files is damaged
            return Failure(ERROR, str(error))
        if not _is_same_run(run["settings"], cell.settings):
            return Failure(ERROR, "its result is that of a run with other settings")
        if run["corpus_digest"] != self.corpus_digest:
            return Failure(ERROR, "it was trained on another text than the study's")
        if not math.isfinite(losses.causal) or not math.isfinite(losses.lookahead):
            return Failure(DIVERGED, "it diverged: its loss is not a number")
        return None

    def check_result(self, cell: Cell) -> None:
        """Refuse a damaged result, and a line of cells.jsonl that is about another run.

        A folder that holds another run is refused by `train`.
        """
        if self.has_result(cell):
            self.losses(cell)
        if cell.name in self.records:
            failure = self.failure(cell)
            if failure is not None and failure.kind == ERROR:
                raise ValueError(f"{str(self.folder / RECORDS)!r}, cell {cell.name!r}: {failure.message}")

    def losses(self, cell: Cell) -> Losses:
        """Read the losses of a cell on the validation text. They are not finite if the run diverged."""
        part = self._part(cell, "result", RESULT)
        part.check(forms.RESULT)
        result = part.content
        causal = result["validation_loss"]
        lookahead = result.get("validation_lookahead_loss", causal)
        losses = Losses(causal, lookahead, result.get("validation_capacities"))
        _check_capacities(cell, losses, part, "validation_capacities")
        return losses

    def sealed_losses(self, cell: Cell) -> Losses:
        """Read the losses of a cell on the test text.

        A damaged record does not hide a test.json in the folder: the folder may have been evaluated again.
        """
        part = self._part(cell, "test", TEST)
        try:
            return _sealed_losses(cell, part)
        except ValueError:
            in_folder = self.run_of(cell).folder / TEST
            if part.path == in_folder or not in_folder.exists():
                raise
            return _sealed_losses(cell, self._file(cell, TEST))

    # Where the parts of a cell's record are read

    def _part(self, cell: Cell, name: str, file: str) -> _Part:
        """Read a part from cells.jsonl, or from the folder if cells.jsonl does not have it."""
        content = None  # of the part of the cell's line, if it has one
        if cell.name in self.records:
            content = getattr(self.records[cell.name], name)
        if content is None:
            return self._file(cell, file)
        return _Part(
            content=content, path=self.folder / RECORDS, way_out=RESTORE_LINE, place=f"{name} of cell {cell.name!r}"
        )

    def _file(self, cell: Cell, file: str) -> _Part:
        folder = self.run_of(cell).folder
        way_out = f"restore it, or delete the folder {str(folder)!r} and run the study again"
        return _Part(content=read_json(folder / file, way_out=way_out), path=folder / file, way_out=way_out)

    def _checked_run(self, cell: Cell) -> dict[str, Any]:
        """Read run.json, with its settings as a `TrainConfig`."""
        part = self._part(cell, "run", SETTINGS)
        part.check(forms.ABOUT)
        try:
            settings = TrainConfig.from_dict(part.content["settings"])
        except (TypeError, ValueError) as error:
            raise forms.damaged(part.path, f"{part.name_of('settings')}: {error}", part.way_out) from error
        return {**part.content, "settings": settings}

    def _last_failure(self, cell: Cell) -> Failure | None:
        """Read the failure of the last attempt, if there was one. The folder has newer ones than cells.jsonl."""
        path = self.next_to(cell, FAILED)
        if path.exists():
            way_out = "delete it, and run the study again"
            part = _Part(content=read_json(path, way_out=way_out), path=path, way_out=way_out)
        elif cell.name in self.records:
            part = self._part(cell, "failed", FAILED)
        else:
            return None
        return _read_failure(part)

    # cells.jsonl

    def gather(self) -> "Study":
        """Copy the results of settled cells from their folders to cells.jsonl, and return the study with these records.

        Other processes may gather at the same time, so the file is read again under a lock.
        """
        with FileLock(self.folder / ".cells.lock"):
            before = read_records(self.folder)
            study = replace(self, records=before)
            records: dict[str, CellRecord] = {}
            for cell in self.cells:
                record = study._newest_record(cell)
                if record is not None:
                    records[cell.name] = record
            # A cell that was planned after this study was read keeps its line.
            added_meanwhile = {name: record for name, record in before.items() if name not in records}
            records |= added_meanwhile
            if records != before:
                write_records(self.folder, records.values())
        return replace(self, records=records)

    def _newest_record(self, cell: Cell) -> CellRecord | None:
        """Complete the record of a cell by the files of its folder; None while the cell is not settled."""
        record = self.records.get(cell.name)
        folder = self.run_of(cell).folder
        if record is not None and record.result is not None:
            if record.test is None:
                return replace(record, test=_content(folder / TEST))
            return record
        if not self.is_settled(cell):
            return record
        if self.has_result(cell):
            return CellRecord(
                name=cell.name,
                run=_content(folder / SETTINGS),
                result=_content(folder / RESULT),
                test=_content(folder / TEST),
            )
        failure = self._last_failure(cell)
        assert failure is not None
        return CellRecord(name=cell.name, failed=failure._asdict())


def _content(path: Path) -> Any:
    """Read a JSON file; None if it is missing or damaged."""
    try:
        return read_json(path)
    except ValueError:
        return None


def _read_failure(part: _Part) -> Failure:
    """Read a failure. Version 0.1 wrote a sentence under the name `reason`."""
    if isinstance(part.content, dict) and "reason" in part.content:
        part.check(forms.OLD_FAILURE)
        reason = part.content["reason"]
        kind = DIVERGED if OLD_SENTENCE_OF_DIVERGENCE in reason else ERROR
        return Failure(kind, reason)
    part.check(forms.FAILURE)
    return Failure(part.content["kind"], part.content["message"])


def _sealed_losses(cell: Cell, part: _Part) -> Losses:
    part.check(forms.SEALED)
    sealed = part.content
    losses = Losses(sealed["loss"], sealed["lookahead_loss"], sealed.get("capacities"))
    _check_capacities(cell, losses, part, "capacities")
    return losses


def _is_same_run(ran: TrainConfig, planned: dict[str, Any]) -> bool:
    """Return whether a run had the settings of its cell, apart from those that may differ."""
    ignored = dict.fromkeys(MAY_DIFFER)
    return ran.to_dict() | ignored == TrainConfig.from_dict(planned).to_dict() | ignored


def _check_cells(cells: list[Cell], path: Path, way_out: str) -> None:
    """Refuse settings that no run can have, and cells that contradict themselves or each other."""
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


def _check_capacities(cell: Cell, losses: Losses, part: _Part, name: str) -> None:
    """Refuse a number of capacities that differs from the number of routed layers."""
    num_routed = _num_routed(cell)
    if losses.capacities is not None and len(losses.capacities) != num_routed:
        problem = f"{part.name_of(name)} has length {len(losses.capacities)}, but {num_routed} layers are routed"
        raise forms.damaged(part.path, problem, part.way_out)


def _num_routed(cell: Cell) -> int:
    """Count the routed layers of the cell's model."""
    if cell.settings["depth"] is None:
        return 0
    return len(DepthConfig.from_dict(cell.settings["depth"]).routed_layers(cell.settings["layers"]))
