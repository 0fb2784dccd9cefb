"""A small corpus of real text, settings of runs and studies that take seconds, and ways to call the command line."""

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from mixdepth import isoflop
from mixdepth.cli import main
from mixdepth.data.sources import stdlib_files
from mixdepth.isoflop import Study

TINY = {
    "layers": 2,
    "width": 32,
    "context": 32,
    "batch_size": 4,
    "log_every": 3,
    "eval_windows": 8,
    "learning_rate": 4e-3,
    "save_every": 1000,
}
"""Layer 1 of 2 is routed; there is one checkpoint, at the end, unless a test wants more."""

SMALL = {"context": 32, "batch_size": 4, "validation": 0.1, "test": 0.1, "eval_windows": 8, "save_every": 1000}
CENTRE = 3e4
"""Of a study."""


def documents(number: int = 40, size: int = 1200) -> list[str]:
    """The beginnings of files of the standard library, cut at a line's end."""
    texts = []
    for file in stdlib_files():
        text = file.read_text()[:size]
        if len(text) == size:
            texts.append(text[: text.rindex("\n") + 1])
        if len(texts) == number:
            return texts
    raise AssertionError


def write_folder(folder: Path, texts: list[str]) -> str:
    folder.mkdir(parents=True)
    for index, text in enumerate(texts):
        (folder / f"{index:03}.txt").write_text(text)
    return str(folder)


def plan(folder: Path, corpus: str, **options) -> Study:
    """A study of two cells of a few steps, unless told otherwise."""
    asked = {"budgets": [3e8], "variants": ["dense", "mod"], "seeds": 1, "sizes": 1, "centre": CENTRE}
    return isoflop.plan(folder, **{**asked, **SMALL, "corpus": corpus, **options})


def without_records(study: Path, folder: Path, *patterns: str) -> Path:
    """Copy a study without its cells.jsonl, and without the files of these patterns: the folders have the results."""
    return shutil.copytree(study, folder, ignore=shutil.ignore_patterns("cells.jsonl", *patterns))


def flags(settings: dict) -> list[str]:
    return [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def call(*arguments: str) -> subprocess.CompletedProcess:
    """The command line, in this process: to import all of it once more takes longer than most commands."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as errors:
        code = main(arguments)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), errors.getvalue())


def refusal(*arguments: str) -> str:
    """The sentence by which a command is refused."""
    process = call(*arguments)
    assert process.returncode == 2
    sentence = process.stderr.splitlines()[-1]
    assert sentence.startswith("mixdepth: ")
    return sentence


def start(
    *arguments: str, log: Path, file_size: int | None = None, is_background: bool = False, **environment: str
) -> ForkServerProcess:
    """The command line in a process and a session of its own, forked from a server that has imported mixdepth already.

    What it says is added to `log`. No file may grow beyond `file_size` bytes. In the background it hears no Ctrl-C.
    """
    process = get_context("forkserver").Process(
        target=_command, args=(arguments, log, file_size, {**os.environ, **environment}, is_background)
    )
    process.start()
    return process


def _command(
    arguments: list[str], log: Path, file_size: int | None, environment: dict[str, str], is_background: bool
) -> None:
    os.setsid()
    os.environ.update(environment)
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    if is_background:  # as a shell does
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if file_size is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    sys.exit(main(arguments))


def call_in_two(*arguments: str, log: Path) -> tuple[list[int | None], str]:
    """The command line in two processes that train together: their exit codes, and what they said."""
    together = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [start(*arguments, log=log, RANK=str(rank), LOCAL_RANK=str(rank), **together) for rank in range(2)]
    for process in ranks:
        process.join()
    return [process.exitcode for process in ranks], log.read_text()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]
