"""Fresh models of given settings, and the shape of a model that has a given cost."""

import bisect
import functools
import math
import re
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from mixdepth.config import DepthConfig
from mixdepth.hf.install import route
from mixdepth.models.flops import count_flops
from mixdepth.models.shape import model_config
from mixdepth.runs.settings import TrainConfig


def with_shape(config: TrainConfig, vocab_size: int) -> TrainConfig:
    """Return the settings with layers and width in place of `shape`."""
    if config.shape is None:
        return config
    layers, width = find_shape(
        config.shape,
        config.depth,
        vocab_size=vocab_size,
        context=config.context,
        num_experts=config.num_experts,
        experts_per_token=config.experts_per_token,
    )
    return replace(config, layers=layers, width=width, shape=None)


def make_model(config: TrainConfig, vocab_size: int) -> Any:
    """Make a fresh model. A dense and a routed model of one seed have the same weights, apart from the routers."""
    torch.manual_seed(config.seed)
    shape = model_config(
        layers=config.layers,
        width=config.width,
        vocab_size=vocab_size,
        num_experts=config.num_experts,
        experts_per_token=config.experts_per_token,
        context=config.context,
        heads=config.heads,
    )
    model = AutoModelForCausalLM.from_config(shape)
    if config.depth is None:
        return model
    return route(model, config.depth)


UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}
WIDTHS = range(32, 16384, 16)
"""The widths that are looked at."""
FARTHEST = 0.5
"""How far the nearest shape may be from the target, as a logarithm."""


def find_shape(target: str, depth: DepthConfig | None = None, *, context: int = 256, **shape: int) -> tuple[int, int]:
    """Find layers and width of the model that is nearest to a target.

    `target` is `params=1.5M` (parameters) or `flops=2M` (of a forward pass, for each token of a window of `context`);
    `shape` has the other arguments of `model_config`.

    >>> find_shape("params=1M")
    (6, 96)
    """
    # 1. Read the target.
    kind, _, amount = target.partition("=")
    match = re.fullmatch(r"(\d+\.?\d*(?:e\d+)?)([KMGB]?)", amount)
    if kind not in ("params", "flops") or match is None:
        raise ValueError(f"shape must be as in 'params=1.5M' or 'flops=2M', not {target!r}")
    goal = float(match[1]) * UNITS[match[2]]

    @functools.cache
    def distance(width: int, layers: int) -> float:
        """Return how far a shape is from the goal, as a logarithm. It is negative for a shape that costs less."""
        if not goal:
            return math.inf
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(
                model_config(layers=layers, width=width, context=context, **shape)
            )
            if depth is not None:
                model = route(model, depth)
            cost = model.num_parameters() if kind == "params" else count_flops(model, context).total / context
        return math.log(cost / goal)

    # 2. Find the nearest width among shapes of the usual proportions, then try more and fewer layers around it.
    nearest = bisect.bisect(WIDTHS, 0.0, key=lambda width: distance(width, _usual_layers(width)))
    candidates = []
    for width in WIDTHS[max(0, nearest - 2) : nearest + 2]:
        for more in (-2, 0, 2):
            layers = _usual_layers(width) + more
            if layers >= 2:
                candidates.append((width, layers))
    width, layers = min(candidates, key=lambda candidate: abs(distance(*candidate)))
    if abs(distance(width, layers)) > FARTHEST:
        raise ValueError(f"no shape is near {target!r}: the nearest has {layers} layers of width {width}")
    return layers, width


def _usual_layers(width: int) -> int:
    """Return an even number of layers that grows with the width.

    >>> [_usual_layers(width) for width in (64, 128, 192, 768, 2048)]
    [4, 8, 12, 18, 32]
    """
    return max(2, 2 * round(min(width / 16, 10 + width / 96) / 2))
