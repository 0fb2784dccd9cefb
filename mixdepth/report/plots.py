"""Plots of runs from their logs, and of loss against speed: as PNG and SVG, or as a part of a page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mixdepth.report.figures import as_svg, save
from mixdepth.report.logs import Log, read_logs
from mixdepth.report.routing_of_layers import draw_profile
from mixdepth.report.tradeoff import as_rows, draw_speed, read_rows
from mixdepth.report.training_curves import draw_curves
from mixdepth.runs.run import Run

AnyRun = str | Path | Run


def training_curves(runs: Sequence[AnyRun], out: str | Path) -> list[Path]:
    """Plot loss against steps, FLOPs and time, for all runs in the same panels; return the paths in `out`."""
    return save(draw_curves(read_logs(runs)), out, "training")


def training_curves_svg(runs: Sequence[AnyRun]) -> str:
    logs = read_logs(runs)
    names = ", ".join(log.name for log in logs)
    return as_svg(draw_curves(logs), f"Loss against steps, training FLOPs and time: {names}")


def routing_profile(run: AnyRun, out: str | Path) -> list[Path]:
    """Plot what each routed layer of a run does, over training and at its end; return the paths in `out`."""
    log = _routed(run)
    return save(draw_profile(log), out, _file_name(log))


def routing_profile_svg(run: AnyRun) -> str:
    log = _routed(run)
    return as_svg(draw_profile(log), f"Capacity, precision, recall and gate of each routed layer: {log.name}")


def loss_against_speed(rows: Sequence[Any], out: str | Path, reference: str | None = None) -> list[Path]:
    """Plot loss against decode speed of the models in a list of rows; return the paths in the folder `out`.

    A row has `name`, `loss` and `tokens_per_second`; `low` and `high` are an interval of the speed, and the models of
    a `group` share colour and marker. `reference` is the name of a row: there are lines at 1.03 times its loss and 1.25
    times its speed.
    """
    return save(draw_speed(as_rows(rows), reference), out, "speed")


def loss_against_speed_svg(rows: Sequence[Any], reference: str | None = None) -> str:
    return as_svg(draw_speed(as_rows(rows), reference), "Loss against decode speed")


def plot(names: Sequence[str], out: str | Path, reference: str | None = None) -> list[Path]:
    """Draw all plots of these runs, or that of one JSON file of rows; return the paths in the folder `out`."""
    if len(names) == 1 and (Path(names[0]).is_file() or names[0].endswith(".json")):
        return loss_against_speed(read_rows(names[0]), out, reference)
    for name in names:
        if Path(name).is_file():
            raise ValueError(f"{name!r} is a file: give the folders of runs, or one JSON file alone")
    if reference is not None:
        raise ValueError(f"reference={reference!r} has no meaning for runs: it is a row of a JSON file")
    logs = read_logs(names)
    paths = save(draw_curves(logs), out, "training")
    for log in logs:
        if log.routing:
            paths += save(draw_profile(log), out, _file_name(log))
    return paths


def _routed(run: AnyRun) -> Log:
    (log,) = read_logs([run])
    if not log.routing:
        raise ValueError(f"{log.name!r} has no routed layers: there is no routing to plot")
    return log


def _file_name(log: Log) -> str:
    return "routing-" + log.name.replace("/", "-")
