"""What a run has logged so far, as arrays."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mixdepth.files import read_json
from mixdepth.runs.run import METRICS, SETTINGS, Run

Numbers = NDArray[np.float64]
MANY = 50
"""Lines from which on a log is smoothed."""
ROUTING = ("target", "causal_capacity", "precision", "recall", "gate_mean", "gate_std", "never_chosen")
"""What is plotted of `mixdepth.training.routing_statistics.describe`."""


class Evaluation(NamedTuple):
    """Losses on held-out text after a step."""

    step: int
    loss: float
    lookahead_loss: float | None  # None: dense


class Log(NamedTuple):
    """What a run has logged so far. Shapes: N lines of training, L routed layers."""

    name: str
    steps: Numbers  # (N,)
    flops: Numbers  # (N,) so far
    seconds: Numbers  # (N,) of training so far; NaN where the clock was not read
    loss: Numbers  # (N,) of the language model, without losses of routing: what dense and routed models share
    evaluations: list[Evaluation]
    routed_layers: list[int]
    routing: dict[str, Numbers]  # (N, L) each, by the names in ROUTING; empty: dense

    @property
    def weights(self) -> Numbers:
        """Of how many steps each loss is the mean: (N,)."""
        return np.maximum(np.diff(self.steps, prepend=0.0), 1)

    @property
    def is_long(self) -> bool:
        """Whether single lines are noise: then they are smoothed."""
        return len(self.steps) >= MANY


def read_logs(runs: Sequence[str | Path | Run]) -> list[Log]:
    """The logs of these runs, by names that tell them apart."""
    given = [run.folder if isinstance(run, Run) else Path(run) for run in runs]
    folders = {Path(os.path.abspath(folder)): folder for folder in given}
    if not folders:
        raise ValueError("there is nothing to plot: name at least one run")
    return [_read(folder, name) for folder, name in zip(folders.values(), distinct_names([*folders]), strict=True)]


def _read(folder: Path, name: str) -> Log:
    """The log of one run, which may still be written."""
    run = Run(folder)
    read_json(folder / SETTINGS)  # refuses what is no run
    metrics, timings = run.metrics, run.timings
    try:
        log = _log(name, metrics, timings)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"the logs in {str(folder)!r} are damaged: not as mixdepth writes them ({error!r})") from error
    if not len(log.steps):
        raise ValueError(f"{str(folder)!r} has logged no step yet: wait for the first line of {METRICS}")
    return log


def _log(name: str, metrics: list[dict[str, Any]], timings: list[dict[str, Any]]) -> Log:
    training = [line for line in metrics if "loss" in line]
    clock = np.cumsum([line["seconds"] for line in timings])
    elapsed = dict(zip([line["step"] for line in timings], clock, strict=True))
    routed = [line["layers"] for line in training] if any("layers" in line for line in training) else []
    return Log(
        name,
        steps=_numbers(line["step"] for line in training),
        flops=_numbers(line["flops"] for line in training),
        seconds=_numbers(elapsed.get(line["step"], np.nan) for line in training),
        loss=_numbers(line.get("lm_loss", line["loss"]) for line in training),
        evaluations=[
            Evaluation(line["step"], line["validation_loss"], line.get("validation_lookahead_loss"))
            for line in metrics
            if "validation_loss" in line
        ],
        routed_layers=routed[0]["index"] if routed else [],
        routing={key: _numbers(layers[key] for layers in routed) for key in ROUTING} if routed else {},
    )


def _numbers(values: Iterable[Any]) -> Numbers:
    return np.array([*values], dtype=np.float64)


def smooth(values: Numbers, weights: Numbers | None = None) -> Numbers:
    """A running mean over a twentieth of the lines; narrower at the start, where a loss falls fast.

    values (N,) or (N, L), weights (N,) -> as values
    """
    weights = np.ones(len(values)) if weights is None else weights
    means = []
    for i in range(len(values)):
        reach = min(i, len(values) // 40)
        near = slice(i - reach, i + reach + 1)
        means.append(np.average(values[near], axis=0, weights=weights[near]))
    return np.array(means)


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """The parts of the paths in which they differ, or the last part of a path that is alone.

    >>> distinct_names([Path("/study/dense/2x64/seed0"), Path("/study/mod/4x64/seed0")])
    ['dense/2x64', 'mod/4x64']
    """
    if len(folders) == 1:
        return [folders[0].name]
    common = Path(os.path.commonpath(folders))
    names = [folder.relative_to(common).parts for folder in folders]
    while len({name[-1:] for name in names}) == 1 and all(len(name) > 1 for name in names):
        names = [name[:-1] for name in names]
    return ["/".join(name) or folder.name for name, folder in zip(names, folders, strict=True)]
