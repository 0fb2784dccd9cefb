"""Shared by benchmarks and experiments: instructions that work, memory, recorded runs, and Markdown tables."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

WITHOUT_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}


def avoid_broken_amx() -> None:
    """Start the script again without AMX where bf16 products die of it.

    Some virtual machines announce AMX and trap on its instructions, which no program can catch.
    """
    probe = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"
    if "ONEDNN_MAX_CPU_ISA" not in os.environ and subprocess.run([sys.executable, "-c", probe]).returncode != 0:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **WITHOUT_AMX})


def describe() -> str:
    from mixdepth.bench import describe_machine  # not before a script could start again without AMX

    return describe_machine()


def peak_memory() -> int:
    """Bytes of this process at their highest. (getrusage would count those of the parent before exec too.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) * 1024


def recorded(path: Path) -> list[dict[str, Any]]:
    """The runs in a file of JSON lines; none if there is no file yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def record(path: Path, run: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(run) + "\n")


def row(*cells: object) -> None:
    """Print a row of a Markdown table."""
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def header(*names: str) -> None:
    row(*names)
    row(*["---"] * len(names))
