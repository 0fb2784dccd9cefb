"""What the benchmarks share: a word on the machine, interleaved timing, medians."""

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

WITHOUT_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}


def avoid_broken_amx() -> None:
    """Start the script again without AMX where bf16 products die of it.

    Some virtual machines announce AMX and trap on its instructions, which no program can catch.
    """
    probe = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"
    if "ONEDNN_MAX_CPU_ISA" not in os.environ and subprocess.run([sys.executable, "-c", probe]).returncode != 0:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **WITHOUT_AMX})


def describe() -> str:
    import torch

    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    isa = os.environ.get("ONEDNN_MAX_CPU_ISA", "all instructions")
    cpu = f"{len(names)} x {names[0]}" if names else platform.processor()
    return f"{cpu}, {torch.get_num_threads()} threads, torch {torch.__version__}, oneDNN: {isa}"


def peak_memory() -> int:
    """Bytes of this process at their highest. (getrusage would count those of the parent before exec too.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) * 1024


def interleave(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, the functions taking turns, so that a drift of the machine hits all alike."""
    for function in functions.values():
        function()  # warm
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def median(values: list[float]) -> float:
    return statistics.median(values)


def spread(values: list[float]) -> str:
    return f"{min(values):.3g} to {max(values):.3g}"


def row(*cells: object) -> None:
    """Print a row of a Markdown table."""
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def header(*names: str) -> None:
    row(*names)
    row(*["---"] * len(names))
