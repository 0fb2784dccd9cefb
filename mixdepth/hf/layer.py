"""RoutedLayer: what a decoder layer of transformers becomes when it is routed.

Shapes: B batch, T tokens in the stream, R rows with a chosen token, K slots, D width.
"""

import inspect
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mixdepth.config import GateOn, Target
from mixdepth.experts import ExpertLoad, ExpertRouter
from mixdepth.hf.cache import CacheWrite, RoutedCacheLayer, routed_cache_layer
from mixdepth.hf.mask import real_tokens, routed_mask
from mixdepth.modes import active
from mixdepth.router import Router, check_not_recorded
from mixdepth.routes import Route, slots

CACHE_NAMES = ("past_key_values", "layer_past")
TOKENWISE = ("position_ids", "position_embeddings")
"""Arguments of a decoder layer that are indexed by token, beside the stream and the mask."""


class Choice(NamedTuple):
    """Who goes through a layer."""

    chosen: Tensor  # (B, T) bool
    route: Route | None  # of the rows with a chosen token; None if there are none
    counts: list[int] | None  # chosen tokens of each row, on the host; None under look-ahead, which never asks

    @property
    def rows(self) -> list[int]:
        """The rows with a chosen token."""
        return [row for row, count in enumerate(self.counts or ()) if count]


class DepthContext:
    """What one forward pass of the model tells its routed layers, and what they report back.

    It travels as an argument, so that recomputation under activation checkpointing sees the same. And it is no
    dataclass: FSDP rebuilds those that it finds among the arguments, and layers would report to a copy.
    """

    def __init__(self, lookahead: bool, output_routes: bool, positions: Tensor | None = None) -> None:
        self.lookahead = lookahead
        self.output_routes = output_routes
        """Whether routes are asked for; under look-ahead they are always reported, for the routing losses."""
        self.positions = positions
        """(B or 1, T): the tokens' positions, where a scheme asks for them."""
        self.routes: dict[int, Route] = {}
        self.loads: dict[int, ExpertLoad] = {}
        """What the experts of each layer took."""
        self.alive: dict[int, Choice] = {}
        """Under early exit, who went on at each exit: for the layers behind it to look up. One entry for each
        exit, since recomputation runs through the layers backwards."""


