"""A small corpus of real text, and settings of runs that take seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path

from mixdepth.sources import stdlib_files

TINY = {
    "layers": 2,
    "width": 32,
    "context": 32,
    "batch_size": 4,
    "log_every": 3,
    "eval_windows": 8,
    "learning_rate": 4e-3,
}
"""Layer 1 of 2 is routed."""


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


def flags(settings: dict) -> list[str]:
    return [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def command(*arguments: str, processes: int = 1) -> list[str]:
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*start, "-m", "mixdepth", *arguments]


def call(*arguments: str, processes: int = 1, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*arguments, processes=processes),
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]
