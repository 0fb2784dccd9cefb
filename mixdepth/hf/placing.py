"""Routing put into a model: its decoder layers become routed ones, in place."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from mixdepth.config import DepthConfig
from mixdepth.experts import ExpertRouter
from mixdepth.hf.architectures import decoder_layers, expert_block, stack_name
from mixdepth.hf.layer import HalvesLayer, Mixin, RoutedExperts, RoutedLayer, mixed
from mixdepth.hf.names import KEPT, ROUTER_NAME
from mixdepth.router import Router


def route_layers(model: PreTrainedModel, config: DepthConfig) -> None:
    """Turn the chosen decoder layers of the model into routed ones, in place, with new routers."""
    model.depth_stack = stack_name(model)
    layers = decoder_layers(model)
    width = model.config.get_text_config(decoder=True).hidden_size
    capacities = config.routed_layers(len(layers))
    by_halves = config.target != "block" or config.gate_on != "block"
    last_exit = None
    for index in range(len(layers)):
        layer: Any = layers[index]
        experts = None if config.experts is None else expert_block(layer)
        is_routed = index in capacities or last_exit is not None
        mixins: list[Any] = [RoutedLayer] if is_routed else []
        if experts is not None or (is_routed and by_halves):
            mixins.append(HalvesLayer)
        if not mixins:
            continue
        layer_class: Any = type(layer)
        layer.__class__ = mixed(*mixins, layer_class)
        layer.depth_index = index
        if experts is not None:
            route_experts(experts, config)
        if is_routed:
            layer.depth_target, layer.depth_gate_on, layer.depth_exit = config.target, config.gate_on, last_exit
            layer.depth_router = None
        if index in capacities:
            layer.depth_router = Router(width, config, capacities[index], index).train(layer.training)
            last_exit = index if config.scheme == "early_exit" else None
        model._no_split_modules.add(type(layer).__name__)
    model._keep_in_fp32_modules_strict.add(ROUTER_NAME)
    keep_settings(model, config)


def route_experts(block: Any, config: DepthConfig) -> None:
    """Give a mixture-of-experts block a router of ours; no-op experts are further rows of its gate."""
    block_class: Any = type(block)
    block.__class__ = mixed(RoutedExperts, block_class)
    block.experts._is_expert_parallel = True  # the fused kernels then skip tokens at no expert
    weight = block.gate.weight
    if config.num_noop_experts:
        more = torch.randn(config.num_noop_experts, weight.shape[1], dtype=weight.dtype, device=weight.device)
        more *= 0.02
        block.gate.weight = nn.Parameter(torch.cat([weight.detach(), more]))
    router = ExpertRouter(config, block.experts.num_experts, block.gate.top_k)
    block.depth_router = router.train(block.training)


def unroute_layers(model: PreTrainedModel) -> None:
    """The inverse of `route_layers`: layers are of their own classes again, and routers are gone."""
    for layer in decoder_layers(model):
        experts = expert_block(layer)
        if isinstance(experts, RoutedExperts):
            _forget(experts)
            block: Any = experts
            weight = block.gate.weight
            if len(weight) > block.experts.num_experts:  # no-op experts are rows of it
                block.gate.weight = nn.Parameter(weight.detach()[: block.experts.num_experts], weight.requires_grad)
            block.experts._is_expert_parallel = False
        if isinstance(layer, Mixin):
            model._no_split_modules.discard(type(layer).__name__)
            _forget(layer)
    model._keep_in_fp32_modules_strict.discard(ROUTER_NAME)
    model._keep_in_fp32_modules.discard(KEPT)
    del model.depth_config, model.depth_stack


def _forget(module: Mixin) -> None:
    """Make a module of `mixed` one of its own class, without what routing has put into it."""
    module.__class__ = type(module).made_of[-1]  # type: ignore[assignment]
    for name in [name for name in (*vars(module), *module._modules) if name.startswith("depth_")]:
        delattr(module, name)


def keep_settings(model: PreTrainedModel, config: DepthConfig) -> None:
    model.depth_config = config
    model.config.depth = config.to_dict()
