"""Fresh models by their settings, and the shape that has a given cost."""

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
    """The settings with `shape` resolved to layers and width."""
    if config.shape is None:
        return config
    rest = {"num_experts": config.num_experts, "experts_per_token": config.experts_per_token}
    layers, width = find_shape(config.shape, config.depth, vocab_size=vocab_size, context=config.context, **rest)
    return replace(config, layers=layers, width=width, shape=None)


def make_model(config: TrainConfig, vocab_size: int) -> Any:
    """A fresh model; the weights of a dense and a routed model of one seed are the same."""
    torch.manual_seed(config.seed)
    shape = model_config(
        config.layers,
        config.width,
        vocab_size,
        config.num_experts,
        config.experts_per_token,
        config.context,
        config.heads,
    )
    model = AutoModelForCausalLM.from_config(shape)
    return model if config.depth is None else route(model, config.depth)


def find_shape(target: str, depth: DepthConfig | None = None, *, context: int = 256, **shape: int) -> tuple[int, int]:
    """Layers and width of the model nearest to `params=1.5M` (parameters) or `flops=2M` (of a forward pass, for each
    token of a window of `context`); `shape` is the rest of `model_config`.

    >>> find_shape("params=1M")
    (6, 96)
    """
    kind, _, amount = target.partition("=")
    match = re.fullmatch(r"(\d+\.?\d*(?:e\d+)?)([KMGB]?)", amount)
    if kind not in ("params", "flops") or match is None:
        raise ValueError(f"shape must be as in 'params=1.5M' or 'flops=2M', not {target!r}")
    goal = float(match[1]) * {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}[match[2]]

    @functools.cache
    def distance(width: int, layers: int) -> float:
        """How far from the goal, as a logarithm; negative for what costs less."""
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(
                model_config(layers=layers, width=width, context=context, **shape)
            )
            model = model if depth is None else route(model, depth)
            cost = model.num_parameters() if kind == "params" else count_flops(model, context).total / context
        return math.log(cost / goal) if goal else math.inf

    widths = range(32, 16384, 16)
    nearest = bisect.bisect(widths, 0.0, key=lambda width: distance(width, _usual_layers(width)))
    around = widths[max(0, nearest - 2) : nearest + 2]
    tried = [(width, _usual_layers(width) + more) for width in around for more in (-2, 0, 2)]
    width, layers = min(((w, n) for w, n in tried if n >= 2), key=lambda shape: abs(distance(*shape)))
    if abs(distance(width, layers)) > 0.5:
        raise ValueError(f"no shape is near {target!r}: the nearest has {layers} layers of width {width}")
    return layers, width


def _usual_layers(width: int) -> int:
    """An even number that grows with the width: 4 at 64, 8 at 128, 12 at 192, 18 at 768, 32 at 2048."""
    return max(2, 2 * round(min(width / 16, 10 + width / 96) / 2))
