"""The routed model: a causal language model of transformers whose layers are routed.

`mixdepth.hf.classes` makes a class of this mixin and a dense class, with a model type of its own, `mixdepth_<type>`.
A routed folder therefore never loads as a dense model.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import GenerationMixin, initialization
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.utils import logging

from mixdepth import schemes
from mixdepth.config import DepthConfig
from mixdepth.experts import ExpertLoad, ExpertRouter, balance_loss
from mixdepth.hf.architectures import RUN_ALL_LAYERS, check_settings, decoder_layers, expert_block
from mixdepth.hf.cache import unsupported_cache
from mixdepth.hf.layer import DepthContext, RoutedExperts, RoutedLayer
from mixdepth.hf.names import PREFIX, ROUTER_NAME
from mixdepth.hf.placing import route_layers
from mixdepth.hf.private import PrivateHooks, checkpoints_reentrantly, initialize, is_loaded, mark_initialized
from mixdepth.losses import RoutingLoss, routing_losses
from mixdepth.modes import active
from mixdepth.router import Chooser, Router
from mixdepth.routes import Route

logger = logging.get_logger(__name__)


@dataclass
class RoutedCausalLMOutput(MoeCausalLMOutputWithPast):
    """The output of a causal language model, with what routing adds to it.

    `loss` is the language-model loss; in training the weighted routing losses are added to it.
    `router_logits`, with `output_router_logits=True`, are those of the experts, or without experts the routers'.
    """

    lm_loss: Tensor | None = None
    """The language-model loss alone."""
    balance_loss: Tensor | None = None
    """The balance loss of the experts, which transformers calls `aux_loss`."""
    predictor_loss: Tensor | None = None
    """The predictors' loss under `causal="predictor"`. Under `causal="aux_loss"` see `aux_loss`."""
    capacity_loss: Tensor | None = None
    """The loss that holds `scheme="token_choice"` at its capacity."""
    routing_loss: Tensor | None = None
    """The sum of the routing losses, each with its coefficient."""
    routes: tuple[Route, ...] | None = None
    """The `Route` of each layer that has a router, with `output_routes=True`."""
    loads: tuple[ExpertLoad | None, ...] | None = None
    """The `ExpertLoad` of each layer with routed experts (`experts=...`), with `output_routes=True`.

    It is None for a layer that no token reached.
    """


OUTPUT_NAMES = tuple(field.name for field in fields(RoutedCausalLMOutput))


