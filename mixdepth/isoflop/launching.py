"""Run a study's cells, each in a process of its own: side by side on this machine, or over a Ray cluster."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from tqdm import tqdm

from mixdepth.config import check_integer
from mixdepth.files import write_json, writing
from mixdepth.isoflop.sealed import is_unsealed, sealed_losses
from mixdepth.isoflop.study import FAILED, LOG, Cell, Study
from mixdepth.runs.run import METRICS, corpus_of
from mixdepth.runs.settings import TrainConfig
from mixdepth.training.job import train

ENGINES = ("local", "ray")
SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_TO_STOP = 10.0
STOPPED = (130, -signal.SIGINT, -signal.SIGTERM)
"""How a process ends that was stopped: with the whole study, which is no failure, or alone."""

Start = Callable[[Cell], Any]
"""Begins a cell, and gives what to wait for."""
Look = Callable[[list[Any]], list[Any]]
"""Waits a while; gives those that are done."""


def default_workers() -> int:
    """One cell for each core; one in all where there is an accelerator, which a cell has for itself."""
    if torch.accelerator.is_available():
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(folder: str | Path, *, workers: int | None = None, engine: str = "local", cell: str | None = None) -> Study:
    """Run what is not finished of a study; the same call goes on where it was stopped.

    Cells run side by side, as many as `workers` (default: one for each core, with one thread unless OMP_NUM_THREADS
    says otherwise). `engine="ray"` gives them to a Ray cluster, whose machines all see the folder. `cell` runs that one
    alone, in this process: for schedulers of one's own. Why a cell failed is written beside it, and the others go on.
    """
    study = Study.read(folder)
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, not {engine!r}")
    if workers is not None:
        check_integer("workers", workers, minimum=1)
    if cell is not None:
        _run_here(study, study.find(cell))
        return study
    lock = FileLock(study.folder / ".running.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ValueError(f"another process is running the study in {str(folder)!r}: wait for it, or stop it") from error
    try:
        left = [cell for cell in study.cells if not study.is_settled(cell) or is_unsealed(study, cell)]
        left.sort(key=lambda cell: (cell.budget, cell.seed))  # a whole curve of one seed says more than half of three
        if left:
            _check_corpus(study, left[0])
            engaged = _local if engine == "local" else _ray
            with engaged(study, workers) as (number, start, look), _stopped_by_terminate():
                _run_all(study, left, number, start, look)
    finally:
        lock.release()
    return study


def _check_corpus(study: Study, cell: Cell) -> None:
    config = TrainConfig.from_dict(cell.settings)
    if corpus_of(config).digest != study.corpus_digest:
        raise ValueError(
            f"the corpus {config.corpus!r} is not the text that the study in {str(study.folder)!r} was planned on "
            "(other versions?): plan a new study"
        )


def _run_here(study: Study, cell: Cell) -> None:
    failed = study.beside(cell, FAILED)
    failed.unlink(missing_ok=True)
    try:
        _check_corpus(study, cell)
        if study.has_result(cell):
            study.losses(cell)  # refuses a damaged one
        train(study.run_of(cell).folder, TrainConfig.from_dict(cell.settings))
        sealed_losses(study, cell)
    except Exception as error:  # whatever it is, as memory that is not there: nobody else may be there to write it down
        _write_failure(study, cell, str(error) or type(error).__name__)
        raise
    failed.unlink(missing_ok=True)  # somebody else may have tried meanwhile


def _write_failure(study: Study, cell: Cell, reason: str, code: int | None = None) -> None:
    path = study.beside(cell, FAILED)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"reason": reason, "code": code})


def _run_all(study: Study, cells: list[Cell], workers: int, start: Start, look: Look) -> None:
    """Keep `workers` cells under way until all are done. The bar counts FLOPs."""
    waiting, running = list(reversed(cells)), dict[Any, Cell]()
    total, done, num_failed = sum(cell.flops for cell in study.cells), 0, 0
    finished = total - sum(cell.flops for cell in cells)
    with tqdm(total=total, initial=finished, unit="FLOPs", unit_scale=True, desc="study", smoothing=0.02) as bar:
        while waiting or running:
            while waiting and len(running) < workers:
                cell = waiting.pop()
                running[start(cell)] = cell
            for task in look(list(running)):
                cell = running.pop(task)
                done += 1
                reason = study.failure(cell)
                if reason is None:
                    finished += cell.flops
                else:
                    num_failed += 1
                    tqdm.write(f"mixdepth: cell {cell.name} failed: {reason}", file=sys.stderr)
            bar.n = finished + sum(_progress(study, cell) for cell in running.values())
            bar.set_postfix_str(f"{done} of {len(cells)} runs" + (f", {num_failed} failed" if num_failed else ""))


def _progress(study: Study, cell: Cell) -> int:
    """FLOPs of a running cell so far, from the last line of its metrics."""
    try:
        with open(study.run_of(cell).folder / METRICS, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 2**16))
            lines = file.read().split(b"\n")[:-1]
        return int(next(line["flops"] for line in map(json.loads, reversed(lines)) if "flops" in line))
    except (OSError, StopIteration, TypeError, ValueError):
        return 0  # it has not begun


def attempt(folder: str, name: str, stopping: threading.Event | None = None) -> None:
    """Run a cell in a process of its own, which ends early if all is `stopping`; if it dies without a word, say how."""
    study = Study.read(folder)
    cell = study.find(name)
    log, failed = study.beside(cell, LOG), study.beside(cell, FAILED)
    stopping = stopping or threading.Event()
    with writing(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        failed.unlink(missing_ok=True)
        with open(log, "ab") as output:
            command = [sys.executable, "-m", "mixdepth", "isoflop", "run", folder, "--cell", name]
            environment = {"OMP_NUM_THREADS": "1", **os.environ}
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
            try:
                while process.poll() is None and not stopping.wait(0.1):
                    pass  # not process.wait(): Ray stops a task between two lines of Python
            finally:
                process.terminate()  # no Ctrl-C: children of a shell's background job do not hear it
            code = process.wait()
    # Whoever stops all of a group or of a machine may reach the cell before the study: it is given a moment to hear.
    is_stopped = stopping.wait(SECONDS_BETWEEN_LOOKS if code in STOPPED else 0)
    if code and not is_stopped and not failed.exists():
        _write_failure(study, cell, _reason(log, code), code)


def _reason(log: Path, code: int) -> str:
    """The last thing that a process said, or how it ended."""
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return said[-1].removeprefix("mixdepth: ") if said else f"its process ended with code {code}"


@contextmanager
def _local(study: Study, workers: int | None) -> Iterator[tuple[int, Start, Look]]:
    workers = workers or default_workers()
    pool = ThreadPoolExecutor(workers)
    stopping = threading.Event()

    def start(cell: Cell) -> "Future[None]":
        return pool.submit(attempt, str(study.folder), cell.name, stopping)

    def look(tasks: list[Any]) -> list[Any]:
        done = wait(tasks, timeout=SECONDS_BETWEEN_LOOKS, return_when=FIRST_COMPLETED).done
        for task in done:
            task.result()  # what went wrong with the study itself, as a full disk
        return list(done)

    try:
        yield workers, start, look
    finally:
        stopping.set()  # whoever was stopped alone stops the cells too; they keep their checkpoints
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _stopped_by_terminate() -> Iterator[None]:
    """Within this context the signal of `kill` is Ctrl-C."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # signals belong to the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _ray(study: Study, workers: int | None) -> Iterator[tuple[int, Start, Look]]:
    try:
        import ray
    except ImportError as error:
        raise ValueError("engine='ray' needs Ray: pip install 'mixdepth[ray]'") from error
    began = not ray.is_initialized()
    if began:
        ray.init(log_to_driver=False)  # the cluster of RAY_ADDRESS or of this machine, or a new one
    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0))
    running: dict[Any, Cell] = {}

    def work(folder: str, name: str) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # by which Ray cancels; off in a shell's background
        attempt(folder, name)

    task = ray.remote(num_cpus=1, num_gpus=min(gpus, 1), max_retries=0)(work)

    def start(cell: Cell) -> Any:
        reference = task.remote(str(study.folder.absolute()), cell.name)
        running[reference] = cell
        return reference

    def look(tasks: list[Any]) -> list[Any]:
        done, _ = ray.wait(tasks, timeout=SECONDS_BETWEEN_LOOKS)
        for reference in done:
            cell = running.pop(reference)
            try:
                ray.get(reference)
            except ray.exceptions.RayError as error:  # a machine was lost, or does not see the folder
                _write_failure(study, cell, (str(error).strip().splitlines() or [type(error).__name__])[-1])
        return list(done)

    try:
        yield workers or gpus or int(resources.get("CPU", 1)), start, look
    finally:
        for reference in running:  # and no other: to cancel what has just ended can end this process too
            ray.cancel(reference)
        if running:
            ray.wait([*running], num_returns=len(running), timeout=SECONDS_TO_STOP)
        if began:
            ray.shutdown()
