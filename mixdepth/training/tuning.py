"""`tune`: a pretrained model, converted or plain, is trained further; a converted one comes down to its capacity."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from mixdepth.config import DepthConfig
from mixdepth.conversion.converting import CONVERSION, Conversion
from mixdepth.data.sources import absolute
from mixdepth.hf import smollm2
from mixdepth.hf.names import PREFIX
from mixdepth.models.loading import loading
from mixdepth.runs.run import Run
from mixdepth.runs.settings import TUNE_DEFAULTS, TrainConfig
from mixdepth.training.job import train


def tune(
    model: str | Path, out: str | Path, *, capacity: float | tuple[float, ...] | None = None, **settings: Any
) -> Run:
    """Tune a pretrained model in the folder `out`, or go on where an earlier call was stopped.

    A model that `convert` has made comes down to the capacity that it was converted for, or to `capacity`; a plain
    model stays as dense as it is. Settings are those of `train`, with `settings.TUNE_DEFAULTS`.
    """
    name = str(model)
    if "depth" in settings:
        raise ValueError("a model brings its routing along: convert it with other settings, or give a capacity")
    depth = routing_of(name)
    if capacity is not None:
        if depth is None:
            raise ValueError(f"capacity={capacity} has no meaning for {name!r}, which is not routed: convert it first")
        depth = replace(depth, capacity=capacity)
    elif depth is not None and depth.capacity == 1:
        raise ValueError(
            f"{name!r} is routed at capacity 1, and no {CONVERSION} says where it is to come down to: give a capacity"
        )
    usual = {k: v for k, v in TUNE_DEFAULTS.items() if depth is not None or k != "capacity_steps"}
    name = name if smollm2.is_meant(name) or not Path(name).exists() else absolute(name)
    return train(out, TrainConfig.from_dict({**usual, **settings, "model": name, "depth": depth}))


def routing_of(name: str) -> DepthConfig | None:
    """The routing that a model has, or was converted to come down to; None for a plain one."""
    conversion = Conversion.read(name)
    if conversion is not None:
        return conversion.depth
    if smollm2.is_meant(name):
        smollm2.gguf_file()  # or the way to it
        return None
    with loading(name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    return DepthConfig.from_dict(config.depth) if config.model_type.startswith(PREFIX) else None
