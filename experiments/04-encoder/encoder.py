"""The encoder on a real series: routed, soft and dense, on the Earth's rotation.

The daily series of the Earth's orientation (IERS 20 C04, as the package astropy-iers-data carries it): the pole's two
coordinates and the length of day. From 60 days an encoder of width 64 with a linear head tells how far the
length of day will be in 10 days from where it is now. Training is 1984 to 2013, validation 2014 to 2017,
test 2018 to 2026; no window reaches over an edge, and the only statistics are the training years'.

Every variant trains for 1000 steps of 64 windows with AdamW, at the learning rate that does best for it on the
validation years with a seed of its own; the test error is then told for five other seeds. Runs are
appended to encoder.jsonl; one that is there already is not repeated.

    python encoder.py
    python encoder.py --table > encoder.md

The README of experiments/ says which PYTHONPATH a script needs.
"""

import argparse
import math
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from astropy_iers_data import IERS_B_FILE
from machine import describe, header, record, recorded, row
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from mixdepth import MixtureOfDepths, Routed
from mixdepth.bench import Spread, interleave
from mixdepth.encoder import CausalBlock

RESULTS = Path(__file__).with_suffix(".jsonl")
WINDOW, HORIZON, WIDTH, NUM_HEADS = 60, 10, 64, 4
STEPS, BATCH_SIZE, WARMUP_STEPS = 1000, 64, 50
LEARNING_RATES = (1e-3, 2e-3, 4e-3)
TUNING_SEED, SEEDS = 100, range(5)


class Windows(NamedTuple):
    days: Tensor  # (N, 60, 3): relative to the window's mean, in standard deviations of the training years
    change: Tensor  # (N,): of the length of day, 10 days after the window's last, in microseconds


def read_windows() -> dict[str, Windows]:
    year, *series = np.loadtxt(IERS_B_FILE, usecols=(0, 5, 6, 12), unpack=True)
    years, earth = torch.tensor(year), torch.tensor(np.stack(series, axis=1))  # (T,), (T, 3)
    windows = {}
    for name, first, last in (("training", 1984, 2013), ("validation", 2014, 2017), ("test", 2018, 2026)):
        part = earth[(first <= years) & (years <= last)]
        days = part.unfold(0, WINDOW, 1).mT[:-HORIZON]  # (N, 60, 3)
        change = part[WINDOW - 1 + HORIZON :, 2] - part[WINDOW - 1 : -HORIZON, 2]
        windows[name] = Windows(days - days.mean(1, keepdim=True), 1e6 * change)
    scale = windows["training"].days.std((0, 1))
    return {name: Windows((days / scale).float(), change.float()) for name, (days, change) in windows.items()}


