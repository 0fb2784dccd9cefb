"""Routed model classes: a causal language model of transformers whose layers are routed.

Each is made on demand from the dense class, as mixin + original, with a config class and a model
type of its own, `mixdepth_<type>`, so that a routed folder never loads as a dense model.
"""

import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.configuration_utils import PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from mixdepth.config import DepthConfig
from mixdepth.hf.architectures import SUPPORTED, decoder_layers
from mixdepth.hf.cache import unsupported_cache
from mixdepth.hf.layer import DepthContext, RoutedLayer, routed_layer_class
from mixdepth.losses import RoutingLoss, routing_losses
from mixdepth.router import Router
from mixdepth.routing import Route

PREFIX = "mixdepth_"
ROUTER_NAME = "depth_router"
GUARD = "routed: import mixdepth and load with AutoModelForCausalLM"
"""Stands in config.json for `use_cache`, which every dense config class checks to be true or false: a
dense class that is asked for by name refuses the folder, and quotes this."""
GUARDED, KEPT_AS = "use_cache", "routed_use_cache"

logger = logging.get_logger(__name__)


@dataclass
class RoutedCausalLMOutput(MoeCausalLMOutputWithPast):
    """The model's own output, and what routing adds to it.

    `loss` is the language-model loss; in training the weighted routing losses are added to it.
    `router_logits` with `output_router_logits=True` are the experts', or without experts the routers'.
    """

    lm_loss: Tensor | None = None
    """The language-model loss alone."""
    balance_loss: Tensor | None = None
    """The experts' balance loss, which transformers calls `aux_loss`."""
    predictor_loss: Tensor | None = None
    """The predictors' loss under `causal="predictor"`. Under `causal="aux_loss"` see `aux_loss`."""
    routing_loss: Tensor | None = None
    """The sum of the routing losses, each with its coefficient."""
    routes: tuple[Route, ...] | None = None
    """The `Route` of each routed layer, with `output_routes=True`."""


OUTPUT_NAMES = tuple(field.name for field in fields(RoutedCausalLMOutput))


