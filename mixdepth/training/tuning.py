"""`tune`: a pretrained model is trained further, and a converted one comes down to its capacity."""

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
    """Tune a pretrained model in the folder `out`, or resume the run that was stopped there.

    A model that `convert` has made comes down to the capacity that it was converted for, or to `capacity`. A plain
    model stays dense. Settings are those of `train`, and `settings.TUNE_DEFAULTS` are their defaults.
    """
    name = str(model)
    if "depth" in settings:
        raise ValueError("a model brings its routing along: convert it with other settings, or give a capacity")

    # 1. The routing, and the capacity to come down to.
    depth = routing_of(name)
    if capacity is not None:
        if depth is None:
            raise ValueError(f"capacity={capacity} has no meaning for {name!r}, which is not routed: convert it first")
        depth = replace(depth, capacity=capacity)
    elif depth is not None and depth.capacity == 1:
        raise ValueError(
            f"{name!r} is routed at capacity 1, and no {CONVERSION} says where it is to come down to: give a capacity"
        )

    # 2. The defaults of tuning. The capacity of a dense model cannot fall.
    defaults = dict(TUNE_DEFAULTS)
    if depth is None:
        del defaults["capacity_steps"]

    # 3. A folder's name is to mean the same everywhere.
    if not smollm2.is_meant(name) and Path(name).exists():
        name = absolute(name)
    return train(out, TrainConfig.from_dict({**defaults, **settings, "model": name, "depth": depth}))


def routing_of(name: str) -> DepthConfig | None:
    """Return the routing that a model has, or that it was converted to come down to; None for a plain model."""
    conversion = Conversion.read(name)
    if conversion is not None:
        return conversion.depth
    if smollm2.is_meant(name):
        smollm2.gguf_file()  # says what to install if it is not there
        return None
    with loading(name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    if not config.model_type.startswith(PREFIX):
        return None
    return DepthConfig.from_dict(config.depth)
