"""Training that starts from a pretrained model: what of it is trained, and whom it learns from."""

import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from mixdepth.config import DepthConfig
from mixdepth.conversion.converting import check_exact
from mixdepth.hf.install import route, set_capacity, unroute
from mixdepth.hf.lora import adapted
from mixdepth.hf.model import RoutedCausalLM
from mixdepth.hf.names import ROUTER_NAME
from mixdepth.models.loading import check_whole, load
from mixdepth.runs.settings import TrainConfig


class Start(NamedTuple):
    """Where a run starts."""

    model: Any
    capacity: float = 1.0
    """The capacity that it has now; in training it falls from there."""
    adapter: Any = None
    """peft's model around it, whose weights are to be merged at the end."""
    teacher: Any = None
    tokenizer: Any = None
    """The model's own, where it has one."""


def start_from(config: TrainConfig) -> Start:
    """The pretrained model that these settings name, with what they train of it set to be trained."""
    assert config.model is not None
    torch.manual_seed(config.seed)
    loaded = load(config.model)
    model = loaded.model
    check_whole(config.model, loaded, config.context)
    if config.method == "full":
        model.float()  # small steps are lost in half precision
    capacity = 1.0
    if isinstance(model, RoutedCausalLM):
        _check_same_routing(config, model.depth_config)
        capacity = max(router.capacity for router in model.depth_routers)
    teacher = _teacher(model, config.model) if config.distill else None
    if isinstance(model, RoutedCausalLM):
        assert config.depth is not None
        set_capacity(model, config.depth.capacity)
    elif config.depth is not None:
        check_exact(config.depth)
        model = route(model, replace(config.depth, init_std=0.0))
    if config.method != "full":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and f".{ROUTER_NAME}." in name)
    adapter = adapted(model, config.lora_rank) if config.method == "lora" else None
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"method={config.method!r} has nothing to train: no loss reaches the routers of {config.model!r}"
        )
    return Start(model, capacity, adapter, teacher, loaded.tokenizer)


def _check_same_routing(config: TrainConfig, has: DepthConfig) -> None:
    if config.depth is None:
        raise ValueError(f"{config.model!r} is routed: take its routers out with mixdepth convert --dense")
    wanted = replace(config.depth, capacity=has.capacity)
    for name, value in wanted.to_dict().items():
        if has.to_dict()[name] != value:
            raise ValueError(f"{config.model!r} is routed with {name}={has.to_dict()[name]!r}, not {value!r}")


def _teacher(model: Any, name: str) -> Any:
    lowest = min((router.capacity for router in getattr(model, "depth_routers", ())), default=1.0)
    if lowest < 1:
        raise ValueError(
            f"distill needs the pretrained model itself, and {name!r} has come down to capacity {lowest} already: "
            "start from the converted model"
        )
    teacher = copy.deepcopy(model)
    teacher = unroute(teacher) if isinstance(teacher, RoutedCausalLM) else teacher
    return teacher.requires_grad_(False).eval()
