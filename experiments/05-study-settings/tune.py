"""The settings of the isoFLOP study, tuned with the same effort for dense and routed models.

Each cell is a `mixdepth.train` on the source of the standard library, torch and transformers; the loss is that on the
validation text, with causal routing. Dense models have 2 layers of width 64, routed ones 4 at 12.5 % in every second:
about the same FLOPs for each token.

    python tune.py            # resumes; results in tune.jsonl
    python tune.py --shard 0/2 & python tune.py --shard 1/2
    python tune.py --table

The README of experiments/ says which PYTHONPATH a script needs.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean

from machine import describe, header, record, recorded, row

RESULTS = Path(__file__).with_suffix(".jsonl")
COMMON = {"corpus": "python", "validation": 0.02, "test": 0.02, "width": 64, "save_every": 10**9, "log_every": 100}
COMMON |= {"routed_learning_rate": 1.0, "router_learning_rate": 1.0}
DEFAULTS = {"flops": 3e12, "batch_size": 4, "learning_rate": 8e-3, "warmup": 0.1, "seed": 0, "eval_windows": 2048}
LONG = {"flops": 1e13, "compile": True}
FINE = {"warmup": 0.3, "eval_windows": 4096}
SLOWER = {"routed_learning_rate": 0.35, "router_learning_rate": 0.35}
DENSE = {"depth": None}
RULE = 5.7e-3
HEADS = {64: 2, 80: 5}
"""Heads by width, as they were when the first of these runs were made. Experiment 06 shows what that did."""
NARROW = {**LONG, **FINE, "heads": 4}
HALF_RATE = {"routed_learning_rate": 0.5, "router_learning_rate": 0.5}
THRESHOLD = {**NARROW, **SLOWER, "depth": {"causal": "threshold"}}
BY_RULE = {**NARROW, "learning_rate": None, "routed_learning_rate": None, "router_learning_rate": None}
MEMORY = {**BY_RULE, "beta2": 0.99}
EIGHTH, QUARTER = ({"causal": "threshold", "capacity": capacity} for capacity in (0.125, 0.25))
CELLS = [
    # learning rate and batch at 1e13
    *(
        {**LONG, **kind, "learning_rate": rate, "batch_size": batch, "eval_windows": 4096}
        for batch, rates in ((8, (4e-3,)), (4, (2e-3, 4e-3, 8e-3)))
        for rate in rates
        for kind in (DENSE, {})
    ),
    *({**LONG, **kind} for kind in ({**DENSE, "seed": 1}, {"depth": {"gate": "tanh"}})),
    # gates and controls at 3e12
    *(DENSE, {}, *({"depth": {"gate": gate}} for gate in ("one", "unit", "tanh"))),
    *({"depth": {"scheme": "random"}}, {"depth": {"capacity": 0.5}}, {**DENSE, "layers": 4}),
    *({"router_learning_rate": 0.1}, {"max_grad_norm": 0.3}, {**DENSE, "learning_rate": 1.6e-2}),
    # a longer warm-up
    *({**kind, "warmup": 0.3} for kind in (DENSE, {}, {"seed": 1}, {"depth": {"gate": "tanh"}})),
    *({**DENSE, "warmup": 0.3, "learning_rate": 1.6e-2, "seed": seed} for seed in (0, 1, 2)),
    *({"warmup": 0.3, "learning_rate": 1.6e-2, **other} for other in ({}, {"depth": {"gate": "one"}})),
    *({**kind, "warmup": 0.3, "learning_rate": 1.6e-2, "beta2": 0.99} for kind in (DENSE, {})),
    {"warmup": 0.3, "learning_rate": 1.6e-2, "max_grad_norm": 0},
    # routed layers and routers at a lower rate than the rest, at 1e13
    *({**LONG, **FINE, "routed_learning_rate": rate, "router_learning_rate": rate} for rate in (0.35, 0.2)),
    *({**LONG, **FINE, **SLOWER, "depth": {"causal": "threshold", **gate}} for gate in ({}, {"gate": "tanh"})),
    {**LONG, **FINE, **SLOWER, "depth": {"causal": "threshold"}, "width": 80, "learning_rate": 6.4e-3},
    {**LONG, **FINE, **SLOWER, "depth": {"scheme": "token_choice"}},
    # the block itself, with the score's gradient, against Eq. 1; at the rate that the rule gives 4 x 64
    *(
        {"warmup": 0.3, "learning_rate": RULE, "depth": {"gate": gate}, "seed": seed}
        for seed in (0, 1)
        for gate in ("straight", "raw")
    ),
    # which layers: routed ones between dense ones, so that all later tokens can read what the chosen ones have become
    *(
        {**LONG, **FINE, "width": 80, "layers": layers, "learning_rate": rate, "depth": {"layers": routed, **other}}
        for layers, rate, routed, other in (
            (3, 5.2e-3, [1], {}),
            (3, 5.2e-3, [1], {"capacity": 0.5}),
        )
    ),
    # with heads of 16: the study's own settings, and routed layers at a lower rate with a threshold
    {**NARROW, **DENSE},
    THRESHOLD,
    {**THRESHOLD, "layers": 3, "depth": {"causal": "threshold", "layers": [1]}},
    {**NARROW, "learning_rate": RULE},
    {**THRESHOLD, "depth": {"scheme": "random"}},
    # wider, at the rate of a dense model as wide; other rates of the routed layers; other capacities, each at its root
    {**THRESHOLD, "width": 80, "heads": 5, "learning_rate": 6.4e-3},
    {**THRESHOLD, "routed_learning_rate": 0.7, "router_learning_rate": 0.7},
    {**THRESHOLD, "routed_learning_rate": 0.2, "router_learning_rate": 0.2},
    {**THRESHOLD, "routed_learning_rate": 0.35, "router_learning_rate": 1.0},
    {**THRESHOLD, **HALF_RATE, "depth": {"causal": "threshold", "capacity": 0.25}},
    {**NARROW, **SLOWER, "depth": {"causal": "predictor"}},
    *(
        {**THRESHOLD, "routed_learning_rate": rate, "router_learning_rate": rate}
        | {"depth": {"causal": "threshold", "capacity": capacity}}
        for capacity, rate in ((0.03125, 0.18), (0.0625, 0.25))
    ),
    # how far seeds differ, on seeds that the study does not have
    *({**kind, "seed": seed} for seed in (10, 11) for kind in (THRESHOLD, {**NARROW, **DENSE})),
    # gates that are open from the start, what the router reads, and where the routed layers lie
    *(
        {**THRESHOLD, **other, "depth": {"causal": "threshold", **depth}, "seed": seed}
        for seed in (0, 10, 11)
        for depth, other in (
            ({"gate": "sigmoid"}, {}),
            ({"gate": "unit"}, {}),
            ({"router_input": "normed"}, {}),
            ({"gate": "sigmoid", "router_input": "normed"}, {}),
            ({"gate": "sigmoid", "layers": [1, 2]}, {}),
            ({"gate": "sigmoid", "layers": [0, 2]}, {}),
            ({"gate": "sigmoid", "capacity": 0.25}, HALF_RATE),
        )
    ),
    # a quarter of the tokens, and half
    *(
        {**THRESHOLD, **HALF_RATE, "depth": {"causal": "threshold", "capacity": 0.25, **depth}, "seed": seed}
        for seed in (0, 10, 11)
        for depth in (
            {},
            {"router_input": "normed"},
            {"gate": "sigmoid", "router_input": "normed"},
            {"gate": "sigmoid", "layers": [1, 2]},
            {"gate": "sigmoid", "layers": [1, 2], "router_input": "normed"},
        )
    ),
    *(
        {**THRESHOLD, "routed_learning_rate": 0.7, "router_learning_rate": 0.7, "seed": seed}
        | {"depth": {"causal": "threshold", "capacity": 0.5, "gate": "sigmoid", "router_input": "normed"}}
        for seed in (0, 10, 11)
    ),
    *({**NARROW, **DENSE, "width": 80, "heads": 5, "learning_rate": 6.4e-3, "seed": seed} for seed in (0, 10, 11)),
    # scores that a loss draws to either side of 0, so that the causal rule need not guess
    *(
        {**THRESHOLD, **HALF_RATE, "seed": seed}
        | {"depth": {"causal": "aux_loss", "capacity": 0.25, "gate": "sigmoid", **depth}}
        for seed in (0, 10, 11)
        for depth in ({}, {"router_input": "normed"}, {"router_input": "normed", "router_aux_loss_coef": 0.001})
    ),
    # the rate once more, for both, around the best
    *({**kind, "learning_rate": rate} for rate in (1.13e-2, 5.7e-3) for kind in ({**NARROW, **DENSE}, THRESHOLD)),
    # a longer memory of the gradients' squares; rates are those of the rule from here on
    *(
        {**MEMORY, **kind, "seed": seed}
        for seed in (0, 10, 11)
        for kind in (DENSE, {"depth": QUARTER}, {"depth": EIGHTH})
    ),
    *({**BY_RULE, "beta2": 0.999, **kind} for kind in (DENSE, {"depth": QUARTER})),
    {**MEMORY, **DENSE, "width": 80, "heads": 5},
    {**BY_RULE, **DENSE, "max_grad_norm": 0.0},
    *({**MEMORY, **DENSE, **other} for other in ({"learning_rate": 1.13e-2}, {"batch_size": 2})),
    {**MEMORY, "depth": QUARTER, "batch_size": 2},
    {**MEMORY, "depth": {"scheme": "random", "capacity": 0.25}},
    # other depths and places: more layers, a capacity of its own for each, or one that falls
    {**BY_RULE, **DENSE, "layers": 3},
    *({**BY_RULE, "depth": QUARTER, "layers": 6, "width": 48, "heads": 3, "seed": seed} for seed in (0, 10)),
    {**BY_RULE, "depth": {**QUARTER, "layers": [1, 2, 4, 5]}, "layers": 6},
    *({**BY_RULE, "depth": QUARTER, "capacity_steps": 0.2, "seed": seed} for seed in (0, 10)),
    *({**MEMORY, "depth": {**QUARTER, "capacity": [0.5, 0.125]}, "seed": seed} for seed in (0, 10, 11)),
    *(
        {**MEMORY, "layers": layers, "depth": {**QUARTER, "capacity": capacities, "layers": routed}}
        for layers, routed, capacities in (
            (4, [1, 3], [0.125, 0.5]),
            (4, [1, 2], [0.5, 0.125]),
            (4, [2, 3], [0.5, 0.125]),
            (5, [2, 3, 4], [0.5, 0.25, 0.125]),
            (3, [1], [0.5]),
        )
    ),
    # where the ladders of 3e13 should lie
    *(
        {**MEMORY, "flops": 3e13, "layers": layers, "width": width, "heads": width // 16, "depth": depth}
        for layers, width, depth in ((2, 96, None), (3, 80, None), (6, 64, QUARTER), (6, 80, QUARTER))
    ),
]


def run(cell: dict) -> dict:
    import mixdepth

    is_dense = "depth" in cell and cell["depth"] is None
    depth = None if is_dense else mixdepth.DepthConfig(**cell.get("depth", {}))
    settings = {"layers": 2 if is_dense else 4, **COMMON, **DEFAULTS, **cell, "depth": depth}
    settings.setdefault("heads", HEADS[settings["width"]])
    with tempfile.TemporaryDirectory() as folder:
        done = mixdepth.train(folder, **settings)
        return {"cell": cell, "steps": done.about["steps"], "parameters": done.about["parameters"], **done.result}


def find(cell: dict) -> dict | None:
    return next(
        (result for result in recorded(RESULTS) if {**DEFAULTS, **result["cell"]} == {**DEFAULTS, **cell}), None
    )


def table() -> None:
    """One line for each cell but for the seed: the mean loss of its seeds, and each."""
    header("model", "FLOPs", "batch", "rate", "warmup", "other", "steps", "loss", "by seed", "look-ahead")
    found: dict[str, dict[int, dict]] = {}
    for cell in CELLS:
        result = find(cell)
        if result is not None:
            settings = {**DEFAULTS, **cell}
            seed = settings.pop("seed")
            found.setdefault(json.dumps(settings), {})[seed] = result
    for words, results in found.items():
        cell = json.loads(words)
        depth = cell.get("depth", {})
        model = "dense" if depth is None else " ".join(["routed", *(f"{k} {v}" for k, v in depth.items())])
        names = ("layers", "width", "heads", "router_learning_rate", "routed_learning_rate", "max_grad_norm", "beta2")
        others = [name for name in (*names, "capacity_steps") if cell.get(name) is not None]
        other = " ".join(f"{name} {cell[name]}" for name in others)
        shown = [cell["batch_size"], cell["learning_rate"] or "by rule", cell["warmup"]]
        losses = {seed: result["validation_loss"] for seed, result in results.items()}
        by_seed = ", ".join(f"{seed}: {loss:.4f}" for seed, loss in losses.items())
        ahead = "" if depth is None else f"{mean(r['validation_lookahead_loss'] for r in results.values()):.4f}"
        steps = next(iter(results.values()))["steps"]
        row(model, f"{cell['flops']:.0e}", *shown, other, steps, f"{mean(losses.values()):.4f}", by_seed, ahead)


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
        for index, cell in enumerate(CELLS):
            if index % num_shards == shard and find(cell) is None:
                record(RESULTS, run(cell))
