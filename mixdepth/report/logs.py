"""The log of a run so far, as arrays."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mixdepth.files import read_json
from mixdepth.runs.layout import METRICS, SETTINGS
from mixdepth.runs.run import Run

Numbers = NDArray[np.float64]

MANY_LINES = 50
"""A log of as many lines is smoothed."""

ROUTING = ("target", "causal_capacity", "precision", "recall", "gate_mean", "gate_std", "never_chosen")
"""The statistics of `mixdepth.training.routing_statistics` that are plotted."""


class LoggedEvaluation(NamedTuple):
    """The losses on held-out text after a step."""

    step: int
    loss: float
    lookahead_loss: float | None
    """None for a dense model."""


@dataclass(frozen=True, kw_only=True)
class Log:
    """The log of a run so far. Shapes: N lines of training, L routed layers."""

    name: str
    steps: Numbers
    """(N,)"""
    flops: Numbers
    """(N,): training FLOPs from the start to this line."""
    seconds: Numbers
    """(N,): seconds of training from the start to this line; NaN where the clock was not read."""
    loss: Numbers
    """(N,): the language-model loss. It leaves out losses of routing, so that dense and routed models compare."""
    evaluations: list[LoggedEvaluation]
    routed_layers: list[int]
    """(L,): the indices of the routed layers."""
    routing: dict[str, Numbers]
    """(N, L) each, by the names in ROUTING; empty for a dense model."""

    @property
    def weights(self) -> Numbers:
        """The number of steps that each loss is the mean of: (N,)."""
        return np.maximum(np.diff(self.steps, prepend=0.0), 1)

    @property
    def is_long(self) -> bool:
        """Whether there are so many lines that single ones are noise. A long log is smoothed."""
        return len(self.steps) >= MANY_LINES


def read_logs(runs: Sequence[str | Path | Run]) -> list[Log]:
    """Read the logs of these runs, each under a name that no other has. A run that is given twice is read once."""
    folders: dict[Path, Path] = {}  # absolute path -> path as the user gave it
    for run in runs:
        folder = run.folder if isinstance(run, Run) else Path(run)
        folders[Path(os.path.abspath(folder))] = folder
    if not folders:
        raise ValueError("there is nothing to plot: name at least one run")
    names = distinct_names(list(folders))
    return [_read(folder, name) for folder, name in zip(folders.values(), names, strict=True)]


def _read(folder: Path, name: str) -> Log:
    """Read the log of one run, which may still be training."""
    run = Run(folder)
    read_json(folder / SETTINGS)  # refuses a folder that is not a run
    metrics, timings = run.metrics, run.timings
    try:
        log = _log(name, metrics, timings)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"the logs in {str(folder)!r} are damaged: not as mixdepth writes them ({error!r})") from error
    if not len(log.steps):
        raise ValueError(f"{str(folder)!r} has logged no step yet: wait for the first line of {METRICS}")
    return log


def _log(name: str, metrics: list[dict[str, Any]], timings: list[dict[str, Any]]) -> Log:
    # 1. The clock: seconds of training until each step.
    elapsed: dict[int, float] = {}
    total = 0.0
    for line in timings:
        total += line["seconds"]
        elapsed[line["step"]] = total
    # 2. Metrics hold lines of training and lines of evaluations.
    training = [line for line in metrics if "loss" in line]
    evaluations = []
    for line in metrics:
        if "validation_loss" in line:
            lookahead_loss = line.get("validation_lookahead_loss")
            evaluations.append(LoggedEvaluation(line["step"], line["validation_loss"], lookahead_loss))
    # 3. If one line of training has statistics of routed layers, all must have them.
    routed_layers: list[int] = []
    routing: dict[str, Numbers] = {}
    if any("layers" in line for line in training):
        layers = [line["layers"] for line in training]
        routed_layers = layers[0]["index"]
        routing = {key: _column(layers, key) for key in ROUTING}
    # 4. The loss of a routed model holds losses of routing; its language-model loss is logged next to it.
    seconds = [elapsed.get(line["step"], np.nan) for line in training]
    losses = [line.get("lm_loss", line["loss"]) for line in training]
    return Log(
        name=name,
        steps=_column(training, "step"),
        flops=_column(training, "flops"),
        seconds=np.array(seconds, dtype=np.float64),
        loss=np.array(losses, dtype=np.float64),
        evaluations=evaluations,
        routed_layers=routed_layers,
        routing=routing,
    )


def _column(lines: Sequence[dict[str, Any]], key: str) -> Numbers:
    """Return one value of each line: (N,), or (N, L) if the value is a list with a number for each layer."""
    return np.array([line[key] for line in lines], dtype=np.float64)


def smooth(values: Numbers, weights: Numbers | None = None) -> Numbers:
    """Return the running mean over a twentieth of the lines; it is narrower at the start, where a loss falls fast.

    The result has the shape of the values, (N,) or (N, L). The weights are (N,).
    """
    if weights is None:
        weights = np.ones(len(values))
    means = []
    for index in range(len(values)):
        reach = min(index, len(values) // 40)
        near = slice(index - reach, index + reach + 1)
        means.append(np.average(values[near], axis=0, weights=weights[near]))
    return np.array(means)


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """Return the parts in which the paths differ, or the last part of a single path.

    >>> distinct_names([Path("/study/dense/2x64/seed0"), Path("/study/mod/4x64/seed0")])
    ['dense/2x64', 'mod/4x64']
    """
    if len(folders) == 1:
        return [folders[0].name]
    common = Path(os.path.commonpath(folders))
    parts = [folder.relative_to(common).parts for folder in folders]
    # Leave out last parts that all paths share, as long as something is left of each path.
    while min(map(len, parts)) > 1 and len({part[-1] for part in parts}) == 1:
        parts = [part[:-1] for part in parts]
    # Nothing is left of a folder in which all others lie.
    return ["/".join(part) or folder.name for part, folder in zip(parts, folders, strict=True)]
