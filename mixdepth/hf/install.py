"""Turns a language model of transformers into a routed one, and back."""

import copy
from dataclasses import replace
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mixdepth import schemes
from mixdepth.config import DepthConfig
from mixdepth.hf.architectures import check_settings, check_supported, decoder_layers
from mixdepth.hf.classes import routed_classes
from mixdepth.hf.model import RoutedCausalLM, unwrapped
from mixdepth.hf.names import PREFIX, SUPPORTED
from mixdepth.hf.placing import keep_settings, route_layers, unroute_layers
from mixdepth.router import Chooser, Router


def route(model: PreTrainedModel, config: DepthConfig | None = None, **settings: Any) -> RoutedCausalLM:
    """Route a causal language model, in place: `route(model, capacity=0.125, every=2)`.

    Settings are the fields of `DepthConfig`, or one such value. The model keeps its weights and
    their names; each routed layer gets a new router.
    """
    # 1. Read the settings.
    if config is None:
        config = DepthConfig.from_flat(**settings)
    elif not isinstance(config, DepthConfig):
        raise ValueError(f"the settings must be a DepthConfig or given by name (capacity=...), not {config!r}")
    elif settings:
        raise ValueError(f"give a DepthConfig or settings, not both: {', '.join(settings)}")
    if config.causal is None:
        config = replace(config, causal=schemes.default_causal_rule(config.scheme))
    # 2. Refuse a model that cannot be routed, or not so.
    if isinstance(model, RoutedCausalLM):
        raise ValueError("the model is routed already: change its capacity with mixdepth.set_capacity")
    check_supported(model)
    check_settings(model, config)
    # 3. Make it a model of a routed class.
    config_class, model_class = routed_classes(model.config.model_type)
    _become(model, config_class, model_class)
    model.depth_original_loss_type = model.loss_type
    model.loss_type = "ForCausalLM"  # transformers took it from the old class's name
    # 4. Route its layers. Routers belong on the device of their layer.
    route_layers(model, config)
    for layer in decoder_layers(model):
        device = next(layer.parameters()).device
        for module in layer.modules():
            if isinstance(module, Chooser):
                module.to(device)
    return model


def unroute(model: RoutedCausalLM) -> PreTrainedModel:
    """Give the plain model back, in place: its weights stay as they are, and the routers go."""
    if not isinstance(model, RoutedCausalLM):
        raise ValueError(f"{type(model).__name__} is not routed: there is nothing to take out")
    plain: Any = model
    config_class = CONFIG_MAPPING[model.config.model_type.removeprefix(PREFIX)]
    unroute_layers(plain)
    if hasattr(plain, "depth_original_loss_type"):
        plain.loss_type = plain.depth_original_loss_type
        del plain.depth_original_loss_type
    _become(plain, config_class, MODEL_FOR_CAUSAL_LM_MAPPING[config_class])
    del plain.config.depth
    return plain


def _become(model: PreTrainedModel, config_class: Any, model_class: Any) -> None:
    """Change the classes of the model and of its config.

    The user may build other models with the same config object, so every module gets a copy of it.
    """
    old = model.config
    new = copy.deepcopy(old)
    new.__class__ = config_class
    new.architectures = [model_class.__name__]
    for module in model.modules():
        for name, value in vars(module).items():
            if value is old:
                setattr(module, name, new)
    model.__class__ = model_class


def set_capacity(model: RoutedCausalLM, capacity: float | list[float] | tuple[float, ...]) -> None:
    """Change the capacity of a routed model: one for all routed layers, or one for each.

    Training chooses by the new capacity at once. In evaluation the causal rule follows when it has learned, or after
    `mixdepth.calibrate`.
    """
    model = unwrapped(model)
    if not isinstance(model, RoutedCausalLM):
        raise ValueError(f"{type(model).__name__} is not routed: call mixdepth.route first")
    if not model.depth_routers:
        raise ValueError("no layer of the model is routed, its experts alone: set expert_capacity when routing it")
    if isinstance(capacity, list):
        capacity = tuple(capacity)
    config = replace(model.depth_config, capacity=capacity)
    layers: Any = decoder_layers(model)
    for index, value in config.routed_layers(len(layers)).items():
        for router in layers[index].depth_router.modules():  # peft's copies too
            if isinstance(router, Router):
                router.capacity = value
    keep_settings(model, config)


def supported_architectures() -> tuple[str, ...]:
    """Return the model types that can be routed. The tests check the laws for each of them."""
    return SUPPORTED
