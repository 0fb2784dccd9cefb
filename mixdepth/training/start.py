"""The model that a run starts from: a fresh one, or a pretrained one with the part of it that is trained."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

from mixdepth.config import DepthConfig
from mixdepth.conversion.converting import check_exact
from mixdepth.hf.install import route, set_capacity, unroute
from mixdepth.hf.lora import adapted
from mixdepth.hf.model import RoutedCausalLM
from mixdepth.hf.names import ROUTER_NAME
from mixdepth.models.fresh import make_model
from mixdepth.models.loading import check_whole, load
from mixdepth.runs.settings import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a run starts from."""

    model: Any
    capacity: float = 1.0
    """The capacity that the model has before training; it falls from there."""
    adapter: Any = None
    """The model of peft around it; the adapter's weights are merged at the end."""
    teacher: Any = None
    """The model that is distilled."""
    tokenizer: Any = None
    """The tokenizer of a pretrained model."""


def make_start(config: TrainConfig, tokenizer: Any) -> Start:
    """Make the fresh model of these settings for this tokenizer, or load the pretrained one that they name."""
    if config.model is not None:
        return start_from(config)
    model = make_model(config, len(tokenizer))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.eos_token_id
    return Start(model=model)


def start_from(config: TrainConfig) -> Start:
    """Load the pretrained model that these settings name, and freeze what they do not train."""
    # 1. Load the model.
    assert config.model is not None
    torch.manual_seed(config.seed)
    loaded = load(config.model)
    model = loaded.model
    check_whole(config.model, loaded, config.context)
    if config.method == "full":
        model.float()  # small steps are lost in half precision

    # 2. Keep a copy to learn from, before the capacity changes.
    capacity = 1.0
    if isinstance(model, RoutedCausalLM):
        _check_same_routing(config, model.depth_config)
        capacity = max(router.capacity for router in model.depth_routers)
    teacher = None
    if config.distill:
        teacher = _teacher(model, config.model)

    # 3. Route it as the settings say.
    if isinstance(model, RoutedCausalLM):
        assert config.depth is not None
        set_capacity(model, config.depth.capacity)
    elif config.depth is not None:
        check_exact(config.depth)
        model = route(model, replace(config.depth, init_std=0.0))

    # 4. Freeze what is not trained.
    if config.method != "full":
        for name, parameter in model.named_parameters():
            is_router = f".{ROUTER_NAME}." in name
            parameter.requires_grad_(parameter.requires_grad and is_router)
    adapter = None
    if config.method == "lora":
        adapter = adapted(model, config.lora_rank)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"method={config.method!r} has nothing to train: no loss reaches the routers of {config.model!r}"
        )
    return Start(model=model, capacity=capacity, adapter=adapter, teacher=teacher, tokenizer=loaded.tokenizer)


def _check_same_routing(config: TrainConfig, present: DepthConfig) -> None:
    """Refuse settings of routing, other than the capacity, that are not those of the model."""
    if config.depth is None:
        raise ValueError(f"{config.model!r} is routed: take its routers out with mixdepth convert --dense")
    of_model = present.to_dict()
    wanted = replace(config.depth, capacity=present.capacity).to_dict()
    for name, value in wanted.items():
        if of_model[name] != value:
            raise ValueError(f"{config.model!r} is routed with {name}={of_model[name]!r}, not {value!r}")


def _teacher(model: Any, name: str) -> Any:
    """Copy the model as it was pretrained, without routers. A model at a lower capacity is another model by now."""
    if isinstance(model, RoutedCausalLM):
        lowest = min((router.capacity for router in model.depth_routers), default=1.0)
        if lowest < 1:
            raise ValueError(
                f"distill needs the pretrained model itself, and {name!r} has come down to capacity {lowest} already: "
                "start from the converted model"
            )
    teacher = copy.deepcopy(model)
    if isinstance(teacher, RoutedCausalLM):
        teacher = unroute(teacher)
    return teacher.requires_grad_(False).eval()
