"""What this machine is and can do at best."""

import functools
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

PEAK_SIZE = 1024


@functools.cache
def matmul_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.2) -> float:
    """FLOPs in a second of a large matrix product: what this machine can do at best."""
    x = torch.ones(PEAK_SIZE, PEAK_SIZE, device=device, dtype=dtype)

    def measure(repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            y = x @ x
        y[0, 0].item()  # wait for the device
        return time.perf_counter() - start

    once = max(measure(2) / 2, 1e-6)
    repeats = max(1, int(seconds / once))
    return 2 * PEAK_SIZE**3 * repeats / measure(repeats)


def describe_machine(device: torch.device | None = None) -> str:
    """The machine in a line: the accelerator, or processor, threads and what of it is used."""
    if device is not None and device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    if device is not None and device.type != "cpu":
        return f"{device.type}, torch {torch.__version__}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    cpu = f"{len(names)} x {names[0]}" if names else platform.processor() or platform.machine()
    isa = os.environ.get("ONEDNN_MAX_CPU_ISA", "all instructions")
    return f"{cpu}, {torch.get_num_threads()} threads, torch {torch.__version__}, oneDNN: {isa}"


@contextmanager
def one_thread() -> Iterator[None]:
    """Models this small gain little from a second thread, and on a busy machine each waits for the other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
