"""Routed: routes tokens around any block, `block(x, **kwargs) -> x'`. Knows nothing of transformers.

Shapes: B batch, T tokens in the stream, K slots in the route, D width.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mixdepth.config import DepthConfig
from mixdepth.losses import routing_losses
from mixdepth.router import Router, check_not_recorded
from mixdepth.routes import Route

Axes = int | tuple[int, ...]


class Routed(nn.Module):
    """Lets only the tokens that a router picks pass through `block`; the rest keep their value.

    The block gets the picked tokens as a shorter sequence, (B, K, D) in stream order, and returns
    the same shape with its residual connections included. What else is indexed by token must be
    shortened along: `tokenwise` maps each such keyword to its token axis, or axes for a mask of
    token pairs. Batch comes first in all of them, or has size 1.

    Rows of different lengths leave some slots unused. A block that mixes tokens in both directions
    must ignore those; `slot_mask` names the keyword by which it is told, as a mask (B, K) that is
    True at used slots. Of the config, `every`, `first` and `layers` say nothing about one block.

    >>> block = nn.TransformerEncoderLayer(d_model=16, nhead=2, batch_first=True)
    >>> routed = Routed(block, width=16, config=DepthConfig(capacity=0.25))
    >>> routed(torch.randn(2, 12, 16)).shape
    torch.Size([2, 12, 16])
    >>> routed.route.count
    tensor([3, 3])
    """

    route: Route | None = None
    """The route of the last forward pass."""
    looked_ahead: bool = False
    """Whether top-k chose it."""

    def __init__(
        self,
        block: nn.Module,
        *,
        width: int,
        config: DepthConfig | None = None,
        tokenwise: Mapping[str, Axes] | None = None,
        slot_mask: str | None = None,
    ) -> None:
        super().__init__()
        self.config = config or DepthConfig()
        if not isinstance(self.config.capacity, float):
            raise ValueError(f"one block takes one capacity, not {list(self.config.capacity)}")
        for name, default in (("target", "block"), ("gate_on", "block"), ("experts", None)):
            if getattr(self.config, name) != default:
                raise ValueError(
                    f"{name}={getattr(self.config, name)!r} is for language models: Routed takes one block"
                )
        if self.config.scheme == "early_exit":
            raise ValueError("scheme='early_exit' skips all later layers of a language model: Routed takes one block")
        self.block = block
        self.router = Router(width, self.config, self.config.capacity)
        self.tokenwise = dict(tokenwise or {})
        self.slot_mask = slot_mask

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "route": None}  # its tensors belong to a graph, which cannot be copied

    def forward(self, x: Tensor, *, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Process the stream x (B, T, D); `mask` (B, T) is True at real tokens, False at padding."""
        if mask is not None and self.slot_mask is None:
            raise ValueError("a mask leaves slots unused: name the block's keyword for them with slot_mask=...")
        if mask is not None and mask.dtype != torch.bool:
            raise ValueError(f"mask must be boolean, True at real tokens, not {mask.dtype}")
        self.looked_ahead = self.router.looks_ahead
        if self.looked_ahead:
            route: Route = self.router(x, mask)
        else:  # run on as many slots as the fullest row needs
            self.router.check_ready()
            check_not_recorded()
            decision = self.router.decide(x, mask, lookahead=False)
            route = self.router.route(x, decision, int(decision.chosen.sum(1).max()))
        self.route = route
        if route.index.shape[1] == 0:
            return x
        for name, axes in self.tokenwise.items():
            if kwargs.get(name) is not None:
                for axis in (axes,) if isinstance(axes, int) else axes:
                    kwargs[name] = route.gather(kwargs[name], axis)
        if self.slot_mask is not None:
            kwargs[self.slot_mask] = route.used
        y: Tensor = self.block(route.gather(x), **kwargs)  # (B, K, D)
        return route.blend(x, y)


def routing_loss(model: nn.Module) -> Tensor:
    """The weighted routing losses of the last forward pass, over all `Routed` blocks of the model.

    Add it to the loss in a training loop: `(task_loss + mixdepth.routing_loss(model)).backward()`.
    It is 0 where there is nothing to learn beside the gate (`causal=None`, `causal="threshold"`).
    """
    blocks = [module for module in model.modules() if isinstance(module, Routed)]
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no Routed block")
    losses = []
    for block in blocks:
        if block.route is None:
            raise ValueError("routing_loss needs a forward pass first")
        if not block.looked_ahead:
            raise ValueError("routing_loss compares with the choice of training: call train() before the forward pass")
        found = routing_losses([block.route], [block.router.capacity], block.config)
        losses += [loss.coef * loss.value for loss in found]
    return torch.stack(losses).mean() if losses else torch.zeros((), device=blocks[0].router.projection.weight.device)
