"""Routed layers: what a decoder layer of transformers becomes when it is routed.

A routed layer is an object of a class made of one of the mixins here and the layer's own class (`mixed`).

Shapes: B rows of the batch, T tokens in the stream, R rows with a chosen token, K slots, D width.
"""

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mixdepth import schemes
from mixdepth.config import DepthConfig, GateOn, Target
from mixdepth.experts import ExpertLoad, ExpertRouter
from mixdepth.hf.architectures import ATTENTION, MLP, half_modules
from mixdepth.hf.cache import CacheWrite, RoutedCacheLayer, routed_cache_layer
from mixdepth.hf.mask import real_tokens, routed_mask
from mixdepth.modes import active
from mixdepth.router import Router, check_not_recorded
from mixdepth.routes import Route, slots

CACHE_NAMES = ("past_key_values", "layer_past")
"""The names that architectures have for the cache among the arguments of a layer."""
TOKENWISE = ("position_ids", "position_embeddings")
"""Arguments of a decoder layer that are indexed by token, besides the stream and the mask."""


@dataclass(frozen=True, kw_only=True)
class LayerRoute:
    """The route of one layer in one pass, with the numbers that the host needs for shapes."""

    chosen: Tensor  # (B, T) bool
    route: Route | None
    """The route of all rows under look-ahead, and otherwise of the rows with a chosen token; None without such rows."""
    counts: tuple[int, ...] | None = None
    """How many tokens each row chose. None under look-ahead, where shapes do not depend on it."""

    @property
    def rows(self) -> list[int]:
        """The rows with a chosen token, by the counts."""
        assert self.counts is not None
        return [row for row, count in enumerate(self.counts) if count]


class DepthContext:
    """What one forward pass of the model tells its routed layers, and what they report back.

    It travels as an argument, so that a recomputation under activation checkpointing sees the same context.
    It is not a dataclass, because FSDP rebuilds the dataclasses among the arguments, and layers would report to a copy.
    """

    def __init__(self, lookahead: bool, output_routes: bool, positions: Tensor | None = None) -> None:
        self.lookahead = lookahead
        self.output_routes = output_routes
        """Whether the caller asked for routes. Under look-ahead they are always reported, for the routing losses."""
        self.positions = positions
        """(B or 1, T): the positions of the tokens, if the scheme needs them."""
        self.routes: dict[int, Route] = {}
        """The routes that layers report, by layer."""
        self.loads: dict[int, ExpertLoad] = {}
        """The loads that layers with experts report, by layer."""
        self.alive: dict[int, LayerRoute] = {}
        """Early exit: which tokens each exit kept, by layer, for the layers that follow.

        Each exit has an entry of its own, because recomputation runs through the layers backwards.
        """


