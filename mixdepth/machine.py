"""What this machine is, and how fast it is at best."""

import functools
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

PEAK_SIZE = 1024
"""The rows and columns of the matrices that are multiplied to measure the peak."""


@functools.cache
def matmul_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.2) -> float:
    """Measure the FLOPs per second of a large matrix product, which this machine does not exceed."""
    x = torch.ones(PEAK_SIZE, PEAK_SIZE, device=device, dtype=dtype)  # (PEAK_SIZE, PEAK_SIZE)

    def measure(repeats: int) -> float:
        """Return the seconds that this many products take."""
        start = time.perf_counter()
        for _ in range(repeats):
            y = x @ x
        y[0, 0].item()  # wait for the device
        return time.perf_counter() - start

    once = max(measure(2) / 2, 1e-6)
    repeats = max(1, int(seconds / once))
    return 2 * PEAK_SIZE**3 * repeats / measure(repeats)


def describe_machine(device: torch.device | None = None) -> str:
    """Describe the machine in a line: its accelerator, or its processor, threads and instructions."""
    if device is not None and device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    if device is not None and device.type != "cpu":
        return f"{device.type}, torch {torch.__version__}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    if names:
        cpu = f"{len(names)} x {names[0]}"
    else:
        cpu = platform.processor() or platform.machine()
    isa = os.environ.get("ONEDNN_MAX_CPU_ISA", "all instructions")
    return f"{cpu}, {torch.get_num_threads()} threads, torch {torch.__version__}, oneDNN: {isa}"


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread. Small models gain little from a second one, and on a busy machine each has to wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
