"""Routed model classes: a causal language model of transformers whose layers are routed.

Each is made on demand from the dense class, as mixin + original, with a config class and a model
type of its own, `mixdepth_<type>`, so that a routed folder never loads as a dense model.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    GenerationMixin,
    PreTrainedModel,
    initialization,
)
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.utils import logging

from mixdepth.config import LOOKS_AHEAD, DepthConfig
from mixdepth.experts import ExpertLoad, ExpertRouter, balance_loss
from mixdepth.hf.architectures import RUN_ALL_LAYERS, check_settings, decoder_layers, expert_block
from mixdepth.hf.cache import unsupported_cache
from mixdepth.hf.layer import DepthContext, RoutedExperts, RoutedLayer
from mixdepth.hf.names import PREFIX, ROUTER_NAME
from mixdepth.hf.placing import route_layers
from mixdepth.losses import RoutingLoss, routing_losses
from mixdepth.modes import active
from mixdepth.router import Chooser, Router
from mixdepth.routes import Route

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
    capacity_loss: Tensor | None = None
    """What holds `scheme="token_choice"` at its capacity."""
    routing_loss: Tensor | None = None
    """The sum of the routing losses, each with its coefficient."""
    routes: tuple[Route, ...] | None = None
    """The `Route` of each layer that has a router, with `output_routes=True`."""
    loads: tuple[ExpertLoad | None, ...] | None = None
    """The `ExpertLoad` of each layer whose experts are ours (`experts=...`), with `output_routes=True`; None
    where no token came that far."""


OUTPUT_NAMES = tuple(field.name for field in fields(RoutedCausalLMOutput))


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
        if depth_config.causal is None and depth_config.scheme in LOOKS_AHEAD:
            raise ValueError(
                f"causal=None has no meaning for a language model with scheme={depth_config.scheme!r}: set it to "
                "'predictor', 'aux_loss' or 'threshold'"
            )
        super().__init__(config, *args, **kwargs)
        check_settings(self, depth_config)
        route_layers(self, depth_config)

    def routed_forward(
        self, *args: Any, output_routes: bool = False, routing: str | None = None, **kwargs: Any
    ) -> RoutedCausalLMOutput | tuple[Any, ...]:
        """The model's forward pass: in training routers see the whole row, in evaluation they are causal.

        `generate()` asks for `routing="causal"` by name, in either mode.
        """
        kwargs.update(zip(self.argument_names, args, strict=False))
        lookahead = routing != "causal" and (self.training or self._is_forced_to_look_ahead())
        wants_logits = self._check(kwargs, lookahead, routing)
        if lookahead:
            kwargs["use_cache"] = False
        return_dict = kwargs.pop("return_dict", None)
        return_dict = self.config.return_dict if return_dict is None else return_dict
        context = DepthContext(lookahead, output_routes or wants_logits)
        if self.depth_config.scheme == "random":
            context.positions = _positions(kwargs)
        dense = super().forward(**kwargs, return_dict=True, depth=context)
        routes = tuple(context.routes[index] for index in sorted(context.routes))
        loads = tuple(context.loads.get(index) for index in self.layers_with_experts)
        context.routes.clear()  # a graph that waits for its backward pass holds on to the context
        context.loads.clear()
        out = RoutedCausalLMOutput(**{name: dense.get(name) for name in OUTPUT_NAMES})
        if output_routes:
            out.routes, out.loads = routes, loads or None
        # a copy, since the Trainer scales the loss in place
        out.lm_loss, out.balance_loss = None if out.loss is None else out.loss.clone(), out.aux_loss
        if out.loss is not None and out.aux_loss is not None:  # transformers has added the experts' loss
            out.lm_loss = out.loss - _balance_coef(self.config) * out.aux_loss
        if wants_logits and out.router_logits is None:
            out.router_logits = tuple(taken.logits for taken in loads if taken) or tuple(r.logits for r in routes)
        if lookahead:
            self._add_routing_losses(out, self._routing_losses(routes, loads), kwargs)
        return out if return_dict else out.to_tuple()

    def _routing_losses(self, routes: tuple[Route, ...], loads: tuple[ExpertLoad | None, ...]) -> list[RoutingLoss]:
        losses = []
        if routes:
            capacities = [router.capacity for router in self.depth_routers]
            losses = routing_losses(routes, capacities, self.depth_config)
        if self.depth_config.experts == "token_choice":
            value = balance_loss([load for load in loads if load is not None])
            losses.append(RoutingLoss("balance_loss", self.depth_config.expert_balance_coef, value))
        return losses

    def _check(self, kwargs: dict[str, Any], lookahead: bool, routing: str | None) -> bool:
        """Refuse what a routed model cannot give; whether router logits are asked for."""
        if lookahead and kwargs.get("past_key_values") is not None:
            raise ValueError("top-k routing takes whole sequences and no past_key_values: call eval() first")
        attentions, logits = kwargs.get("output_attentions"), kwargs.get("output_router_logits")
        if not lookahead and (self.config.output_attentions if attentions is None else attentions):
            raise _needs_every_layer("output_attentions", routing)
        past = kwargs.get("past_key_values")
        if not lookahead and (past is None or past.get_seq_length() == 0):  # once for each text
            for module in self._choosers():
                module.check_ready()
        if self.depth_config.experts is not None:  # reported by our own routers of experts
            kwargs["output_router_logits"] = False
            return bool(self.config.output_router_logits if logits is None else logits)
        if not hasattr(self.config, "output_router_logits"):  # no experts: the logits are the routers'
            return bool(logits)
        if not lookahead and logits:
            raise _needs_every_layer("output_router_logits", routing)
        logits = lookahead and (self.config.output_router_logits if logits is None else logits)
        if logits and kwargs.get("attention_mask") is not None:
            raise ValueError(
                "transformers' balance loss takes no attention_mask where layers are routed: leave out "
                "output_router_logits, or route with experts='token_choice', which has its own"
            )
        kwargs["output_router_logits"] = logits
        return bool(logits)

    def _is_forced_to_look_ahead(self) -> bool:
        forced = {module.forced_lookahead > 0 for module in self._choosers()}
        if len(forced) > 1:
            raise ValueError("mixdepth.lookahead was given a part of the model: give it the whole")
        return True in forced

    def _add_routing_losses(self, out: RoutedCausalLMOutput, losses: list[RoutingLoss], kwargs: dict[str, Any]) -> None:
        if not losses:
            return
        if torch.is_grad_enabled() and self._checkpoints_reentrantly():  # which loses all but a layer's output
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

    def _checkpoints_reentrantly(self) -> bool:
        layers: list[Any] = [layer for layer in decoder_layers(self) if getattr(layer, "gradient_checkpointing", False)]
        return any(layer._gradient_checkpointing_func.keywords.get("use_reentrant", True) for layer in layers)

    @property
    def depth_routers(self) -> list[Router]:
        """The routers, in the order of their layers."""
        layers = [layer for layer in decoder_layers(self) if isinstance(layer, RoutedLayer)]
        return [active(layer.depth_router) for layer in layers if layer.depth_router is not None]

    @property
    def depth_expert_routers(self) -> list[ExpertRouter]:
        """The routers of experts (`experts=...`), in the order of their layers."""
        blocks = [expert_block(layer) for layer in decoder_layers(self)]
        return [active(block.depth_router) for block in blocks if isinstance(block, RoutedExperts)]

    def _choosers(self) -> list[Chooser]:
        """All routers; unlike `choosers` it walks through layers only, which every step of decoding can afford."""
        return [*self.depth_routers, *self.depth_expert_routers]

    @property
    def deciding_layers(self) -> list[int]:
        """The layers that have a router."""
        return list(self.depth_config.routed_layers(len(decoder_layers(self))))

    @property
    def layers_with_experts(self) -> list[int]:
        """The layers whose experts are routed (`experts=...`)."""
        return [i for i, layer in enumerate(decoder_layers(self)) if isinstance(expert_block(layer), RoutedExperts)]

    @classmethod
    def is_custom_code(cls) -> bool:
        """Say that the class is transformers' own.

        In the classes of others `init_weights()` passes over modules that hold modules only, and some architectures
        scale weights there.
        """
        return False

    @torch.no_grad()
    @initialization.guard_torch_init_functions()  # type: ignore[untyped-decorator]
    def initialize_weights(self) -> None:
        """Initialise routers by their own rule, and then the rest by the architecture's.

        transformers asks the base model for what lies within it, and that does not know routers.
        """
        for module in self.modules():
            if isinstance(module, Chooser):
                self._initialize_weights(module)
                for part in module.modules():
                    part._is_hf_initialized = True  # type: ignore[assignment]
            elif _is_loaded(module):  # some architectures would write into it all the same, such as Youtu
                module._is_hf_initialized = True
        super().initialize_weights()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (Router, ExpertRouter)):
            module.reset_parameters()
        else:
            super()._init_weights(module)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        name = str(pretrained_model_name_or_path)
        try:
            model, info = super().from_pretrained(
                pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
            )
        except SafetensorError as error:
            raise ValueError(f"a weights file in {name!r} is damaged ({error}): copy it again") from error
        for problem in ("missing", "unexpected", "mismatched"):
            keys = sorted(key for key in map(str, info[f"{problem}_keys"]) if f".{ROUTER_NAME}." in key)
            if problem == "missing" and not any(module.estimates for module in model._choosers()):
                for key in [key for key in keys if key.endswith(".threshold")]:  # before there were any, all were 0
                    model.get_buffer(key).zero_()
                    keys.remove(key)
                    info["missing_keys"].remove(key)
            if problem == "mismatched":  # no-op experts are rows of the gate
                keys += sorted(key for key in map(str, info["mismatched_keys"]) if ".gate.weight" in key)
            if keys:
                raise ValueError(
                    f"{len(keys)} routing weights in {name!r} are {problem}, such as {keys[0]}: its config.json "
                    "and its weights do not belong together; save the model again with save_pretrained"
                )
        for router in model.depth_routers:
            if router.step is not None:  # loading in half precision makes it float32, like the rest of a router
                router.step = router.step.long()
        return (model, info) if output_loading_info else model

    @functools.wraps(GenerationMixin.generate)
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        # The steps route causally: see `routed_inputs`.
        config = self.config.get_text_config(decoder=True)
        num_layers = config.num_hidden_layers
        try:
            return super().generate(*args, **kwargs)
        finally:  # assistant_early_exit changes the number, and leaves it so where it is interrupted
            config.num_hidden_layers = num_layers

    def routed_inputs(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Inputs of a step of `generate()`, which routes causally in training mode too."""
        return {**super().prepare_inputs_for_generation(*args, **kwargs), "routing": "causal"}

    def _prepare_cache_for_generation(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise unsupported_cache(generation_config.cache_implementation)
        model_type = self.config.model_type.removeprefix(PREFIX)
        if generation_config.assistant_early_exit is not None and model_type in RUN_ALL_LAYERS:
            raise ValueError(
                f"assistant_early_exit={generation_config.assistant_early_exit} cannot be used with {model_type!r}, "
                "which runs all of its layers whatever it is told: give an assistant_model, or leave it out"
            )
        return super()._prepare_cache_for_generation(generation_config, *args, **kwargs)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        raise unsupported_cache("continuous batching")


def _is_loaded(module: nn.Module) -> bool:
    """Whether the module has tensors of its own, and all of them were loaded."""
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return bool(tensors) and all(getattr(tensor, "_is_hf_initialized", False) for tensor in tensors)


def _positions(kwargs: dict[str, Any]) -> Tensor | None:
    """(B or 1, T): the positions of the tokens, by the user's word, the attention mask or the cache."""
    if kwargs.get("position_ids") is not None:
        positions: Tensor = kwargs["position_ids"]
        return positions
    tokens = kwargs["input_ids"] if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
    num_tokens, mask, past = tokens.shape[1], kwargs.get("attention_mask"), kwargs.get("past_key_values")
    if mask is not None and mask.ndim == 2:
        return (mask.long().cumsum(1) - 1).clamp(min=0)[:, -num_tokens:]
    seen = 0 if past is None else past.get_seq_length()
    if mask is not None and seen == 0:
        return None  # the router counts real tokens itself
    return torch.arange(seen, seen + num_tokens, device=tokens.device)[None]


def _needs_every_layer(name: str, routing: str | None) -> ValueError:
    if routing == "causal":
        return ValueError(
            f"{name} needs every layer to run, and generate() skips layers: leave it out, and call "
            f"model(tokens, {name}=True) on the finished text within mixdepth.lookahead(model)"
        )
    return ValueError(f"{name} needs every layer to run: evaluate within mixdepth.lookahead(model)")


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


def unwrapped(model: Any) -> Any:
    """The model itself, out of torch.compile's wrapper or peft's."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model