class Mixin(nn.Module):
    """Of the classes that `mixed` makes."""

    made_of: tuple[type[nn.Module], ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return _new, type(self).made_of, self.__dict__


class RoutedExperts(Mixin):
    """Mixin before a block with a `gate` and `experts`: an `ExpertRouter` brings tokens and experts together."""

    depth_router: ExpertRouter

    def serve(self, x: Tensor, used: Tensor | None, lookahead: bool | None) -> tuple[Tensor, ExpertLoad]:
        block: Any = self
        # Bound calls, not the modules: hooks that move a module's arguments to its device would move those too.
        gate, experts = block.gate.__call__, block.experts.__call__
        served: tuple[Tensor, ExpertLoad] = active(self.depth_router)(x, gate, experts, used, lookahead)
        return served

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.serve(hidden_states, None, None)[0]


class HalvesLayer(Mixin):
    """Mixin before a decoder layer class that does what Llama's does, so that its halves can run alone."""

    depth_index: int
    argument_names: tuple[str, ...]

    def attend(self, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
        layer: Any = self
        update: Tensor = layer.self_attn(hidden_states=layer.input_layernorm(x), **kwargs)[0]
        return x + update

    def feed_forward(self, x: Tensor, used: Tensor | None, depth: DepthContext | None) -> Tensor:
        """The MLP; experts of ours are told which tokens (B, T) are in `use`, and report their load."""
        layer: Any = self
        h = layer.post_attention_layernorm(x)
        if not isinstance(layer.mlp, RoutedExperts):
            return x + layer.mlp(h)
        update, load = layer.mlp.serve(h, used, None if depth is None else depth.lookahead)
        if depth is not None:
            depth.loads[self.depth_index] = load
        return x + update

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        depth: DepthContext | None = None,
        used: Tensor | None = None,
        mlp_weight: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The whole layer, with the MLP's update multiplied by `mlp_weight` (B, T) if there is one."""
        kwargs.update(zip(self.argument_names, args, strict=False))
        if used is None:
            used = _real(hidden_states, kwargs)
        x = self.attend(hidden_states, kwargs)
        y = self.feed_forward(x, used, depth)
        return y if mlp_weight is None else torch.lerp(x, y, mlp_weight[..., None].to(x.dtype))


class RoutedLayer(Mixin):
    """Mixin before a decoder layer class: the layer's own forward then gets the chosen tokens only."""

    depth_router: Router | None
    """None in a layer behind an exit, which takes who is left."""
    depth_exit: int | None
    """The last exit before this layer, under early exit."""
    depth_index: int
    depth_target: Target
    depth_gate_on: GateOn
    argument_names: tuple[str, ...]
    """The layer's arguments after the stream, in order: some models pass them by position."""
    cache_name: str

    def forward(self, hidden_states: Tensor, *args: Any, depth: DepthContext | None = None, **kwargs: Any) -> Tensor:
        x = hidden_states
        kwargs.update(zip(self.argument_names, args, strict=False))
        if depth is None:  # called by something else than the routed model: nothing is reported
            depth = self._own_context(kwargs)
        real = _real(x, kwargs)
        if self.depth_target == "mlp":  # attention is dense, and so is its cache
            x = self.attend(x, kwargs)  # type: ignore[operator]
            return self._process_chosen(x, self._choose(x, real, depth), {}, None, depth)
        past = kwargs.pop(self.cache_name, None)
        cached = None if past is None else routed_cache_layer(past, self.depth_index, x.shape[0])
        x = self._process_chosen(x, self._choose(x, real, depth), kwargs, cached, depth)
        if self.depth_target == "attention":
            x = self.feed_forward(x, real, depth)  # type: ignore[operator]
        return x

    def _own_context(self, kwargs: dict[str, Any]) -> DepthContext:
        router: Router | None = active(self.depth_router)
        if router is None or self.depth_exit is not None:
            raise ValueError("early exit needs the whole model: call it, not its base_model or a layer of it")
        lookahead = router.looks_ahead
        if not lookahead:
            router.check_ready()
        return DepthContext(lookahead, output_routes=False, positions=kwargs.get("position_ids"))

    def _choose(self, x: Tensor, real: Tensor | None, depth: DepthContext) -> Choice:
        before = None if self.depth_exit is None else depth.alive[self.depth_exit]
        router: Router | None = active(self.depth_router)
        if router is None:
            assert before is not None
            return before
        if before is not None and before.route is None and not depth.output_routes:  # nobody is left
            choice = before
        else:
            choice = self._decide(router, x, real, depth, None if before is None else before.chosen)
        if router.scheme == "early_exit":
            depth.alive[self.depth_index] = choice
        return choice

    def _decide(
        self, router: Router, x: Tensor, real: Tensor | None, depth: DepthContext, candidates: Tensor | None
    ) -> Choice:
        decision = router.decide(x, real, depth.lookahead, candidates, depth.positions)
        if depth.lookahead:
            route = depth.routes[self.depth_index] = router.route(x, decision, slots(router.capacity, x.shape[1]))
            return Choice(decision.chosen, route, None)
        check_not_recorded()
        counts = decision.chosen.sum(1).tolist()  # the one read on the host
        choice = Choice(decision.chosen, None, counts)
        rows, most = choice.rows, max(counts, default=0)
        if depth.output_routes:
            depth.routes[self.depth_index] = router.route(x, decision, most)
        if not rows:
            return choice
        if len(rows) < len(counts):
            busy = torch.tensor(rows, device=x.device)
            x, decision = x[busy], decision.select(busy)
        is_whole = all(counts[row] == x.shape[1] for row in rows)
        return choice._replace(route=router.route(x, decision, most, is_whole))

    def _process_chosen(
        self, x: Tensor, choice: Choice, kwargs: Any, cached: RoutedCacheLayer | None, depth: DepthContext
    ) -> Tensor:
        """Under look-ahead, run on all slots. Else skip for real: run on the rows and slots that were chosen,
        and not at all if there are none."""
        _, route, counts = choice
        if counts is None:  # look-ahead
            assert route is not None
            if cached is not None:
                cached.is_incomplete = True
            return self._process(x, route, kwargs, depth)
        num_tokens = x.shape[1]
        if route is not None:
            rows = choice.rows
            counts = [counts[row] for row in rows]
            write = None if cached is None else cached.write(rows, counts, route.index + cached.seen)
            if len(rows) == x.shape[0]:
                x = self._process(x, route, kwargs, depth, write)
            else:
                busy = torch.tensor(rows, device=x.device)
                kwargs = {name: _select_rows(value, busy, x.shape[0]) for name, value in kwargs.items()}
                x = x.index_copy(0, busy, self._process(x[busy], route, kwargs, depth, write))
        if cached is not None:
            cached.seen += num_tokens
        return x

    def _process(
        self, x: Tensor, route: Route, kwargs: dict[str, Any], depth: DepthContext, write: CacheWrite | None = None
    ) -> Tensor:
        """Gather the route's tokens and all that belongs to them, run what is routed on them, blend."""
        mask = kwargs.get("attention_mask")
        kwargs = {name: _gather(name, value, route) for name, value in kwargs.items()}
        if write is not None:
            kwargs["attention_mask"] = write.mask(mask, route, x.shape[1])
        elif mask is not None:
            kwargs["attention_mask"] = routed_mask(mask, route, route.index, route.count, 0, x.shape[1])
        kwargs[self.cache_name] = write
        layer: Any = self
        tokens = route.gather(x)
        if self.depth_target == "mlp":
            return route.blend(x, layer.feed_forward(tokens, route.used, depth))
        if self.depth_target == "attention":
            return route.blend(x, layer.attend(tokens, kwargs))
        if isinstance(self, HalvesLayer):
            kwargs |= {"depth": depth, "used": route.used}
            if self.depth_gate_on == "mlp":  # the weight acts within: what comes out replaces the token
                kwargs["mlp_weight"] = route.weight
                route = route._replace(weight=route.used.to(route.weight.dtype))
        return route.blend(x, super().forward(tokens, **kwargs))


@cache
def mixed(*classes: Any) -> type[nn.Module]:
    """The class of a module that becomes routed: mixins, and last its own class. Parameters keep their names."""
    *mixins, original = classes
    namespace: dict[str, Any] = {"made_of": classes, "__module__": __name__}
    names = tuple(inspect.signature(original.forward).parameters)[2:]  # without self and the stream
    cache_names = [name for name in CACHE_NAMES if name in names]
    if cache_names:
        namespace |= {"argument_names": names, "cache_name": cache_names[0]}
    return type(mixins[0].__name__.removesuffix("Layer") + original.__name__, classes, namespace)


def _new(*classes: Any) -> nn.Module:
    made = mixed(*classes)
    return made.__new__(made)


def _real(x: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
    real = real_tokens(kwargs.get("attention_mask"), x.shape[1])
    return None if real is None else real.expand(x.shape[:2])


def _select_rows(value: Any, rows: Tensor, batch_size: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_select_rows(item, rows, batch_size) for item in value)
    if isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] == batch_size:
        return value[rows]
    return value


def _gather(name: str, value: Any, route: Route) -> Any:
    if name in TOKENWISE:
        if isinstance(value, tuple):
            return tuple(_gather(name, item, route) for item in value)
        return value if value is None else route.gather(value)
    if name != "attention_mask" and isinstance(value, Tensor) and value.ndim > 1:
        raise ValueError(f"the layer argument {name!r}, a tensor of shape {tuple(value.shape)}, cannot be routed")
    return value
