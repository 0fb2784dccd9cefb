"""Routed model classes: a causal language model of transformers whose layers are routed.

Each is made on demand from the dense class, as mixin + original, with a config class and a model
type of its own, `mixdepth_<type>`, so that a routed checkpoint never loads as a dense model.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mixdepth.config import DepthConfig
from mixdepth.hf.architectures import SUPPORTED, decoder_layers
from mixdepth.hf.cache import refuse_cache
from mixdepth.hf.layer import DepthContext, RoutedLayer, routed_layer_class
from mixdepth.losses import routing_losses
from mixdepth.router import Router
from mixdepth.routing import Route

PREFIX = "mixdepth_"
ROUTER_NAME = "depth_router"


@dataclass
class RoutedCausalLMOutput(MoeCausalLMOutputWithPast):
    """The model's own output, and what routing adds to it.

    `loss` is the language-model loss; in training the weighted routing losses are added to it.
    `aux_loss` is the routers' loss under `causal="aux_loss"`, otherwise the experts' balance loss.
    """

    lm_loss: Tensor | None = None
    """The language-model loss alone."""
    predictor_loss: Tensor | None = None
    """The predictors' loss under `causal="predictor"`, before its coefficient."""
    routes: tuple[Route, ...] | None = None
    """The `Route` of each routed layer, with `output_routes=True`."""


