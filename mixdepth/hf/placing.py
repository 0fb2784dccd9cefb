"""Placing puts routing into a model, and takes it out: its decoder layers become routed ones, in place."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from mixdepth import schemes
from mixdepth.config import DepthConfig
from mixdepth.experts import ExpertRouter
from mixdepth.hf import private
from mixdepth.hf.architectures import decoder_layers, expert_block, stack_name
from mixdepth.hf.layer import HalvesLayer, Mixin, RoutedExperts, mixed, routed_mixin
from mixdepth.hf.names import KEPT, ROUTER_NAME
from mixdepth.router import Router

NOOP_STD = 0.02
"""Standard deviation of the initial gate weights of no-op experts."""


def route_layers(model: PreTrainedModel, config: DepthConfig) -> None:
    """Turn the chosen decoder layers of the model into routed ones, in place, with new routers."""
    model.depth_stack = stack_name(model)
    layers = decoder_layers(model)
    width = model.config.get_text_config(decoder=True).hidden_size
    capacities = config.routed_layers(len(layers))
    last_exit = None
    for index in range(len(layers)):
        layer: Any = layers[index]
        # 1. Find what is routed in this layer: its experts, the layer, or both.
        experts = None
        if config.experts is not None:
            experts = expert_block(layer)
        is_routed = index in capacities or last_exit is not None
        if experts is None and not is_routed:
            continue
        # 2. Give the layer a class that routes.
        mixin: Any = HalvesLayer
        if is_routed:
            mixin = routed_mixin(config, has_routed_experts=experts is not None)
        layer_class: Any = type(layer)
        layer.__class__ = mixed(mixin, layer_class)
        layer.depth_index = index
        # 3. Give it its routers. A layer after an exit has none of its own.
        if experts is not None:
            route_experts(experts, config)
        if is_routed:
            layer.depth_exit = last_exit
            layer.depth_router = None
        if index in capacities:
            router = Router(width, config, capacities[index], index)
            layer.depth_router = router.train(layer.training)
            last_exit = index if schemes.ends_the_stack(config.scheme) else None
        private.keep_whole(model, type(layer).__name__)
    private.keep_in_float32(model, ROUTER_NAME)
    keep_settings(model, config)


def route_experts(block: Any, config: DepthConfig) -> None:
    """Give a mixture-of-experts block a router of ours; no-op experts are further rows of its gate."""
    block_class: Any = type(block)
    block.__class__ = mixed(RoutedExperts, block_class)
    private.skip_tokens_at_no_expert(block.experts, True)
    assert config.experts is not None
    if config.experts.num_noop:
        weight = block.gate.weight.detach()  # (E, D)
        shape = (config.experts.num_noop, weight.shape[1])
        more = torch.randn(shape, dtype=weight.dtype, device=weight.device)  # (N, D)
        more *= NOOP_STD
        block.gate.weight = nn.Parameter(torch.cat([weight, more]))
    router = ExpertRouter(config, block.experts.num_experts, block.gate.top_k)
    block.depth_router = router.train(block.training)


def unroute_layers(model: PreTrainedModel) -> None:
    """Undo `route_layers`: layers are of their own classes again, and routers are gone."""
    for layer in decoder_layers(model):
        experts = expert_block(layer)
        if isinstance(experts, RoutedExperts):
            unroute_experts(experts)
        if isinstance(layer, Mixin):
            private.allow_splits(model, type(layer).__name__)
            _restore_class(layer)
    private.keep_no_longer(model, ROUTER_NAME, KEPT)
    del model.depth_config, model.depth_stack


def unroute_experts(block: Any) -> None:
    """Undo `route_experts`: the gate loses the rows of the no-op experts."""
    _restore_class(block)
    num_experts = block.experts.num_experts
    weight = block.gate.weight  # (A, D)
    if len(weight) > num_experts:
        block.gate.weight = nn.Parameter(weight.detach()[:num_experts], weight.requires_grad)
    private.skip_tokens_at_no_expert(block.experts, False)


def _restore_class(module: Mixin) -> None:
    """Make a module of a mixed class one of its own class again, without what routing has put into it."""
    module.__class__ = type(module).made_of[-1]  # type: ignore[assignment]
    attributes = [*vars(module), *module._modules]
    for name in attributes:
        if name.startswith("depth_"):
            delattr(module, name)


def keep_settings(model: PreTrainedModel, config: DepthConfig) -> None:
    """Write the routing settings into the model and into its config, which is saved with it."""
    model.depth_config = config
    model.config.depth = config.to_dict()
