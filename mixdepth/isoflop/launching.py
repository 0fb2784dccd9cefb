"""Run the cells of a study: at the same time, each in its own process, on this machine or on a Ray cluster."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from filelock import FileLock, Timeout
from tqdm import tqdm

from mixdepth.config import check_integer
from mixdepth.data.corpus import Corpus
from mixdepth.files import write_json, writing
from mixdepth.isoflop.sealed import is_unsealed, sealed_losses
from mixdepth.isoflop.study import DIVERGED, ERROR, FAILED, LOG, Cell, Failure, Study
from mixdepth.runs.layout import METRICS
from mixdepth.runs.run import corpus_of
from mixdepth.runs.settings import TrainConfig
from mixdepth.training.job import train_on
from mixdepth.training.trainer import DivergedError

ENGINES = ("local", "ray")
SECONDS_BETWEEN_POLLS = 0.1
SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_TO_STOP = 10.0
NUM_TAIL_BYTES = 2**16
"""How much of the end of metrics.jsonl is read for the last line."""
STOPPED = (130, -signal.SIGINT, -signal.SIGTERM)
"""The exit codes of a process that was stopped. It is no failure if the whole study was stopped with it."""


class Engine(Protocol):
    """Starts cells, and says which of them have ended. When its context ends, it stops the cells that are running."""

    num_workers: int

    def start(self, cell: Cell) -> Any:
        """Start a cell, and return a handle of it."""

    def ended(self, handles: list[Any]) -> list[Any]:
        """Wait for a while, and return the handles of the cells that have ended."""


def default_workers() -> int:
    """Count the cells that run at the same time: one for each core, or a single one if there is an accelerator."""
    if torch.accelerator.is_available():
        return 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run(folder: str | Path, *, workers: int | None = None, engine: str = "local", cell: str | None = None) -> Study:
    """Run the cells of a study that are not finished. The same call resumes where it was stopped.

    As many cells run at the same time as there are `workers` (default: one for each core, with one thread unless
    OMP_NUM_THREADS says otherwise). `engine="ray"` gives them to a Ray cluster, whose machines must all see the folder.
    `cell` runs that cell alone, in this process, for other schedulers. When a cell fails, the reason is written next to
    its folder, and the others continue. Results are gathered in cells.jsonl whenever a cell ends.
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
        return _run_cells(study.gather(), engine, workers)
    finally:
        lock.release()


def _run_cells(study: Study, engine: str, workers: int | None) -> Study:
    """Run the cells that are not finished with an engine, and gather their results."""
    unfinished = [cell for cell in study.cells if not study.is_settled(cell) or is_unsealed(study, cell)]
    if not unfinished:
        return study
    # All sizes of one seed make a curve. They say more than half of the sizes of three seeds.
    unfinished.sort(key=lambda cell: (cell.budget, cell.seed))
    _read_corpus(study, unfinished[0])
    open_engine = LocalEngine if engine == "local" else _ray_engine
    opened: AbstractContextManager[Engine] = open_engine(study, workers)
    with opened as running_engine, _terminate_as_interrupt():
        _run_all(study, unfinished, running_engine)
    return study.gather()


def _read_corpus(study: Study, cell: Cell) -> Corpus:
    """Read the text of the study, and refuse any other than the one it was planned on."""
    config = TrainConfig.from_dict(cell.settings)
    corpus = corpus_of(config)
    if corpus.digest != study.corpus_digest:
        raise ValueError(
            f"the corpus {config.corpus!r} is not the text that the study in {str(study.folder)!r} was planned on "
            "(other versions?): plan a new study"
        )
    return corpus


def _run_here(study: Study, cell: Cell) -> None:
    """Run one cell in this process. A failure is written down, as there may be no other process that could do it."""
    failed = study.next_to(cell, FAILED)
    failed.unlink(missing_ok=True)
    try:
        corpus = _read_corpus(study, cell)
        study.check_result(cell)
        if not study.is_finished(cell):
            train_on(corpus, study.run_of(cell), TrainConfig.from_dict(cell.settings))
        sealed_losses(study, cell, corpus)
    except Exception as error:  # of any kind, such as a lack of memory
        kind = DIVERGED if isinstance(error, DivergedError) else ERROR
        _write_failure(study, cell, Failure(kind, str(error) or type(error).__name__))
        raise
    failed.unlink(missing_ok=True)  # another process may have tried in the meantime


def _write_failure(study: Study, cell: Cell, failure: Failure) -> None:
    path = study.next_to(cell, FAILED)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, failure._asdict())


def _run_all(study: Study, cells: list[Cell], engine: Engine) -> None:
    """Keep all workers of the engine busy until all cells have ended. The bar counts FLOPs."""
    waiting = [*reversed(cells)]
    running: dict[Any, Cell] = {}
    num_ended, num_failed = 0, 0
    total_flops = sum(cell.flops for cell in study.cells)
    finished_flops = total_flops - sum(cell.flops for cell in cells)
    with tqdm(
        total=total_flops, initial=finished_flops, unit="FLOPs", unit_scale=True, desc="study", smoothing=0.02
    ) as bar:
        while waiting or running:
            # 1. Start cells while workers are free.
            while waiting and len(running) < engine.num_workers:
                cell = waiting.pop()
                running[engine.start(cell)] = cell
            # 2. Wait for a while, and look at the cells that have ended.
            handles = engine.ended(list(running))
            for handle in handles:
                cell = running.pop(handle)
                num_ended += 1
                failure = study.failure(cell)
                if failure is None:
                    finished_flops += cell.flops
                else:
                    num_failed += 1
                    tqdm.write(f"mixdepth: cell {cell.name} failed: {failure.message}", file=sys.stderr)
            if handles:
                study.gather()
            # 3. Show how far all of them are.
            bar.n = finished_flops + sum(_flops_so_far(study, cell) for cell in running.values())
            progress = f"{num_ended} of {len(cells)} runs"
            if num_failed:
                progress += f", {num_failed} failed"
            bar.set_postfix_str(progress)


