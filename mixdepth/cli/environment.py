"""What a report of a bug needs to say about a machine: versions, device, processor, installed extras."""

import os
import platform
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from mixdepth.text import columns
from mixdepth.version import __version__, commit

EXTRAS = ("data", "tensorboard", "plots", "study", "ray", "lora", "serve", "tasks")
"""The extras that a user may want; those for work on mixdepth itself are left out."""
TESTED_ON = "tested on CPU only; CUDA should work and has never been tried"


def describe_environment() -> str:
    """Describe the environment in one line for each subject. Torch is imported only if it may find an accelerator."""
    source = commit()
    mixdepth = __version__ if source is None else f"{__version__}, commit {source}"
    installed = [extra for extra in EXTRAS if is_installed(extra)]
    missing = [extra for extra in EXTRAS if extra not in installed]
    num_threads = os.environ.get("OMP_NUM_THREADS")
    threads = "OMP_NUM_THREADS is not set" if num_threads is None else f"OMP_NUM_THREADS={num_threads}"
    rows = [
        ("mixdepth", mixdepth),
        ("Python", f"{platform.python_version()} on {platform.platform()}"),
        ("torch", version("torch")),
        ("transformers", version("transformers")),
        ("device", _device()),
        ("CPU", _cpu()),
        ("threads", f"{os.cpu_count()} cores, {threads}"),
        ("extras", ", ".join(installed) or "none"),
        ("not installed", ", ".join(missing) or "none"),
    ]
    return f"{columns(rows, left=(0, 1))}\n{TESTED_ON}"


def is_installed(extra: str) -> bool:
    """Say whether everything that an extra of mixdepth needs is installed."""
    for line in requires("mixdepth") or ():
        requirement = Requirement(line)
        if requirement.marker is None or not requirement.marker.evaluate({"extra": extra}):
            continue
        # One extra may name another one of mixdepth.
        if requirement.name == "mixdepth":
            parts = [is_installed(other) for other in requirement.extras]
            if not all(parts):
                return False
            continue
        try:
            version(requirement.name)
        except PackageNotFoundError:
            return False
    return True


def _device() -> str:
    """Name the device. The version of torch says whether it is built for the CPU alone."""
    if version("torch").endswith("+cpu"):
        return "cpu (this torch is built without CUDA)"
    import torch

    if torch.cuda.is_available():
        return f"cuda ({torch.cuda.get_device_name()})"
    return "cpu"


def _cpu() -> str:
    """Name the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    for line in lines:
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor() or platform.machine()
