"""RoutedLayer: what a decoder layer of transformers becomes when it is routed.

Shapes: B batch, T tokens in the stream, R rows with a chosen token, K slots, D width.
"""

import inspect
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from mixdepth.hf.cache import CacheWrite, RoutedCacheLayer, routed_cache_layer
from mixdepth.hf.mask import real_tokens, routed_mask
from mixdepth.router import Router
from mixdepth.routing import Route

CACHE_NAMES = ("past_key_values", "layer_past")
TOKENWISE = ("position_ids", "position_embeddings")
"""Arguments of a decoder layer that are indexed by token, beside the stream and the mask."""


@dataclass
class DepthContext:
    """What one forward pass of the model tells its routed layers, and what they report back.

    It travels as an argument, so that recomputation under activation checkpointing sees the same.
    """

    lookahead: bool
    output_routes: bool
    """Whether routes are asked for; under look-ahead they are always reported, for the routing losses."""
    routes: dict[int, Route] = field(default_factory=dict)


class RoutedLayer(nn.Module):
    """Mixin before a decoder layer class: the layer's own forward then gets the chosen tokens only."""

    depth_router: Router
    depth_index: int
    argument_names: tuple[str, ...]
    """The layer's arguments after the stream, in order: some models pass them by position."""
    cache_name: str

    def forward(self, hidden_states: Tensor, *args: Any, depth: DepthContext | None = None, **kwargs: Any) -> Tensor:
        x = hidden_states
        kwargs.update(zip(self.argument_names, args, strict=False))
        if depth is None:  # called by something else than the routed model: nothing is reported
            depth = DepthContext(self.depth_router.looks_ahead, output_routes=False)
        real = real_tokens(kwargs.get("attention_mask"), x.shape[1])
        real = None if real is None else real.expand(x.shape[:2])
        past = kwargs.pop(self.cache_name, None)
        layer = None if past is None else routed_cache_layer(past, self.depth_index, x.shape[0])
        if not depth.lookahead:
            return self._process_chosen(x, real, kwargs, layer, depth)
        if layer is not None:
            layer.is_incomplete = True
        route = depth.routes[self.depth_index] = self.depth_router(x, real, lookahead=True)
        return self._process(x, route, kwargs)

    def _process_chosen(
        self, x: Tensor, real: Tensor | None, kwargs: Any, layer: RoutedCacheLayer | None, depth: DepthContext
    ) -> Tensor:
        """Skip for real: run on the rows and slots that were chosen, and not at all if there are none."""
        decision = self.depth_router.decide(x, real, lookahead=False)
        counts = decision.chosen.sum(1).tolist()  # the one read on the host
        if any(counts) or depth.output_routes:
            route = self.depth_router.route(x, decision, max(counts))
        if depth.output_routes:
            depth.routes[self.depth_index] = route
        num_tokens = x.shape[1]
        if any(counts):
            rows = [row for row, count in enumerate(counts) if count]
            counts = [counts[row] for row in rows]
            route = route if len(rows) == x.shape[0] else route.select(rows)
            write = None if layer is None else layer.write(rows, counts, route.index + layer.seen)
            if len(rows) == x.shape[0]:
                x = self._process(x, route, kwargs, write)
            else:
                busy = torch.tensor(rows, device=x.device)
                kwargs = {name: _select_rows(value, busy, x.shape[0]) for name, value in kwargs.items()}
                x = x.index_copy(0, busy, self._process(x[busy], route, kwargs, write))
        if layer is not None:
            layer.seen += num_tokens
        return x

    def _process(self, x: Tensor, route: Route, kwargs: dict[str, Any], write: CacheWrite | None = None) -> Tensor:
        """Gather the route's tokens and all that belongs to them, run the layer on them, blend."""
        mask = kwargs.get("attention_mask")
        kwargs = {name: _gather(name, value, route) for name, value in kwargs.items()}
        if write is not None:
            kwargs["attention_mask"] = write.mask(mask, route, x.shape[1])
        elif mask is not None:
            kwargs["attention_mask"] = routed_mask(mask, route, route.index, route.count, 0, x.shape[1])
        kwargs[self.cache_name] = write
        return route.blend(x, super().forward(route.gather(x), **kwargs))

    def __reduce__(self) -> tuple[Any, ...]:
        return _new_layer, (type(self).__mro__[2],), self.__dict__


@cache
def routed_layer_class(layer_class: type[nn.Module]) -> type[RoutedLayer]:
    """The subclass of a decoder layer class that routes; the layer's parameters keep their names."""
    names = tuple(inspect.signature(layer_class.forward).parameters)[2:]  # without self and the stream
    (cache_name,) = [name for name in CACHE_NAMES if name in names]
    namespace = {"argument_names": names, "cache_name": cache_name, "__module__": __name__}
    return type(f"Routed{layer_class.__name__}", (RoutedLayer, layer_class), namespace)


def _new_layer(layer_class: Any) -> RoutedLayer:
    routed = routed_layer_class(layer_class)
    return routed.__new__(routed)


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
