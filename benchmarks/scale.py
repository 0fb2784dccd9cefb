"""How time and memory of `mixdepth train` grow with size, and what two processes share.

Each row is a run of its own in a process of its own (or two, by torchrun): seconds for each step from timings.jsonl,
memory as the process's peak above what it holds before the model is made.

    python benchmarks/scale.py > benchmarks/scale.md     # on an idle machine
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from machine import describe, header, row

SHAPES = ((4, 128), (6, 192), (8, 256), (8, 512))
STEPS = 8

CHILD = """
import json, os, sys
import mixdepth
from machine import peak_memory
from mixdepth import load_corpus
load_corpus("stdlib")
settings = json.loads(sys.argv[1])
depth = None if settings.pop("kind") == "dense" else mixdepth.DepthConfig(capacity=0.125)
before = peak_memory()
run = mixdepth.train(sys.argv[2], depth=depth, log_every=1, eval_windows=1, save_every=10**9, **settings)
peak = peak_memory() - before
with open(sys.argv[2] + "/peak" + os.environ.get("RANK", "0"), "w") as file:
    file.write(str(peak))
"""


def measure(processes: int = 1, **settings: object) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "child.py"
        script.write_text(CHILD)
        start = [sys.executable]
        environment = {**os.environ, "TQDM_DISABLE": "1", "PYTHONPATH": str(Path(__file__).parent)}
        if processes > 1:
            start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
            environment["OMP_NUM_THREADS"] = "1"
        out = f"{folder}/run"
        subprocess.run(
            [*start, str(script), json.dumps({**settings, "steps": STEPS}), out],
            check=True,
            capture_output=True,
            env=environment,
        )
        lines = [json.loads(line) for line in Path(out, "timings.jsonl").read_text().splitlines()]
        about = json.loads(Path(out, "run.json").read_text())
        return {
            "seconds": median([line["seconds"] for line in lines[2:]]),
            "share": median([line["share_of_peak"] for line in lines[2:]]),
            "memory": max(int(Path(out, f"peak{rank}").read_text()) for rank in range(processes)),
            "parameters": about["parameters"],
            "flops": about["flops"] / STEPS,
        }


def sizes() -> None:
    names = ("layers x width", "kind", "parameters", "FLOPs per step", "s per step", "GFLOP/s", "share of matmul peak")
    header(*names, "peak memory, MiB", "16 bytes a parameter, MiB")
    for layers, width in SHAPES:
        for kind in ("dense", "routed"):
            found = measure(layers=layers, width=width, heads=width // 32, kind=kind)
            row(
                f"{layers} x {width}",
                kind,
                f"{found['parameters'] / 1e6:.2f} M",
                f"{found['flops']:.3g}",
                f"{found['seconds']:.3f}",
                f"{found['flops'] / found['seconds'] / 1e9:.0f}",
                f"{found['share']:.0%}",
                f"{found['memory'] / 2**20:,.0f}",
                f"{16 * found['parameters'] / 2**20:,.0f}",
            )


def engines() -> None:
    header("8 x 512, 8 windows of 256", "processes", "s per step", "peak memory of a process, MiB")
    for engine, processes in (("one process", 1), ("ddp", 2), ("fsdp", 2)):
        setting = {} if processes == 1 else {"engine": engine}
        for kind in ("dense", "routed"):
            found = measure(processes, layers=8, width=512, kind=kind, **setting)
            row(f"{kind}, {engine}", processes, f"{found['seconds']:.3f}", f"{found['memory'] / 2**20:,.0f}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(f"{describe()}; 8 windows of 256 bytes a step, fp32; median of {STEPS - 2} steps\n", flush=True)
    sizes()
    print()
    engines()
