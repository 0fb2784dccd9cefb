"""The defaults of `mixdepth train`: one grid for dense and routed models, with the same effort for both.

First the learning rate at three sizes, then the other settings, one at a time, at the smallest. Each cell is a
`mixdepth.train` on the standard library's source; the loss is the held-out one, with causal routing.

    python sweep.py            # resumes; results in sweep.jsonl
    python sweep.py --shard 0/2 & python sweep.py --shard 1/2
    python sweep.py --table

The README of experiments/ says which PYTHONPATH a script needs.
"""

import argparse
import tempfile
from pathlib import Path

from machine import describe, header, record, recorded, row

RESULTS = Path(__file__).with_suffix(".jsonl")
BUDGETS = {(4, 64): 3e12, (6, 96): 6e12, (8, 128): 8e12}
"""FLOPs by layers and width."""
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
OTHERS = (
    {"warmup": 0.02},
    {"warmup": 0.1},
    {"weight_decay": 0.0},
    {"weight_decay": 0.3},
    {"beta2": 0.99},
    {"router_learning_rate": 0.3},
    {"router_learning_rate": 3.0},
)
WARMUPS = {
    (8, 128): {0.1: (1e-3, 2e-3), 0.2: (1e-3, 1.4e-3, 2e-3, 4e-3)},
    (6, 96): {0.2: (1.4e-3, 2e-3, 2.8e-3, 4e-3)},
    (4, 64): {0.2: (2.8e-3, 4e-3), 0.4: (4e-3,)},
}
"""Longer warm-ups, around the optimum: in the first grid 5 % of the steps were only a dozen at the largest size."""
CENTRE = 4e-3
SEEDS = (0,)


def cells() -> list[dict]:
    found = []
    for layers, width in BUDGETS:
        for rate in RATES[:4] if width == 128 else RATES:  # past the optimum there is nothing to see
            for kind in ("dense", "routed"):
                found.append({"kind": kind, "layers": layers, "width": width, "learning_rate": rate, "seed": 0})
    for (layers, width), warmups in WARMUPS.items():
        for warmup, rates in warmups.items():
            for rate in rates:
                for kind in ("dense", "routed"):
                    shape = {"layers": layers, "width": width, "learning_rate": rate, "seed": 0, "warmup": warmup}
                    found.append({"kind": kind, **shape})
    first = {"layers": 4, "width": 64, "learning_rate": CENTRE}
    for seed in SEEDS:
        for other in ({}, *OTHERS):
            for kind in ("dense", "routed"):
                is_done = seed == 0 and not other
                if not is_done and not (kind == "dense" and "router_learning_rate" in other):
                    found.append({"kind": kind, **first, "seed": seed, **other})
    return found


def run(cell: dict) -> dict:
    import mixdepth

    settings = {name: value for name, value in cell.items() if name != "kind"}
    if cell["kind"] == "dense":
        settings["depth"] = None
    with tempfile.TemporaryDirectory() as folder:
        # heads and rates as the defaults were then
        usual = {"heads": cell["width"] // 32, "routed_learning_rate": 1.0, "router_learning_rate": 1.0, "warmup": 0.05}
        settings = {**usual, "flops": BUDGETS[cell["layers"], cell["width"]], **settings}
        done = mixdepth.train(folder, eval_windows=512, save_every=10**9, **settings)
        return {**cell, "steps": done.about["steps"], "parameters": done.about["parameters"], **done.result}


def table() -> None:
    results = recorded(RESULTS)
    header("layers x width", "kind", "steps", *(f"{rate:g}" for rate in RATES))
    for layers, width in BUDGETS:
        for kind in ("dense", "routed"):
            wanted = {"kind": kind, "layers": layers, "width": width, "seed": 0}
            found = {rate: _find(results, {**wanted, "learning_rate": rate}) for rate in RATES}
            steps = next((result["steps"] for result in found.values() if result), "")
            losses = [f"{result['validation_loss']:.4f}" if result else "" for result in found.values()]
            row(f"{layers} x {width}", kind, steps, *losses)
    print()
    rates = sorted({rate for warmups in WARMUPS.values() for tried in warmups.values() for rate in tried})
    header("layers x width", "warmup", "kind", *(f"{rate:g}" for rate in rates))
    for (layers, width), warmups in WARMUPS.items():
        for warmup in warmups:
            for kind in ("dense", "routed"):
                wanted = {"kind": kind, "layers": layers, "width": width, "seed": 0, "warmup": warmup}
                found = [_find(results, {**wanted, "learning_rate": rate}) for rate in rates]
                losses = [f"{result['validation_loss']:.4f}" if result else "" for result in found]
                row(f"{layers} x {width}", warmup, kind, *losses)
    print()
    header("4 x 64, other settings", "dense", "routed")
    for other in ({}, *OTHERS):
        wanted = {"layers": 4, "width": 64, "learning_rate": CENTRE, **other}
        texts = []
        for kind in ("dense", "routed"):
            found = [_find(results, {**wanted, "kind": kind, "seed": seed}) for seed in SEEDS]
            texts.append(", ".join(f"{result['validation_loss']:.4f}" for result in found if result))
        row(" ".join(f"{name} {value}" for name, value in other.items()) or "warmup 0.05", *texts)


def _find(results: list[dict], cell: dict) -> dict | None:
    """The result of this cell, and not of one with a further setting."""
    names = {name for other in OTHERS for name in other}
    for result in results:
        if {name: result.get(name) for name in {*cell, *names}} == {name: cell.get(name) for name in {*cell, *names}}:
            return result
    return None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the results so far")
    parser.add_argument("--shard", default="0/1", help="I/N: run every N-th cell, from the I-th")
    options = parser.parse_args()
    if options.table:
        print(describe())
        table()
    else:
        shard, num_shards = map(int, options.shard.split("/"))
        for index, cell in enumerate(cells()):
            if index % num_shards == shard and not _find(recorded(RESULTS), cell):
                record(RESULTS, run(cell))