class DenseLayer(CausalBlock):
    """The block of the routed layers, without a route."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x, used=mask)


def dense(num_layers: int) -> MixtureOfDepths:
    layers = [DenseLayer(WIDTH, NUM_HEADS, dropout=0.0) for _ in range(num_layers)]
    return MixtureOfDepths(layers, embed_dim=3, hidden_size=WIDTH, window_size=WINDOW)


build = partial(MixtureOfDepths.build, embed_dim=3, hidden_size=WIDTH, num_heads=NUM_HEADS, dropout=0.0)
VARIANTS = {
    "dense, 4 layers": lambda: dense(4),
    "soft, 4 layers": lambda: build(soft=True),
    "routed, 4 layers, half of the timesteps": lambda: build(capacity_ratio=0.5),
    "dense, 2 layers": lambda: dense(2),
}


class Forecaster(nn.Module):
    """The encoder and a linear head, which starts at no change: that is persistence."""

    def __init__(self, variant: str, scale: float) -> None:
        super().__init__()
        self.encoder = VARIANTS[variant]()
        self.head = nn.Linear(WIDTH, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.scale = scale  # of the changes in the training years

    def forward(self, days: Tensor) -> Tensor:
        return self.scale * self.head(self.encoder(days))[:, 0]


def make_step(model: Forecaster, windows: Windows, learning_rate: float):
    """One step of training; the learning rate falls by a cosine over all of them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)

    def factor(step: int) -> float:
        return min(1, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * min(1, step / STEPS)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def step() -> None:
        chosen = torch.randint(len(windows.change), (BATCH_SIZE,))
        loss = (model(windows.days[chosen]) - windows.change[chosen]).abs().mean() / model.scale
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()

    return step


@torch.no_grad()
def evaluate(model: Forecaster, windows: Windows) -> tuple[float, list[float]]:
    """The mean absolute error, and how many layers (0, 1, ...) choose the last day, in shares of the windows."""
    forecast = model.eval()(windows.days)
    chosen = [layer.route.mask[:, -1] for layer in model.encoder.layers if isinstance(layer, Routed)]
    shares = sum(chosen).bincount(minlength=len(chosen) + 1) / len(forecast) if chosen else torch.zeros(0)
    return (forecast - windows.change).abs().mean().item(), shares.tolist()


def train(variant: str, learning_rate: float, seed: int) -> dict[str, object]:
    windows = read_windows()
    torch.manual_seed(seed)
    model = Forecaster(variant, windows["training"].change.std().item())
    step = make_step(model, windows["training"], learning_rate)
    for _ in tqdm(range(STEPS), desc=f"{variant}, {learning_rate}, seed {seed}"):
        step()
    validation, _ = evaluate(model, windows["validation"])
    test, last_day = evaluate(model, windows["test"])
    settings = {"variant": variant, "learning_rate": learning_rate, "seed": seed}
    return {**settings, "validation": validation, "test": test, "last_day": last_day}


def linear_regression(windows: dict[str, Windows]) -> float:
    """The test error of ridge regression on all numbers of a window."""

    def inputs(part: Windows) -> Tensor:
        return nn.functional.pad(part.days.flatten(1), (0, 1), value=1.0).double()

    x = inputs(windows["training"])
    weight = torch.linalg.solve(x.T @ x + torch.eye(x.shape[1]), x.T @ windows["training"].change.double())
    return (inputs(windows["test"]) @ weight - windows["test"].change).abs().mean().item()


def best_learning_rate(variant: str) -> float:
    tuning = [run for run in recorded(RESULTS) if run["variant"] == variant and run["seed"] == TUNING_SEED]
    return min(tuning, key=lambda run: run["validation"])["learning_rate"]


def train_if_missing(variant: str, learning_rate: float, seed: int) -> None:
    settings = {"variant": variant, "learning_rate": learning_rate, "seed": seed}
    if not any(settings.items() <= run.items() for run in recorded(RESULTS)):
        record(RESULTS, train(**settings))


def forward_flops(variant: str) -> int:
    """Of linear maps and of attention, every pair of timesteps counted, as in mixdepth/models/flops.py."""
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):  # the counter does not know the CPU's fused kernel
        VARIANTS[variant]().train()(torch.randn(1, WINDOW, 3))
    return counter.get_total_flops()


def table() -> None:
    windows = read_windows()
    steps = {name: make_step(Forecaster(name, 1.0), windows["training"], 1e-3) for name in VARIANTS}
    seconds = interleave(steps, repeats=21)
    print(f"{describe()}\n")
    columns = (
        "encoder",
        "test error, us",
        "over seeds",
        "FLOPs of a window",
        "training step, ms",
        "learning rate",
        "seeds",
    )
    header(*columns)
    for variant in VARIANTS:
        runs = [run for run in recorded(RESULTS) if run["variant"] == variant and run["seed"] in SEEDS]
        errors = [run["test"] for run in runs]
        milliseconds = [1e3 * s for s in seconds[variant]]
        row(
            variant,
            f"{sum(errors) / len(errors):.1f}",
            f"{min(errors):.1f} - {max(errors):.1f}",
            f"{forward_flops(variant) / 1e6:.1f} M",
            f"{Spread.of(milliseconds):.0f}",
            best_learning_rate(variant),
            len(runs),
        )
    row("linear regression", f"{linear_regression(windows):.1f}", "", "", "", "", "")
    row("no change", f"{windows['test'].change.abs().mean():.1f}", "", "", "", "", "")
    routed = [
        run["last_day"] for run in recorded(RESULTS) if run["variant"].startswith("routed") and run["seed"] in SEEDS
    ]
    shares = torch.tensor(routed).mean(0)
    print("\nIn the routed encoder the last day, which is read, is processed by")
    print(", ".join(f"{count} layers in {share:.0%}" for count, share in enumerate(shares)), "of the test windows.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the results so far")
    if parser.parse_args().table:
        table()
    else:
        for rate in LEARNING_RATES:
            for variant in VARIANTS:
                train_if_missing(variant, rate, TUNING_SEED)
        for seed in SEEDS:
            for variant in VARIANTS:
                train_if_missing(variant, best_learning_rate(variant), seed)