class Mixin(nn.Module):
    """The base of all mixins that `mixed` puts before a class of transformers."""

    made_of: tuple[type[nn.Module], ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return _new, type(self).made_of, self.__dict__


class RoutedExperts(Mixin):
    """Mixin before a block with a `gate` and `experts`: an `ExpertRouter` brings tokens and experts together."""

    depth_router: ExpertRouter

    def serve(self, x: Tensor, used: Tensor | None, lookahead: bool | None) -> tuple[Tensor, ExpertLoad]:
        """Run the experts on x (B, T, D), and report their load; `used` (B, T) is False at tokens without meaning."""
        block: Any = self
        # Bound calls, not the modules: a hook that moves the router's arguments to its device would move modules too.
        gate = block.gate.__call__
        experts = block.experts.__call__
        served: tuple[Tensor, ExpertLoad] = active(self.depth_router)(x, gate, experts, used, lookahead)
        return served

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.serve(hidden_states, None, None)[0]


class HalvesLayer(Mixin):
    """Mixin before a decoder layer class whose forward is Llama's: attention and MLP can then run alone."""

    depth_index: int
    argument_names: tuple[str, ...]

    def attend(self, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """The stream after attention: x + attention(norm(x))."""
        norm, attention = half_modules(self, ATTENTION)
        update: Tensor = attention(hidden_states=norm(x), **kwargs)[0]
        return x + update

    def feed_forward(self, x: Tensor, used: Tensor | None, depth: DepthContext | None) -> Tensor:
        """The stream after the MLP: x + mlp(norm(x)).

        Routed experts get `used` (B, T), which is False at padding and unused slots, and report their load.
        """
        norm, mlp = half_modules(self, MLP)
        h = norm(x)
        if not isinstance(mlp, RoutedExperts):
            update = mlp(h)
            return x + update
        lookahead = None if depth is None else depth.lookahead
        update, load = mlp.serve(h, used, lookahead)
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
        """The whole layer. If there is a `mlp_weight` (B, T), it multiplies the MLP's update."""
        kwargs.update(zip(self.argument_names, args, strict=False))
        if used is None:
            used = _real(hidden_states, kwargs)
        x = self.attend(hidden_states, kwargs)
        y = self.feed_forward(x, used, depth)
        if mlp_weight is None:
            return y
        return torch.lerp(x, y, mlp_weight[..., None].to(x.dtype))


class RoutedLayer(Mixin):
    """Mixin before a decoder layer class: the layer's own forward then gets the chosen tokens only.

    Subclasses route a part of the layer, or put the gate elsewhere.
    """

    depth_target: ClassVar[Target] = "block"
    depth_gate_on: ClassVar[GateOn] = "block"
    depth_router: Router | None
    """None in layers after an exit: they process the tokens that the exit kept."""
    depth_exit: int | None
    """Early exit: the last exit before this layer."""
    depth_index: int
    argument_names: tuple[str, ...]
    """The layer's arguments after the stream, in order: some models pass them by position."""
    cache_name: str

    def forward(self, hidden_states: Tensor, *args: Any, depth: DepthContext | None = None, **kwargs: Any) -> Tensor:
        """Run the layer on the chosen tokens only (Raposo et al. 2024, Eq. 1)."""
        kwargs.update(zip(self.argument_names, args, strict=False))
        if depth is None:  # the caller is not the routed model: nothing is reported
            depth = self._own_context(kwargs)
        real = _real(hidden_states, kwargs)
        return self.forward_routed(hidden_states, real, kwargs, depth)

    def forward_routed(self, x: Tensor, real: Tensor | None, kwargs: dict[str, Any], depth: DepthContext) -> Tensor:
        """The stream x (B, T, D) after the layer; `real` (B, T) is False at padding tokens."""
        past = kwargs.pop(self.cache_name, None)
        cached = None
        if past is not None:
            cached = routed_cache_layer(past, self.depth_index, x.shape[0])
        choice = self._choose(x, real, depth)
        y = self._process_chosen(x, choice, kwargs, cached, depth)
        self._record_move(x, y)
        return y

    def process_tokens(self, tokens: Tensor, route: Route, kwargs: dict[str, Any], depth: DepthContext) -> Tensor:
        """Run the part of the layer that is routed on the tokens of the route, (R, K, D)."""
        y: Tensor = super().forward(tokens, **kwargs)
        return y

    def blend(self, x: Tensor, y: Tensor, route: Route) -> Tensor:
        """Move the chosen tokens of the stream x (R, T, D) towards y (R, K, D)."""
        return route.blend(x, y)

    def _own_context(self, kwargs: dict[str, Any]) -> DepthContext:
        """The context of a pass that the routed model did not begin: the layer decides as its router's mode says."""
        router: Router | None = active(self.depth_router)
        if router is None or self.depth_exit is not None:
            raise ValueError("early exit needs the whole model: call it, not its base_model or a layer of it")
        lookahead = router.looks_ahead
        if not lookahead:
            router.check_ready()
        return DepthContext(lookahead, output_routes=False, positions=kwargs.get("position_ids"))

    def _choose(self, x: Tensor, real: Tensor | None, depth: DepthContext) -> LayerRoute:
        """Decide which tokens of the stream x (B, T, D) take part, among those that earlier exits kept."""
        before = None
        candidates = None
        if self.depth_exit is not None:
            before = depth.alive[self.depth_exit]
            candidates = before.chosen
        router: Router | None = active(self.depth_router)
        if router is None:
            assert before is not None
            return before
        if before is not None and before.route is None and not depth.output_routes:  # no token got this far
            choice = before
        else:
            choice = self._decide(router, x, real, depth, candidates)
        if schemes.ends_the_stack(router.scheme):
            depth.alive[self.depth_index] = choice
        return choice

    def _decide(
        self, router: Router, x: Tensor, real: Tensor | None, depth: DepthContext, candidates: Tensor | None
    ) -> LayerRoute:
        """Ask the router, and report its route. Without look-ahead, leave out the rows that chose no token."""
        decision = router.decide(x, real, depth.lookahead, candidates, depth.positions)
        # 1. Under look-ahead the number of slots follows from the capacity.
        if depth.lookahead:
            num_slots = slots(router.capacity, x.shape[1])
            route = router.route(x, decision, num_slots)
            depth.routes[self.depth_index] = route
            return LayerRoute(chosen=decision.chosen, route=route)
        # 2. Otherwise it is the most that a row chose: this is the one read on the host.
        check_not_recorded()
        counts = tuple(decision.chosen.sum(1).tolist())
        num_slots = max(counts, default=0)
        if depth.output_routes:
            depth.routes[self.depth_index] = router.route(x, decision, num_slots)
        # 3. Route the rows with a chosen token.
        choice = LayerRoute(chosen=decision.chosen, route=None, counts=counts)
        rows = choice.rows
        if not rows:
            return choice
        if len(rows) < len(counts):
            busy = torch.tensor(rows, device=x.device)  # (R,)
            x = x[busy]
            decision = decision.select(busy)
        is_whole = all(counts[row] == x.shape[1] for row in rows)
        route = router.route(x, decision, num_slots, is_whole)
        return LayerRoute(chosen=choice.chosen, route=route, counts=counts)

    def _record_move(self, before: Tensor, after: Tensor) -> None:
        """Tell the router how far the chosen tokens of the stream (B, T, D) moved, for `mixdepth.observe`."""
        router: Router | None = active(self.depth_router)
        if router is not None:
            router.record_move(before, after)

    def _process_chosen(
        self,
        x: Tensor,
        choice: LayerRoute,
        kwargs: dict[str, Any],
        cached: RoutedCacheLayer | None,
        depth: DepthContext,
    ) -> Tensor:
        """Run on all rows and slots under look-ahead. Otherwise skip for real: run on the rows that chose a token."""
        num_tokens = x.shape[1]
        if depth.lookahead:
            assert choice.route is not None
            if cached is not None:
                cached.forbid_continuation()
            return self._process(x, choice.route, kwargs, depth)
        if choice.route is not None:
            x = self._process_rows(x, choice, choice.route, kwargs, cached, depth)
        if cached is not None:
            cached.advance(num_tokens)
        return x

    def _process_rows(
        self,
        x: Tensor,
        choice: LayerRoute,
        route: Route,
        kwargs: dict[str, Any],
        cached: RoutedCacheLayer | None,
        depth: DepthContext,
    ) -> Tensor:
        """Run on the rows that chose a token; the other rows of the stream x (B, T, D) keep their value."""
        rows = choice.rows
        assert choice.counts is not None
        write = None
        if cached is not None:
            counts = [choice.counts[row] for row in rows]
            write = cached.write(rows, counts, route.index + cached.seen)
        if len(rows) == x.shape[0]:
            return self._process(x, route, kwargs, depth, write)
        busy = torch.tensor(rows, device=x.device)  # (R,)
        kwargs = {name: _select_rows(value, busy, x.shape[0]) for name, value in kwargs.items()}
        y = self._process(x[busy], route, kwargs, depth, write)  # (R, T, D)
        return x.index_copy(0, busy, y)

    def _process(
        self, x: Tensor, route: Route, kwargs: dict[str, Any], depth: DepthContext, write: CacheWrite | None = None
    ) -> Tensor:
        """Gather the route's tokens of the stream x (R, T, D), run what is routed on them, and blend."""
        # 1. Gather what belongs to the tokens. The mask follows from the model's and from the stored keys.
        mask = kwargs.get("attention_mask")
        kwargs = {name: _gather(name, value, route) for name, value in kwargs.items()}
        if write is not None:
            kwargs["attention_mask"] = write.mask(mask, route, x.shape[1])
        elif mask is not None:
            kwargs["attention_mask"] = routed_mask(mask, route, route.index, route.count, 0, x.shape[1])
        kwargs[self.cache_name] = write
        # 2. Run what is routed on the shorter sequence.
        tokens = route.gather(x)  # (R, K, D)
        y = self.process_tokens(tokens, route, kwargs, depth)  # (R, K, D)
        # 3. Move the chosen tokens towards the result; the others keep their value.
        return self.blend(x, y, route)


class RoutedHalvesLayer(RoutedLayer, HalvesLayer):
    """Mixin for a routed layer whose experts are routed, too: they need to know which slots are used."""

    def process_tokens(self, tokens: Tensor, route: Route, kwargs: dict[str, Any], depth: DepthContext) -> Tensor:
        kwargs |= {"depth": depth, "used": route.used}
        return super().process_tokens(tokens, route, kwargs, depth)


class GatedMlpLayer(RoutedHalvesLayer):
    """Mixin for `gate_on="mlp"`: the whole layer is routed, and the gate multiplies the MLP's update alone."""

    depth_gate_on = "mlp"

    def process_tokens(self, tokens: Tensor, route: Route, kwargs: dict[str, Any], depth: DepthContext) -> Tensor:
        kwargs["mlp_weight"] = route.weight
        return super().process_tokens(tokens, route, kwargs, depth)

    def blend(self, x: Tensor, y: Tensor, route: Route) -> Tensor:
        # The gate has acted inside the layer: what comes out replaces the token.
        replacing = route.with_weight(route.used.to(route.weight.dtype))
        return replacing.blend(x, y)


class RoutedAttentionLayer(RoutedLayer, HalvesLayer):
    """Mixin for `target="attention"`: every token passes the MLP."""

    depth_target = "attention"

    def forward_routed(self, x: Tensor, real: Tensor | None, kwargs: dict[str, Any], depth: DepthContext) -> Tensor:
        x = super().forward_routed(x, real, kwargs, depth)
        return self.feed_forward(x, real, depth)

    def process_tokens(self, tokens: Tensor, route: Route, kwargs: dict[str, Any], depth: DepthContext) -> Tensor:
        return self.attend(tokens, kwargs)


class RoutedMlpLayer(RoutedLayer, HalvesLayer):
    """Mixin for `target="mlp"`: every token passes attention, so that the cache is the ordinary one."""

    depth_target = "mlp"

    def forward_routed(self, x: Tensor, real: Tensor | None, kwargs: dict[str, Any], depth: DepthContext) -> Tensor:
        x = self.attend(x, kwargs)
        choice = self._choose(x, real, depth)
        y = self._process_chosen(x, choice, {}, None, depth)
        self._record_move(x, y)
        return y

    def process_tokens(self, tokens: Tensor, route: Route, kwargs: dict[str, Any], depth: DepthContext) -> Tensor:
        return self.feed_forward(tokens, route.used, depth)


def routed_mixin(config: DepthConfig, has_routed_experts: bool) -> type[RoutedLayer]:
    """The mixin of a routed layer, by what the settings route in it."""
    if config.target == "attention":
        return RoutedAttentionLayer
    if config.target == "mlp":
        return RoutedMlpLayer
    if config.gate_on == "mlp":
        return GatedMlpLayer
    if has_routed_experts:
        return RoutedHalvesLayer
    return RoutedLayer


@cache
def mixed(mixin: Any, original: Any) -> Any:
    """The class of a module that becomes routed: a mixin before the module's own class. Parameters keep their names."""
    namespace: dict[str, Any] = {"made_of": (mixin, original), "__module__": __name__}
    names = tuple(inspect.signature(original.forward).parameters)[2:]  # without self and the stream
    cache_names = [name for name in CACHE_NAMES if name in names]
    if cache_names:
        namespace |= {"argument_names": names, "cache_name": cache_names[0]}
    prefix = mixin.__name__.removesuffix("Layer")
    return type(prefix + original.__name__, (mixin, original), namespace)


def _new(mixin: Any, original: Any) -> nn.Module:
    """An empty module of a mixed class, for copies and pickles."""
    made: Any = mixed(mixin, original)
    module: nn.Module = made.__new__(made)
    return module


def _real(x: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
    """(B, T) bool: which tokens of x (B, T, D) are not padding, by the mask among the arguments. None: all are real."""
    real = real_tokens(kwargs.get("attention_mask"), x.shape[1])
    return None if real is None else real.expand(x.shape[:2])


def _select_rows(value: Any, rows: Tensor, batch_size: int) -> Any:
    """These rows (R,) of an argument of the layer, if it has one for each row of the batch."""
    if isinstance(value, tuple):
        return tuple(_select_rows(item, rows, batch_size) for item in value)
    if isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] == batch_size:
        return value[rows]
    return value


def _gather(name: str, value: Any, route: Route) -> Any:
    """The slots of the route in an argument of the layer, if it is indexed by token."""
    if name in TOKENWISE:
        if isinstance(value, tuple):
            return tuple(_gather(name, item, route) for item in value)
        return value if value is None else route.gather(value)
    if name != "attention_mask" and isinstance(value, Tensor) and value.ndim > 1:
        raise ValueError(f"the layer argument {name!r}, a tensor of shape {tuple(value.shape)}, cannot be routed")
    return value