class RoutedCausalLM(PreTrainedModel):
    """Mixin before a causal language model class of transformers."""

    argument_names: tuple[str, ...]
    depth_config: DepthConfig
    """The routing settings, which config.json holds as `depth`."""

    _supports_flash_attn = False
    _supports_flex_attn = False
    _can_compile_fullgraph = False  # it would ask generate() for a static cache

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        if config.depth is None:
            raise ValueError("config.json says nothing of routing: its entry 'depth' is missing")
        depth_config = DepthConfig.from_dict(config.depth)
        super().__init__(config, *args, **kwargs)
        route_layers(self, depth_config)

    def routed_forward(
        self, *args: Any, output_routes: bool = False, routing: str | None = None, **kwargs: Any
    ) -> RoutedCausalLMOutput | tuple[Any, ...]:
        """The model's forward pass: top-k routing in training, causal in evaluation.

        `generate()` asks for `routing="causal"` by name, in either mode.
        """
        kwargs.update(zip(self.argument_names, args, strict=False))
        lookahead = routing != "causal" and self.depth_routers[0].looks_ahead
        if lookahead:
            if kwargs.get("past_key_values") is not None:
                raise ValueError("top-k routing takes whole sequences and no past_key_values: call eval() first")
            kwargs["use_cache"] = False
        if kwargs.get("output_router_logits") and kwargs.get("attention_mask") is not None:
            raise ValueError("output_router_logits of experts in routed layers takes no attention_mask")
        return_dict = kwargs.pop("return_dict", self.config.return_dict)
        context = DepthContext(lookahead)
        dense = super().forward(**kwargs, return_dict=True, depth=context)
        routes = tuple(context.routes[index] for index in sorted(context.routes))
        out = RoutedCausalLMOutput(**dense, lm_loss=dense.loss, routes=routes if output_routes else None)
        if out.loss is not None and out.aux_loss is not None:  # transformers has added the experts' loss
            out.lm_loss = out.loss - self.config.router_aux_loss_coef * out.aux_loss
        if lookahead:
            self._add_routing_losses(out, routes, kwargs.get("labels"), kwargs.get("num_items_in_batch"))
        return out if return_dict else out.to_tuple()

    def _add_routing_losses(
        self, out: RoutedCausalLMOutput, routes: tuple[Route, ...], labels: Tensor | None, num_items: Any
    ) -> None:
        # The Trainer adds up micro-batches, each normalised by the label tokens of them all. A routing
        # loss is a mean: it counts for its micro-batch's share of those tokens.
        share: Any = 1.0
        if labels is not None and num_items is not None:
            share = (labels[..., 1:] != -100).sum() / num_items
        for loss in routing_losses(routes, self.depth_config):
            if self.training and torch.is_grad_enabled() and not loss.value.requires_grad:
                trained = any(p.requires_grad for router in self.depth_routers for p in router.parameters())
                if trained:
                    raise ValueError("routing losses need gradient_checkpointing_kwargs={'use_reentrant': False}")
            out[loss.name] = loss.value
            if out.loss is not None and self.training:
                out.loss = out.loss + loss.coef * share * loss.value

    @property
    def depth_routers(self) -> list[Router]:
        """The routers, in the order of their layers."""
        return [layer.depth_router for layer in decoder_layers(self) if isinstance(layer, RoutedLayer)]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Router):
            module.reset_parameters()
        else:
            super()._init_weights(module)

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        try:
            model, info = super().from_pretrained(name, *args, output_loading_info=True, **kwargs)
        except SafetensorError as error:
            raise ValueError(f"a weights file in {str(name)!r} is damaged ({error}): copy it again") from error
        missing = sorted(key for key in info["missing_keys"] if f".{ROUTER_NAME}." in key)
        if missing:
            raise ValueError(f"the checkpoint {str(name)!r} lacks {len(missing)} routing weights, such as {missing[0]}")
        return (model, info) if output_loading_info else model

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**super().prepare_inputs_for_generation(*args, **kwargs), "routing": "causal"}

    def _prepare_cache_for_generation(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        name = generation_config.cache_implementation
        refuse_cache(str(name), supported=name in (None, "dynamic"))
        return super()._prepare_cache_for_generation(generation_config, *args, **kwargs)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        refuse_cache("continuous batching", supported=False)


def route_layers(model: PreTrainedModel, config: DepthConfig) -> None:
    """Turn the chosen decoder layers of the model into routed ones, in place, with new routers."""
    layers = decoder_layers(model)
    width = model.config.get_text_config(decoder=True).hidden_size
    for index, capacity in config.routed_layers(len(layers)).items():
        layer: Any = layers[index]
        layer_class: Any = type(layer)
        layer.__class__ = routed_layer_class(layer_class)
        layer.depth_index = index
        layer.depth_router = Router(width, config, capacity).train(layer.training)
        model._no_split_modules.add(type(layer).__name__)
    model._keep_in_fp32_modules_strict.add(ROUTER_NAME)
    keep_settings(model, config)


def keep_settings(model: PreTrainedModel, config: DepthConfig) -> None:
    model.depth_config = config
    model.config.depth = config.to_dict()


@functools.cache
def routed_classes(model_type: str) -> tuple[type[PreTrainedConfig], type[RoutedCausalLM]]:
    """The config and model classes of `mixdepth_<model_type>`, made known to transformers."""
    config_base = CONFIG_MAPPING[model_type]
    model_base = MODEL_FOR_CAUSAL_LM_MAPPING[config_base]
    ours = ["lm_loss", "predictor_loss", "aux_loss", "router_logits", "routes"]
    config_class = type(
        f"Mixdepth{config_base.__name__}",
        (config_base,),
        {
            "__module__": __name__,
            "__annotations__": {"depth": dict[str, Any] | None},
            "model_type": PREFIX + model_type,
            "depth": None,
            "keys_to_ignore_at_inference": [*getattr(config_base, "keys_to_ignore_at_inference", ()), *ours],
        },
    )
    model_class = type(
        # transformers picks the loss by the class name, which must say ForCausalLM
        f"Mixdepth{model_base.__name__.replace('LMHeadModel', 'ForCausalLM')}",
        (RoutedCausalLM, model_base),
        {
            "__module__": __name__,
            "config_class": config_class,
            "forward": _like(model_base.forward, RoutedCausalLM.routed_forward),
            "argument_names": tuple(inspect.signature(model_base.forward).parameters)[1:],
            "_keep_in_fp32_modules_strict": {*(model_base._keep_in_fp32_modules_strict or ()), ROUTER_NAME},
        },
    )
    globals().update({cls.__name__: cls for cls in (config_class, model_class)})  # so that they pickle
    AutoConfig.register(PREFIX + model_type, config_class, exist_ok=True)
    AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)
    # Key names in checkpoints stay those of the dense model, where they differ from its module names.
    for theirs, name in ((model_type, PREFIX + model_type), (model_base.__name__, model_class.__name__)):
        mapping = get_checkpoint_conversion_mapping(theirs)
        if mapping is not None:
            register_checkpoint_conversion_mapping(name, mapping, overwrite=True)
    return config_class, model_class


def _like(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the signature of `original`, which transformers inspects, plus output_routes."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    signature = inspect.signature(original)
    output_routes = inspect.Parameter("output_routes", inspect.Parameter.KEYWORD_ONLY, default=False)
    *named, rest = signature.parameters.values()
    forward.__signature__ = signature.replace(parameters=[*named, output_routes, rest])  # type: ignore[attr-defined]
    return forward


class LazyRoutedConfig(PreTrainedConfig):
    """Stands for `mixdepth_<type>` in AutoConfig until a checkpoint asks for the classes."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        config_class, _ = routed_classes(cls.model_type.removeprefix(PREFIX))
        return config_class.from_dict(config_dict, **kwargs)


for _type in SUPPORTED:
    _lazy = type("LazyRoutedConfig", (LazyRoutedConfig,), {"model_type": PREFIX + _type, "__module__": __name__})
    AutoConfig.register(PREFIX + _type, _lazy, exist_ok=True)