class RoutedConfig:
    """Mixin before a config class of transformers."""

    model_type: str
    depth: dict[str, Any] | None

    def to_json_string(self, use_diff: bool = True) -> str:
        settings = json.loads(super().to_json_string(use_diff))  # type: ignore[misc]
        settings |= {GUARDED: GUARD, KEPT_AS: getattr(self, GUARDED)}
        return json.dumps(settings, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        settings = dict(config_dict)
        if KEPT_AS in settings:
            settings[GUARDED] = settings.pop(KEPT_AS)
        return super().from_dict(settings, **kwargs)  # type: ignore[misc]

    def __reduce__(self) -> tuple[Any, ...]:
        return _new_object, (self.model_type, 0), self.__dict__


class RoutedCausalLM(PreTrainedModel, GenerationMixin):
    """Mixin before a causal language model class of transformers."""

    argument_names: tuple[str, ...]
    """The arguments of the model's forward, in order, for callers by position."""
    depth_config: DepthConfig
    """The routing settings, which config.json holds as `depth`."""

    _supports_flash_attn = False
    _supports_flex_attn = False
    _can_compile_fullgraph = False  # it would ask generate() for a static cache

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        if config.depth is None:
            raise ValueError("config.json says nothing of routing: its entry 'depth' is missing")
        depth_config = DepthConfig.from_dict(config.depth)
        if depth_config.causal is None:
            raise ValueError("causal=None has no meaning for a language model: set it to 'predictor' or 'aux_loss'")
        super().__init__(config, *args, **kwargs)
        route_layers(self, depth_config)

    def routed_forward(
        self, *args: Any, output_routes: bool = False, routing: str | None = None, **kwargs: Any
    ) -> RoutedCausalLMOutput | tuple[Any, ...]:
        """The model's forward pass: top-k routing in training, causal in evaluation.

        `generate()` asks for `routing="causal"` by name, in either mode.
        """
        kwargs.update(zip(self.argument_names, args, strict=False))
        lookahead = routing != "causal" and (self.training or self._is_forced_to_look_ahead())
        wants_logits = self._check(kwargs, lookahead)
        if lookahead:
            kwargs["use_cache"] = False
        return_dict = kwargs.pop("return_dict", self.config.return_dict)
        context = DepthContext(lookahead, output_routes or wants_logits)
        dense = super().forward(**kwargs, return_dict=True, depth=context)
        routes = tuple(context.routes[index] for index in sorted(context.routes))
        context.routes.clear()  # a graph that waits for its backward pass holds on to the context
        out = RoutedCausalLMOutput(**{name: dense.get(name) for name in OUTPUT_NAMES})
        out.routes = routes if output_routes else None
        out.lm_loss, out.balance_loss = out.loss, out.aux_loss
        if out.loss is not None and out.aux_loss is not None:  # transformers has added the experts' loss
            out.lm_loss = out.loss - _balance_coef(self.config) * out.aux_loss
        if wants_logits and out.router_logits is None:
            out.router_logits = tuple(route.logits for route in routes)
        if lookahead:
            self._add_routing_losses(out, routing_losses(routes, self.depth_config), kwargs)
        return out if return_dict else out.to_tuple()

    def _check(self, kwargs: dict[str, Any], lookahead: bool) -> bool:
        """Refuse what a routed model cannot give; whether router logits are asked for."""
        if lookahead and kwargs.get("past_key_values") is not None:
            raise ValueError("top-k routing takes whole sequences and no past_key_values: call eval() first")
        attentions, logits = kwargs.get("output_attentions"), kwargs.get("output_router_logits")
        if not lookahead and (self.config.output_attentions if attentions is None else attentions):
            raise ValueError("output_attentions needs every layer to run: evaluate within mixdepth.lookahead(model)")
        if not hasattr(self.config, "output_router_logits"):  # no experts: the logits are the routers'
            return bool(logits)
        if not lookahead and logits:
            raise ValueError("output_router_logits of experts needs every layer to run: use mixdepth.lookahead(model)")
        logits = lookahead and (self.config.output_router_logits if logits is None else logits)
        if logits and kwargs.get("attention_mask") is not None:
            raise ValueError("output_router_logits of experts in routed layers takes no attention_mask yet")
        kwargs["output_router_logits"] = logits
        return bool(logits)

    def _is_forced_to_look_ahead(self) -> bool:
        forced = {router.forced_lookahead > 0 for router in self.depth_routers}
        if len(forced) > 1:
            raise ValueError("mixdepth.lookahead was given a part of the model: give it the whole")
        return True in forced

    def _add_routing_losses(self, out: RoutedCausalLMOutput, losses: list[RoutingLoss], kwargs: dict[str, Any]) -> None:
        learns = any(p.requires_grad for router in self.depth_routers for p in router.parameters())
        if learns and torch.is_grad_enabled() and not all(loss.value.requires_grad for loss in losses):
            raise ValueError("routing losses need gradient_checkpointing_kwargs={'use_reentrant': False}")
        for loss in losses:
            out[loss.name] = loss.value
        out.routing_loss = torch.stack([loss.coef * loss.value for loss in losses]).sum()
        if self.training and out.loss is None:
            logger.warning_once("Without labels out.loss is None: add out.routing_loss to the loss that you compute.")
        elif self.training:
            # The Trainer adds up micro-batches, each normalised by the label tokens of them all. A
            # routing loss is a mean: it counts for its micro-batch's share of those tokens.
            num_items = kwargs.get("num_items_in_batch")
            share: Any = 1.0 if num_items is None else (kwargs["labels"][..., 1:] != -100).sum() / num_items
            out.loss = out.loss + share * out.routing_loss

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
        for problem in ("missing", "unexpected", "mismatched"):
            keys = sorted(key for key in map(str, info[f"{problem}_keys"]) if f".{ROUTER_NAME}." in key)
            if keys:
                raise ValueError(
                    f"{len(keys)} routing weights in {str(name)!r} are {problem}, such as {keys[0]}: its config.json "
                    "and its weights do not belong together; save the model again with save_pretrained"
                )
        return (model, info) if output_loading_info else model

    def routed_inputs(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Inputs of a step of `generate()`, which routes causally in training mode too."""
        return {**super().prepare_inputs_for_generation(*args, **kwargs), "routing": "causal"}

    def _prepare_cache_for_generation(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise unsupported_cache(generation_config.cache_implementation)
        return super()._prepare_cache_for_generation(generation_config, *args, **kwargs)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        raise unsupported_cache("continuous batching")

    def __reduce__(self) -> tuple[Any, ...]:
        return _new_object, (self.config.model_type, 1), self.__dict__


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
def routed_classes(model_type: str) -> tuple[type[Any], type[Any]]:
    """The config and model classes of `mixdepth_<model_type>`, made known to transformers."""
    config_base = CONFIG_MAPPING[model_type]
    model_base = MODEL_FOR_CAUSAL_LM_MAPPING[config_base]
    ours = [name for name in OUTPUT_NAMES if name not in ("loss", "logits")]
    config_class = type(
        f"Mixdepth{config_base.__name__}",
        (RoutedConfig, config_base),
        {
            "__module__": __name__,
            "__annotations__": {"depth": dict[str, Any] | None},
            "model_type": PREFIX + model_type,
            "depth": None,
            "keys_to_ignore_at_inference": [*getattr(config_base, "keys_to_ignore_at_inference", ()), *ours],
        },
    )
    prepare_inputs = model_base.prepare_inputs_for_generation
    model_class = type(
        # transformers picks the loss by the class name, which must say ForCausalLM
        f"Mixdepth{model_base.__name__.replace('LMHeadModel', 'ForCausalLM')}",
        (RoutedCausalLM, model_base),
        {
            "__module__": __name__,
            "config_class": config_class,
            "forward": _like(model_base.forward, RoutedCausalLM.routed_forward, output_routes=False),
            "prepare_inputs_for_generation": _like(prepare_inputs, RoutedCausalLM.routed_inputs),
            "argument_names": tuple(inspect.signature(model_base.forward).parameters)[1:],
            "_keep_in_fp32_modules_strict": {*(model_base._keep_in_fp32_modules_strict or ()), ROUTER_NAME},
        },
    )
    AutoConfig.register(PREFIX + model_type, config_class, exist_ok=True)
    AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)
    # Key names in checkpoints stay those of the dense model, where they differ from its module names.
    for theirs, name in ((model_type, PREFIX + model_type), (model_base.__name__, model_class.__name__)):
        mapping = get_checkpoint_conversion_mapping(theirs)
        if mapping is not None:
            register_checkpoint_conversion_mapping(name, mapping, overwrite=True)
    return config_class, model_class


def _new_object(model_type: str, which: int) -> Any:
    """An empty config (0) or model (1), for copies and pickles: its class is made where it is needed."""
    made: Any = routed_classes(model_type.removeprefix(PREFIX))[which]
    return made.__new__(made)


def _balance_coef(config: Any) -> float:
    """The coefficient by which transformers adds the experts' loss; JetMoe has its own name for it."""
    coef: float = config.router_aux_loss_coef if hasattr(config, "router_aux_loss_coef") else config.aux_loss_coef
    return coef


def _like(original: Callable[..., Any], function: Callable[..., Any], **extra: Any) -> Callable[..., Any]:
    """`function` with the signature of `original`, which transformers inspects, and `extra` keywords."""

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    signature = inspect.signature(original)
    *named, rest = signature.parameters.values()
    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value) for name, value in extra.items()]
    wrapper.__signature__ = signature.replace(parameters=[*named, *more, rest])  # type: ignore[attr-defined]
    return wrapper


class LazyRoutedConfig(PreTrainedConfig):
    """Stands for `mixdepth_<type>` in AutoConfig until a checkpoint asks for the classes."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        config_class, _ = routed_classes(cls.model_type.removeprefix(PREFIX))
        return config_class.from_dict(config_dict, **kwargs)


for _type in SUPPORTED:
    _lazy = type("LazyRoutedConfig", (LazyRoutedConfig,), {"model_type": PREFIX + _type, "__module__": __name__})
    AutoConfig.register(PREFIX + _type, _lazy, exist_ok=True)