class RoutedCausalLM(PrivateHooks):
    """Mixin before a causal language model class of transformers."""

    argument_names: tuple[str, ...]
    """The arguments of the model's forward, in order, for callers by position."""
    depth_config: DepthConfig
    """The routing settings, which config.json holds as `depth`."""

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        if config.depth is None:
            raise ValueError("config.json says nothing of routing: its entry 'depth' is missing")
        depth_config = DepthConfig.from_dict(config.depth)
        if depth_config.causal is None and schemes.looks_ahead(depth_config.scheme):
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
        # 1. Decide whether routers may look ahead, and refuse what the model then cannot give.
        kwargs.update(zip(self.argument_names, args, strict=False))
        lookahead = routing != "causal" and (self.training or self._is_forced_to_look_ahead())
        self._check_arguments(kwargs, lookahead, routing)
        # 2. Prepare the arguments of the dense model's own forward pass.
        wants_logits = self._wants_router_logits(kwargs, lookahead)
        if self._has_experts_of_transformers():
            kwargs["output_router_logits"] = wants_logits
        elif self.depth_config.experts is not None:  # our own routers of experts report theirs
            kwargs["output_router_logits"] = False
        if lookahead:
            kwargs["use_cache"] = False
        return_dict = kwargs.pop("return_dict", None)
        if return_dict is None:
            return_dict = self.config.return_dict
        context = DepthContext(lookahead, output_routes or wants_logits)
        if schemes.needs_positions(self.depth_config.scheme):
            context.positions = _positions(kwargs)
        # 3. Run it. The context takes along what routed layers report.
        dense = super().forward(**kwargs, return_dict=True, depth=context)
        routes = tuple(context.routes[index] for index in sorted(context.routes))
        loads = tuple(context.loads.get(index) for index in self.layers_with_experts)
        context.routes.clear()  # a graph that waits for its backward pass holds on to the context
        context.loads.clear()
        # 4. Fill the output.
        out = RoutedCausalLMOutput(**{name: dense.get(name) for name in OUTPUT_NAMES})
        out.balance_loss = out.aux_loss
        if out.loss is not None:
            out.lm_loss = self._lm_loss(out.loss, out.aux_loss)
        if output_routes:
            out.routes = routes
            out.loads = loads or None
        if wants_logits and out.router_logits is None:
            of_experts = tuple(load.logits for load in loads if load is not None)
            out.router_logits = of_experts or tuple(route.logits for route in routes)
        if lookahead:
            losses = self._routing_losses(routes, loads)
            self._add_routing_losses(out, losses, kwargs)
        return out if return_dict else out.to_tuple()

    def _lm_loss(self, loss: Tensor, experts_loss: Tensor | None) -> Tensor:
        """The language-model loss alone: transformers has added the loss of its experts."""
        if experts_loss is None:
            return loss.clone()  # a copy, because the Trainer scales the loss in place
        return loss - _balance_coef(self.config) * experts_loss

    def _routing_losses(self, routes: tuple[Route, ...], loads: tuple[ExpertLoad | None, ...]) -> list[RoutingLoss]:
        """The losses of the layers' routers and of the routers of experts, without their coefficients."""
        losses = []
        if routes:
            capacities = [router.capacity for router in self.depth_routers]
            losses = routing_losses(routes, capacities, self.depth_config)
        experts = self.depth_config.experts
        if experts is not None and not schemes.experts_choose(experts.scheme):
            reported = [load for load in loads if load is not None]
            losses.append(RoutingLoss("balance_loss", experts.balance_coef, balance_loss(reported)))
        return losses

    def _check_arguments(self, kwargs: dict[str, Any], lookahead: bool, routing: str | None) -> None:
        """Refuse what a routed model cannot give, and routers that cannot decide yet."""
        past = kwargs.get("past_key_values")
        logits = kwargs.get("output_router_logits")
        if lookahead:
            if past is not None:
                raise ValueError("top-k routing takes whole sequences and no past_key_values: call eval() first")
            wants_logits = self._wants_router_logits(kwargs, lookahead)
            if self._has_experts_of_transformers() and wants_logits and kwargs.get("attention_mask") is not None:
                raise ValueError(
                    "transformers' balance loss takes no attention_mask where layers are routed: leave out "
                    "output_router_logits, or route with experts='token_choice', which has its own"
                )
            return
        attentions = kwargs.get("output_attentions")
        if attentions is None:
            attentions = self.config.output_attentions
        if attentions:
            raise _needs_every_layer("output_attentions", routing)
        if past is None or past.get_seq_length() == 0:  # once for each text
            for module in self._choosers():
                module.check_ready()
        if self._has_experts_of_transformers() and logits:
            raise _needs_every_layer("output_router_logits", routing)

    def _wants_router_logits(self, kwargs: dict[str, Any], lookahead: bool) -> bool:
        """Whether the output is to have router logits: the experts', or without experts the routers'."""
        logits = kwargs.get("output_router_logits")
        if logits is None:
            logits = getattr(self.config, "output_router_logits", False)
        if self._has_experts_of_transformers():  # a layer that is skipped has none
            return lookahead and bool(logits)
        return bool(logits)

    def _has_experts_of_transformers(self) -> bool:
        """Whether the model has experts that transformers routes, and not we (`experts=...`)."""
        return self.depth_config.experts is None and hasattr(self.config, "output_router_logits")

    def _is_forced_to_look_ahead(self) -> bool:
        forced = {module.forced_lookahead > 0 for module in self._choosers()}
        if len(forced) > 1:
            raise ValueError("mixdepth.lookahead was given a part of the model: give it the whole")
        return True in forced

    def _add_routing_losses(self, out: RoutedCausalLMOutput, losses: list[RoutingLoss], kwargs: dict[str, Any]) -> None:
        """Report the routing losses, and in training add them to the loss."""
        if not losses:
            return
        if torch.is_grad_enabled() and any(checkpoints_reentrantly(layer) for layer in decoder_layers(self)):
            raise ValueError("routing losses need gradient_checkpointing_kwargs={'use_reentrant': False}")
        for loss in losses:
            out[loss.name] = loss.value
        out.routing_loss = torch.stack([loss.coef * loss.value for loss in losses]).sum()
        if self.training and out.loss is None:
            logger.warning_once("Without labels out.loss is None: add out.routing_loss to the loss that you compute.")
        elif self.training:
            # The Trainer adds up micro-batches, each normalised by the label tokens of them all.
            # A routing loss is a mean, so it counts for its micro-batch's share of those tokens.
            num_items = kwargs.get("num_items_in_batch")
            share: Any = 1.0
            if num_items is not None:
                share = (kwargs["labels"][..., 1:] != -100).sum() / num_items
            out.loss = out.loss + share * out.routing_loss

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
        """All routers. Unlike `modes.choosers` it walks through layers only, which a decoding step can afford."""
        return [*self.depth_routers, *self.depth_expert_routers]

    @property
    def deciding_layers(self) -> list[int]:
        """The layers that have a router."""
        return list(self.depth_config.routed_layers(len(decoder_layers(self))))

    @property
    def layers_with_experts(self) -> list[int]:
        """The layers whose experts are routed (`experts=...`)."""
        blocks = [expert_block(layer) for layer in decoder_layers(self)]
        return [index for index, block in enumerate(blocks) if isinstance(block, RoutedExperts)]

    @classmethod
    def is_custom_code(cls) -> bool:
        """Say that the class is one of transformers.

        In other classes `init_weights()` leaves out modules that hold modules only, and some architectures scale
        weights there.
        """
        return False

    @torch.no_grad()
    @initialization.guard_torch_init_functions()  # type: ignore[untyped-decorator]
    def initialize_weights(self) -> None:
        """Initialise routers by their own rule, and then the rest by the architecture's rule.

        transformers asks the base model to initialise what is inside it, and the base model does not know routers.
        """
        for module in self.modules():
            if isinstance(module, Chooser):
                initialize(self, module)
                for part in module.modules():
                    mark_initialized(part)
            elif is_loaded(module):  # some architectures, such as Youtu, would write into it nevertheless
                mark_initialized(module)
        super().initialize_weights()

    def initialize_chooser(self, module: nn.Module) -> bool:
        if isinstance(module, (Router, ExpertRouter)):
            module.reset_parameters()
            return True
        return False

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
        model._fill_in_thresholds(info)
        _check_loaded(info, name)
        for router in model.depth_routers:
            if router.step is not None:  # loading in half precision makes it float32, like the rest of a router
                router.step = router.step.long()
        return (model, info) if output_loading_info else model

    def _fill_in_thresholds(self, info: dict[str, Any]) -> None:
        """Set the thresholds that a file of an early version lacks to 0, where they always stay at 0."""
        if any(module.estimates for module in self._choosers()):
            return
        missing = [key for key in _routing_keys(info["missing_keys"]) if key.endswith(".threshold")]
        for key in missing:
            self.get_buffer(key).zero_()
            info["missing_keys"].remove(key)

    @functools.wraps(GenerationMixin.generate)
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        # The steps route causally: see `routed_inputs`.
        config = self.config.get_text_config(decoder=True)
        num_layers = config.num_hidden_layers
        try:
            return super().generate(*args, **kwargs)
        finally:  # assistant_early_exit changes the number, and does not restore it when it is interrupted
            config.num_hidden_layers = num_layers

    def routed_inputs(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Inputs of a step of `generate()`, which routes causally in training mode too."""
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(*args, **kwargs)
        inputs["routing"] = "causal"
        return inputs

    def check_generation(self, generation_config: Any) -> None:
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise unsupported_cache(generation_config.cache_implementation)
        model_type = self.config.model_type.removeprefix(PREFIX)
        if generation_config.assistant_early_exit is not None and model_type in RUN_ALL_LAYERS:
            raise ValueError(
                f"assistant_early_exit={generation_config.assistant_early_exit} cannot be used with {model_type!r}, "
                "which runs all of its layers whatever it is told: give an assistant_model, or leave it out"
            )

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        raise unsupported_cache("continuous batching")


def _routing_keys(keys: Iterable[Any]) -> list[str]:
    """The keys of routing weights among those of a checkpoint, in order."""
    return sorted(key for key in map(str, keys) if f".{ROUTER_NAME}." in key)


def _check_loaded(info: dict[str, Any], name: str) -> None:
    """Refuse a checkpoint whose routing weights are not those of its config."""
    for problem in ("missing", "unexpected", "mismatched"):
        keys = _routing_keys(info[f"{problem}_keys"])
        if problem == "mismatched":  # no-op experts are rows of the gate
            keys += sorted(key for key in map(str, info["mismatched_keys"]) if ".gate.weight" in key)
        if keys:
            raise ValueError(
                f"{len(keys)} routing weights in {name!r} are {problem}, such as {keys[0]}: its config.json "
                "and its weights do not belong together; save the model again with save_pretrained"
            )


def _positions(kwargs: dict[str, Any]) -> Tensor | None:
    """(B or 1, T): the positions of the tokens, as the user, the attention mask or the cache gives them."""
    if kwargs.get("position_ids") is not None:
        positions: Tensor = kwargs["position_ids"]
        return positions
    tokens = kwargs.get("inputs_embeds")
    if tokens is None:
        tokens = kwargs["input_ids"]
    num_tokens = tokens.shape[1]
    mask = kwargs.get("attention_mask")
    past = kwargs.get("past_key_values")
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
    name = "router_aux_loss_coef" if hasattr(config, "router_aux_loss_coef") else "aux_loss_coef"
    coef: float = getattr(config, name)
    return coef


def unwrapped(model: Any) -> Any:
    """The model itself, without the wrapper of torch.compile or peft."""
    model = getattr(model, "_orig_mod", model)
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return model
