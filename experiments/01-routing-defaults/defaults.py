"""How the defaults of DepthConfig were chosen: short trainings over gate x initialisation and more.

Each run trains a routed Llama over bytes (width 64, 4 layers, 0.28 M parameters) for 800 steps of
8 x 256 bytes of the standard library, AdamW with a cosine schedule, and reports the held-out loss
with causal routing and with look-ahead. Results are appended to defaults.jsonl, and runs that are there
are not repeated, so the script can be stopped and started again. `--table` prints means
and spreads over seeds.

    python defaults.py [--table]

The README of experiments/ says which PYTHONPATH a script needs.
"""

import argparse
import itertools
import math
from pathlib import Path

import torch
from machine import header, record, recorded, row
from small import batches, byte_llama, stdlib_bytes, windows_of
from tqdm import tqdm

import mixdepth

RESULTS = Path(__file__).with_suffix(".jsonl")
STEPS, BATCH_SIZE, LENGTH, WIDTH, NUM_LAYERS = 800, 8, 256, 64, 4
LEARNING_RATE = 4e-3
SEEDS = range(3)

VARIANTS: list[dict[str, object]] = [
    *({"gate": gate, "init_std": std} for gate in ("raw", "sigmoid", "tanh", "unit") for std in (0.0, 0.02, 0.2)),
    {"gate": "one", "init_std": 0.02},
    {"gate": "raw", "init_std": 0.02, "first": 0},
    {"gate": "raw", "init_std": 0.02, "predictor_width": 0.0},
    {"gate": "raw", "init_std": 0.02, "predictor_width": 0.5},
    {"gate": "raw", "init_std": 0.02, "causal": "aux_loss"},
    {"gate": "raw", "init_std": 0.02, "causal": "aux_loss", "router_aux_loss_coef": 0.1},
    {"gate": "raw", "init_std": 0.02, "predictor_loss_coef": 0.1},
]


def train(settings: dict[str, object], seed: int) -> dict[str, object]:
    torch.manual_seed(seed)
    training, validation = stdlib_bytes()
    model = mixdepth.route(byte_llama(WIDTH, NUM_LAYERS, LENGTH), **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    windows = batches(training, BATCH_SIZE, LENGTH, seed)
    for step in tqdm(range(STEPS), desc=f"{settings} seed {seed}"):
        for group in optimizer.param_groups:
            warm = min(1.0, (step + 1) / 40)
            group["lr"] = LEARNING_RATE * warm * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        ids = next(windows)
        model(ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    result = mixdepth.evaluate(model, windows_of(validation, LENGTH, 400))
    capacities = [layer.capacity for layer in result.layers.values()]
    losses = {"causal": result.loss, "lookahead": result.lookahead_loss}
    return {"settings": settings, "seed": seed, **losses, "capacity": capacities}


def table() -> None:
    rows = recorded(RESULTS)
    header("settings", "causal loss", "over seeds", "look-ahead", "realised capacity", "seeds")
    for settings in VARIANTS:
        runs = [row for row in rows if row["settings"] == settings]
        if runs:
            causal = torch.tensor([run["causal"] for run in runs])
            ahead = torch.tensor([run["lookahead"] for run in runs])
            capacity = torch.tensor([run["capacity"] for run in runs]).mean(0)
            names = ", ".join(f"{name} {value}" for name, value in settings.items())
            shares = " ".join(f"{share:.1%}" for share in capacity)
            spread = f"{causal.min():.4f} - {causal.max():.4f}"
            row(names, f"{causal.mean():.4f}", spread, f"{ahead.mean():.4f}", shares, len(runs))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the results so far")
    if parser.parse_args().table:
        table()
    else:
        done = recorded(RESULTS)
        for seed, settings in itertools.product(SEEDS, VARIANTS):
            if not any(row["settings"] == settings and row["seed"] == seed for row in done):
                record(RESULTS, train(settings, seed))