def _flops_so_far(study: Study, cell: Cell) -> int:
    """Read the training FLOPs of a running cell from its metrics; 0 if it has written none yet."""
    try:
        with open(study.run_of(cell).folder / METRICS, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - NUM_TAIL_BYTES))
            complete_lines = file.read().split(b"\n")[:-1]
        for line in reversed(complete_lines):
            metrics = json.loads(line)
            if "flops" in metrics:
                return int(metrics["flops"])
    except (OSError, TypeError, ValueError):
        pass
    return 0


def attempt(folder: str, name: str, stopping: threading.Event | None = None) -> None:
    """Run a cell in its own process. If the process ends without writing down a failure, write one.

    When `stopping` is set, the process is ended early.
    """
    study = Study.read(folder)
    cell = study.find(name)
    log, failed = study.next_to(cell, LOG), study.next_to(cell, FAILED)
    stopping = stopping or threading.Event()
    with writing(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        failed.unlink(missing_ok=True)
        with open(log, "ab") as output:
            command = [sys.executable, "-m", "mixdepth", "isoflop", "run", folder, "--cell", name]
            environment = {"OMP_NUM_THREADS": "1", **os.environ}
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
            try:
                # This polls because Ray stops a task between two lines of Python, and not within process.wait().
                while process.poll() is None and not stopping.wait(SECONDS_BETWEEN_POLLS):
                    pass
            finally:
                process.terminate()  # Ctrl-C would not reach the children of a shell's background job
            code = process.wait()
    # A signal to the whole process group can reach the cell before us. Wait briefly, so that a stop is not recorded as
    # a failure.
    seconds = SECONDS_BETWEEN_LOOKS if code in STOPPED else 0
    is_stopped = stopping.wait(seconds)
    if code and not is_stopped and not failed.exists():
        _write_failure(study, cell, Failure(ERROR, _reason(log, code)))


def _reason(log: Path, code: int) -> str:
    """Say why a process failed: by its last line, or by the way it ended."""
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if not lines:
        return f"its process ended with code {code}"
    return lines[-1].removeprefix("mixdepth: ")


class LocalEngine:
    """Runs cells on this machine, each in a process that a thread waits for."""

    def __init__(self, study: Study, workers: int | None) -> None:
        self.num_workers = workers or default_workers()
        self._folder = str(study.folder)
        self._pool = ThreadPoolExecutor(self.num_workers)
        self._stopping = threading.Event()

    def __enter__(self) -> "LocalEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()  # a study that is stopped by itself stops its cells too; they keep their checkpoints
        self._pool.shutdown(wait=True, cancel_futures=True)

    def start(self, cell: Cell) -> "Future[None]":
        return self._pool.submit(attempt, self._folder, cell.name, self._stopping)

    def ended(self, handles: "list[Future[None]]") -> "list[Future[None]]":
        done = wait(handles, timeout=SECONDS_BETWEEN_LOOKS, return_when=FIRST_COMPLETED).done
        for future in done:
            future.result()  # raises an error of the study itself, such as a full disk
        return list(done)


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Treat the signal of `kill` as Ctrl-C within this context."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # only the main thread can handle signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _ray_engine(study: Study, workers: int | None) -> "RayEngine":
    try:
        import ray
    except ImportError as error:
        raise ValueError("engine='ray' needs Ray: pip install 'mixdepth[ray]'") from error
    return RayEngine(ray, study, workers)


class RayEngine:
    """Runs cells on a Ray cluster: that of RAY_ADDRESS, that of this machine, or a new one."""

    def __init__(self, ray: Any, study: Study, workers: int | None) -> None:
        self._ray = ray
        self._study = study
        self._running: dict[Any, Cell] = {}
        self._has_begun_cluster = not ray.is_initialized()
        if self._has_begun_cluster:
            ray.init(log_to_driver=False)
        resources = ray.cluster_resources()
        num_gpus = int(resources.get("GPU", 0))
        self.num_workers = workers or num_gpus or int(resources.get("CPU", 1))

        def work(folder: str, name: str) -> None:
            # Ray cancels a task by this signal, which is ignored in a shell's background job.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            attempt(folder, name)

        self._task = ray.remote(num_cpus=1, num_gpus=min(num_gpus, 1), max_retries=0)(work)

    def __enter__(self) -> "RayEngine":
        return self

    def __exit__(self, *_: object) -> None:
        for reference in self._running:  # no others: cancelling a task that has just ended can end this process too
            self._ray.cancel(reference)
        if self._running:
            self._ray.wait([*self._running], num_returns=len(self._running), timeout=SECONDS_TO_STOP)
        if self._has_begun_cluster:
            self._ray.shutdown()

    def start(self, cell: Cell) -> Any:
        reference = self._task.remote(str(self._study.folder.absolute()), cell.name)
        self._running[reference] = cell
        return reference

    def ended(self, handles: list[Any]) -> list[Any]:
        done, _ = self._ray.wait(handles, timeout=SECONDS_BETWEEN_LOOKS)
        for reference in done:
            cell = self._running.pop(reference)
            try:
                self._ray.get(reference)
            except self._ray.exceptions.RayError as error:  # a machine was lost, or does not see the folder
                lines = str(error).strip().splitlines() or [type(error).__name__]
                _write_failure(self._study, cell, Failure(ERROR, lines[-1]))
        return list(done)
