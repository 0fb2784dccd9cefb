"""Training that starts from a pretrained model: what of it is trained, and whom it learns from."""

import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from mixdepth.config import DepthConfig
from mixdepth.hf import RoutedCausalLM, route, set_capacity, unroute
from mixdepth.hf.architectures import decoder_layers
from mixdepth.hf.routing import ROUTER_NAME
from mixdepth.loading import load
from mixdepth.settings import TrainConfig

EXACT_GATES = ("unit", "one")
"""Gates that are 1 where scores are 0."""


class Start(NamedTuple):
    """Where a run starts."""

    model: Any
    capacity: float = 1.0
    """The capacity that it has now; in training it falls from there."""
    adapter: Any = None
    """peft's model around it, whose weights are to be merged at the end."""
    teacher: Any = None


def start_from(config: TrainConfig) -> Start:
    """The pretrained model that these settings name, with what they train of it set to be trained."""
    assert config.model is not None
    torch.manual_seed(config.seed)
    model = load(config.model).model
    if config.method == "full":
        model.float()  # small steps are lost in half precision
    capacity = 1.0
    if isinstance(model, RoutedCausalLM):
        _check_same_routing(config, model.depth_config)
        if isinstance(model.depth_config.capacity, float):
            capacity = model.depth_config.capacity
    teacher = _teacher(model, capacity, config.model) if config.distill else None
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
    return Start(model, capacity, adapter, teacher)


def check_exact(depth: DepthConfig) -> None:
    """Refuse a routing under which a pretrained model would be broken before it is tuned."""
    if depth.gate not in EXACT_GATES:
        raise ValueError(
            f"gate={depth.gate!r} changes what a pretrained model computes before it is tuned: use gate='unit', which "
            "starts at 1"
        )
    if depth.scheme == "soft":
        raise ValueError("scheme='soft' processes every token and makes nothing cheaper: choose another scheme")
    if depth.experts is not None:
        raise ValueError(
            f"experts={depth.experts!r} changes the experts of a pretrained model before it is tuned: leave it out"
        )


def _check_same_routing(config: TrainConfig, has: DepthConfig) -> None:
    if config.depth is None:
        raise ValueError(f"{config.model!r} is routed: take its routers out with mixdepth convert --dense")
    wanted = replace(config.depth, capacity=has.capacity)
    for name, value in wanted.to_dict().items():
        if has.to_dict()[name] != value:
            raise ValueError(f"{config.model!r} is routed with {name}={has.to_dict()[name]!r}, not {value!r}")


def _teacher(model: Any, capacity: float, name: str) -> Any:
    if capacity < 1:
        raise ValueError(
            f"distill needs the pretrained model itself, and {name!r} has come down to capacity {capacity} already: "
            "start from the converted model"
        )
    teacher = copy.deepcopy(model)
    teacher = unroute(teacher) if isinstance(teacher, RoutedCausalLM) else teacher
    return teacher.requires_grad_(False).eval()


def lora_config(model: Any, rank: int = 16, **settings: Any) -> Any:
    """peft's settings for low-rank adapters in all linear maps of all layers, with the routers trained and saved
    beside them: `peft.get_peft_model(model, mixdepth.lora_config(model))`."""
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ValueError("adapters need the package peft: pip install peft") from error
    layers = decoder_layers(model)
    (prefix,) = (name for name, module in model.named_modules() if module is layers)
    modules = {name: module for layer in layers for name, module in layer.named_modules()}
    linear = [name for name, m in modules.items() if isinstance(m, (nn.Linear, Conv1D)) and ROUTER_NAME not in name]
    names = "|".join(sorted(name.replace(".", r"\.") for name in linear))
    settings = {"r": rank, "lora_alpha": 2 * rank, "task_type": "CAUSAL_LM", **settings}
    if isinstance(model, RoutedCausalLM):
        settings["modules_to_save"] = [*settings.get("modules_to_save", ()), ROUTER_NAME]
    return LoraConfig(target_modules=rf"{prefix}\.\d+\.({names})", **settings)


def adapted(model: Any, rank: int) -> Any:
    """peft's model around this one, which is changed in place: adapters in its layers, copies of its routers."""
    config = lora_config(model, rank)
    from peft import get_peft_model

    learns = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    adapter = get_peft_model(model, config)
    for name, parameter in model.named_parameters():  # what no loss can reach must not wait for a gradient
        original = name.replace("modules_to_save.default.", "")
        if original != name:
            parameter.requires_grad_(learns[original])
    return adapter
