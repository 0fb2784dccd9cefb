"""What `mixdepth train` costs in comparison with a bare PyTorch loop over the same model and batches; memory; start-up.

The bare loop has the same optimizer, schedule and clipping, and no logging, no data loader, no Trainer. Both take
turns, each on a fresh model; the ratio is of the medians of seconds per step.

    python benchmarks/train.py > benchmarks/train.md     # on an idle machine
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import describe, header, row

SHAPES = {"8 x 256": {"layers": 8, "width": 256}, "4 x 64": {"layers": 4, "width": 64, "heads": 2}}
STEPS = {"8 x 256": 16, "4 x 64": 150}
REPEATS = 3


def settings(kind: str, shape: str) -> dict:
    import mixdepth

    depth = None if kind == "dense" else mixdepth.DepthConfig(capacity=0.125)
    return {**SHAPES[shape], "depth": depth, "steps": STEPS[shape], "eval_windows": 1, "log_every": 10}


def trained(kind: str, shape: str) -> float:
    """Seconds for each step of `mixdepth.train`, with its logging."""
    import mixdepth

    with tempfile.TemporaryDirectory() as folder:
        run = mixdepth.train(folder, **settings(kind, shape), save_every=10**9)
        lines = [json.loads(line) for line in (run.folder / "timings.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["step"] > 1]  # the first step alone has a line of its own
    return sum(line["seconds"] for line in lines) / (STEPS[shape] - 1)


def bare(kind: str, shape: str) -> float:
    """Seconds for each step of a loop that does nothing else."""
    import torch

    import mixdepth
    from mixdepth.data.corpus import load_corpus
    from mixdepth.models.fresh import make_model

    config = mixdepth.TrainConfig(**settings(kind, shape))
    model = make_model(config, 256).train()
    windows = load_corpus("stdlib").train.windows(config.context)
    batches = [torch.stack([windows[8 * i + j] for j in range(8)]) for i in range(config.steps)]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.95), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5 * (1 + math.cos(math.pi * s / config.steps)))
    start = 0.0
    for step, ids in enumerate(batches):
        if step == 1:
            start = time.perf_counter()
        model(ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return (time.perf_counter() - start) / (config.steps - 1)


def overhead() -> None:
    from mixdepth.bench import Spread

    header(
        "layers x width",
        "kind",
        "bare, s per step",
        "mixdepth train",
        "tokens/s, bare / train",
        "speed of the bare loop",
    )
    for shape in SHAPES:
        seconds = {(kind, way): [] for kind in ("dense", "routed") for way in (bare, trained)}
        for _ in range(REPEATS):
            for kind, way in seconds:
                seconds[kind, way].append(way(kind, shape))
        for kind in ("dense", "routed"):
            ours, theirs = Spread.of(seconds[kind, trained]), Spread.of(seconds[kind, bare])
            pairs = Spread.of_ratios(seconds[kind, bare], seconds[kind, trained])
            row(
                shape,
                kind,
                f"{theirs:.4f}",
                f"{ours:.4f}",
                f"{8 * 256 / theirs.median:,.0f} / {8 * 256 / ours.median:,.0f}",
                f"**{theirs.median / ours.median:.3f}** (pairs {pairs.low:.3f} to {pairs.high:.3f})",
            )


def memory_of_training(kind: str) -> int:
    """Bytes of a process that trains a few steps, at their highest, less those it has before it begins."""
    script = f"""
import tempfile, mixdepth
from machine import peak_memory
from mixdepth import load_corpus
load_corpus("stdlib")
before = peak_memory()
depth = None if {kind!r} == "dense" else mixdepth.DepthConfig(capacity=0.125)
with tempfile.TemporaryDirectory() as folder:
    mixdepth.train(folder, layers=8, width=256, context=1024, depth=depth, steps=3, eval_windows=1, save_every=10**9)
print(peak_memory() - before)
"""
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=here)
    return int(found.stdout.splitlines()[-1])


def start_up() -> float:
    """Seconds from the command to the first step, the corpus being in the cache."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [sys.executable, "-m", "mixdepth", "train", "--layers", "8", "--width", "256", "--steps", "2"]
        start = time.perf_counter()
        process = subprocess.Popen(
            [*arguments, "--out", folder + "/run"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        metrics = Path(folder) / "run" / "metrics.jsonl"
        while not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.01)
        seconds = time.perf_counter() - start
        process.wait()
        return seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("overhead", "memory"), help="a part of it; memory comes with start-up")
    options = parser.parse_args()
    os.environ.setdefault("TQDM_DISABLE", "1")
    from mixdepth.bench import Spread

    print(f"{describe()}; {REPEATS} repeats, dense and routed, bare and trained taking turns\n", flush=True)
    if options.only != "memory":
        overhead()
    if options.only == "overhead":
        sys.exit()
    memory = {kind: [memory_of_training(kind) for _ in range(2)] for kind in ("dense", "routed")}
    dense, routed = (min(values) / 2**20 for values in memory.values())
    print(f"\nPeak memory of training, 8 x 256, 8 windows of 1,024: dense {dense:,.0f} MiB, routed {routed:,.0f} MiB.")
    seconds = Spread.of([start_up() for _ in range(3)])
    print(f"From the command to the first step, warm cache, in s: {seconds:.1f}.")
