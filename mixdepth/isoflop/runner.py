"""Run a study's cells, each in a process of its own: side by side on this machine, or over a Ray cluster."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from mixdepth.config import check_integer
from mixdepth.files import write_json
from mixdepth.isoflop.study import FAILED, LOG, Cell, Study
from mixdepth.run import METRICS, writing
from mixdepth.settings import TrainConfig
from mixdepth.training import corpus_of, train

ENGINES = ("local", "ray")
SECONDS_BETWEEN_LOOKS = 1.0

Start = Callable[[Cell], Any]
"""Begins a cell, and gives what to wait for."""
Wait = Callable[[list[Any]], list[Any]]
"""Waits a while; gives those that are done."""


def default_workers() -> int:
    """One cell for each core; one in all where there is an accelerator, which a cell has for itself."""
    return 1 if torch.accelerator.is_available() else max(1, len(os.sched_getaffinity(0)))


def run(folder: str | Path, *, workers: int | None = None, engine: str = "local", cell: str | None = None) -> Study:
    """Run what is not finished of a study; the same call goes on where it was stopped.

    Cells run side by side, as many as `workers` (default: one for each core). `engine="ray"` gives them to a Ray
    cluster, whose machines all see the folder. `cell` runs that one alone, in this process: for schedulers of one's
    own. Why a cell failed is written beside it, and the others go on.
    """
    study = Study.read(folder)
    if cell is not None:
        chosen = study.find(cell)
        train(study.run_of(chosen).folder, TrainConfig.from_dict(chosen.settings))
        return study
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, not {engine!r}")
    workers = default_workers() if workers is None else workers
    check_integer("workers", workers, minimum=1)
    left = [cell for cell in study.cells if not study.is_finished(cell)]
    left.sort(key=lambda cell: (cell.budget, cell.seed))  # a whole curve of one seed says more than half of three
    if left:
        _check_corpus(study, left[0])
        with (_local if engine == "local" else _ray)(study, workers) as (start, look):
            _run_all(study, left, workers, start, look)
    return study


def _check_corpus(study: Study, cell: Cell) -> None:
    config = TrainConfig.from_dict(cell.settings)
    if corpus_of(config).digest != study.corpus_digest:
        raise ValueError(
            f"the corpus {config.corpus!r} is not the text that the study in {str(study.folder)!r} was planned on "
            "(other versions?): plan a new study"
        )


def _run_all(study: Study, cells: list[Cell], workers: int, start: Start, look: Wait) -> None:
    """Keep `workers` cells under way until all are done. The bar counts FLOPs."""
    waiting, running = list(reversed(cells)), dict[Any, Cell]()
    total, done, num_failed = sum(cell.flops for cell in study.cells), 0, 0
    finished = sum(cell.flops for cell in study.cells) - sum(cell.flops for cell in cells)
    with tqdm(total=total, initial=finished, unit="FLOPs", unit_scale=True, desc="study", smoothing=0.02) as bar:
        while waiting or running:
            while waiting and len(running) < workers:
                cell = waiting.pop()
                running[start(cell)] = cell
            for task in look(list(running)):
                cell = running.pop(task)
                done += 1
                finished += cell.flops
                reason = study.failure(cell)
                if reason is not None:
                    num_failed += 1
                    tqdm.write(f"mixdepth: cell {cell.name} failed: {reason}", file=sys.stderr)
            bar.n = finished + sum(_progress(study, cell) for cell in running.values())
            bar.set_postfix_str(f"{done} of {len(cells)} runs" + (f", {num_failed} failed" if num_failed else ""))
    if num_failed:
        tqdm.write(
            f"mixdepth: {num_failed} of {len(cells)} cells failed, each says why in its .{FAILED} and .{LOG}; run "
            "again to try them again",
            file=sys.stderr,
        )


def _progress(study: Study, cell: Cell) -> int:
    """FLOPs of a running cell so far, from the last line of its metrics."""
    try:
        with open(study.run_of(cell).folder / METRICS, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 2**16))
            lines = file.read().split(b"\n")[:-1]
        return int(next(line["flops"] for line in map(json.loads, reversed(lines)) if "flops" in line))
    except (OSError, StopIteration, ValueError):
        return 0  # it has not begun


def attempt(folder: str, name: str, threads: int | None = None) -> None:
    """Run a cell in a process of its own; if it fails, write down why."""
    study = Study.read(folder)
    cell = study.find(name)
    log, failed = study.beside(cell, LOG), study.beside(cell, FAILED)
    environment = dict(os.environ) if threads is None else {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with writing(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        failed.unlink(missing_ok=True)
        with open(log, "wb") as output:
            command = [sys.executable, "-m", "mixdepth", "isoflop", "run", folder, "--cell", name]
            code = subprocess.run(command, stdout=output, stderr=output, env=environment).returncode
        if code and code not in (130, -signal.SIGINT):  # stopped by hand: nothing has failed
            write_json(failed, {"reason": _reason(log, code), "code": code})


def _reason(log: Path, code: int) -> str:
    """The last thing that a process said, or how it ended."""
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return said[-1].removeprefix("mixdepth: ") if said else f"its process ended with code {code}"


@contextmanager
def _local(study: Study, workers: int) -> Iterator[tuple[Start, Wait]]:
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    pool = ThreadPoolExecutor(workers)

    def start(cell: Cell) -> "Future[None]":
        return pool.submit(attempt, str(study.folder), cell.name, threads)

    def look(tasks: list[Any]) -> list[Any]:
        done = wait(tasks, timeout=SECONDS_BETWEEN_LOOKS, return_when=FIRST_COMPLETED).done
        for task in done:
            task.result()  # what went wrong with the study itself
        return list(done)

    try:
        yield start, look
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _ray(study: Study, workers: int) -> Iterator[tuple[Start, Wait]]:
    try:
        import ray
    except ImportError as error:
        raise ValueError("engine='ray' needs Ray: pip install 'mixdepth[ray]'") from error
    began = not ray.is_initialized()
    if began:
        ray.init(log_to_driver=False)  # the cluster of RAY_ADDRESS or of this machine, or a new one
    task = ray.remote(num_cpus=1, num_gpus=int(torch.accelerator.is_available()))(attempt)
    try:
        yield (
            lambda cell: task.remote(str(study.folder.absolute()), cell.name, 1),
            lambda tasks: _ray_done(ray, tasks),
        )
    finally:
        if began:
            ray.shutdown()


def _ray_done(ray: Any, tasks: list[Any]) -> list[Any]:
    done, _ = ray.wait(tasks, timeout=SECONDS_BETWEEN_LOOKS)
    ray.get(done)
    return list(done)
