"""Studies whose results are made up, so that a test knows what a fit must find."""

import json
import math

import numpy as np

from mixdepth import DepthConfig, TrainConfig
from mixdepth.isoflop import Cell, Hypothesis, Study
from mixdepth.isoflop.ladder import ladder

SIZES = {"1x16": 1e5, "2x16": 2e5, "3x16": 4e5, "4x16": 8e5}


def write_study(folder, curves, hypotheses=(), seeds=(0, 1, 2), noise=0.0):
    """A study with results that follow (size of the optimum, loss there, curvature) for each budget and variant."""
    cells, generator = [], np.random.default_rng(1)
    for (budget, variant), (best, loss, curvature) in curves.items():
        for index, (shape, size) in enumerate(SIZES.items()):
            layers, width = map(int, shape.split("x"))
            for seed in seeds:
                name = f"{budget}/{variant}/{shape}/seed{seed}"
                depth = None if variant == "dense" else DepthConfig(every=1)
                shared = {"width": width, "learning_rate": 1e-3, "steps": 10}
                settings = TrainConfig(**shared, layers=layers, seed=seed, depth=depth).to_dict()
                cell = Cell(
                    name=name,
                    budget=budget,
                    variant=variant,
                    seed=seed,
                    rung=ladder(4)[index],
                    settings=settings,
                    parameters=int(size),
                    flops_per_token=2 * size,
                    steps=10,
                    flops=10,
                    epochs=0.1,
                    seconds=1.0,
                )
                cells.append(cell)
                run = folder / "cells" / name
                run.mkdir(parents=True)
                value = loss + curvature * math.log(size / best) ** 2 + 0.01 * seed + noise * generator.normal()
                result = {"validation_loss": value, "validation_lookahead_loss": value * (1 - 1e-3 * (1 + seed / 10))}
                if variant != "dense":
                    result["validation_capacities"] = [0.12 + 0.01 * seed] + [0.25] * (layers - 1)
                (run / "result.json").write_text(json.dumps(result))
                about = {"settings": settings, "corpus_digest": "digest", "versions": {}}
                (run / "run.json").write_text(json.dumps(about))
    study = Study(folder=folder, corpus_digest="digest", plans=[], cells=cells, hypotheses=list(hypotheses))
    study.write()
    return folder


def claim(kind, variant="mod", against="dense", margin=0.003, family="primary", seeds=(0, 1, 2)):
    name = f"{kind} {variant} {against}"
    return Hypothesis(
        name=name,
        claim="words",
        kind=kind,
        budget=1e13,
        variant=variant,
        against=against,
        margin=margin,
        family=family,
        finished_before=0,
        seeds=list(seeds),
    )
