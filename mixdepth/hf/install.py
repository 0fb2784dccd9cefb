"""`route` and `unroute`: a language model becomes a routed one, and back; `set_capacity`."""

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
    if config is None:
        config = DepthConfig.from_flat(**settings)
    elif not isinstance(config, DepthConfig):
        raise ValueError(f"the settings must be a DepthConfig or given by name (capacity=...), not {config!r}")
    elif settings:
        raise ValueError(f"give a DepthConfig or settings, not both: {', '.join(settings)}")
    if config.causal is None:
        config = replace(config, causal=schemes.default_causal_rule(config.scheme))
    if isinstance(model, RoutedCausalLM):
        raise ValueError("the model is routed already: change its capacity with mixdepth.set_capacity")
    check_supported(model)
    check_settings(model, config)
    config_class, model_class = routed_classes(model.config.model_type)

    _become(model, config_class, model_class)
    model.depth_original_loss_type = model.loss_type
    model.loss_type = "ForCausalLM"  # transformers took it from the old class's name
    route_layers(model, config)
    for layer in decoder_layers(model):
        for module in layer.modules():
            if isinstance(module, Chooser):
                module.to(next(layer.parameters()).device)
    return model


def unroute(model: RoutedCausalLM) -> PreTrainedModel:
    """Give the plain model back, in place: its weights as they are, without routers and their gates."""
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
    """Change the model's class and its config's. The user's config object may build other models: every module gets
    a copy of it."""
    old, new = model.config, copy.deepcopy(model.config)
    new.__class__ = config_class
    new.architectures = [model_class.__name__]
    for module in model.modules():
        for name, value in vars(module).items():
            if value is old:
                setattr(module, name, new)
    model.__class__ = model_class


def set_capacity(model: RoutedCausalLM, capacity: float | list[float] | tuple[float, ...]) -> None:
    """Change the capacity of a routed model: one for all routed layers, or one for each.

    It changes what training chooses; in evaluation the causal rule follows as it learns, or by `mixdepth.calibrate`.
    """
    model = unwrapped(model)
    if not isinstance(model, RoutedCausalLM):
        raise ValueError(f"{type(model).__name__} is not routed: call mixdepth.route first")
    if not model.depth_routers:
        raise ValueError("no layer of the model is routed, its experts alone: set expert_capacity when routing it")
    config = replace(model.depth_config, capacity=tuple(capacity) if isinstance(capacity, list) else capacity)
    layers: Any = decoder_layers(model)
    for index, value in config.routed_layers(len(layers)).items():
        for router in layers[index].depth_router.modules():  # peft's copies too
            if isinstance(router, Router):
                router.capacity = value
    keep_settings(model, config)


def supported_architectures() -> tuple[str, ...]:
    """The model types that can be routed: those that the tests hold to the laws."""
    return SUPPORTED
