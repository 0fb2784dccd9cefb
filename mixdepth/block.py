"""Routed: routes tokens around any block, `block(x, **kwargs) -> x'`. This module does not use transformers.

Shapes: B batch, T tokens in the stream, K slots in the route, D width.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mixdepth import schemes
from mixdepth.config import DepthConfig
from mixdepth.losses import routing_losses
from mixdepth.router import Router, check_not_recorded
from mixdepth.routes import Route

Axes = int | tuple[int, ...]


class Routed(nn.Module):
    """Lets only the tokens that a router picks pass through `block`; the others keep their value.

    The block gets the picked tokens as a shorter sequence, (B, K, D) in stream order, and returns the same shape with
    its residual connections included. Other arguments that are indexed by token must be shortened in the same way:
    `tokenwise` maps each such keyword to its token axis, or to both axes for a mask of token pairs. The batch is the
    first axis of all of them, and may have size 1.

    Rows of different lengths leave some slots unused. A block that mixes tokens in both directions must ignore those
    slots. `slot_mask` is the keyword by which the block gets a mask (B, K) that is True at used slots. The settings
    `every`, `first` and `layers` of the config have no meaning for one block.

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
    """Whether that route was chosen as in training."""

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
        if config is None:
            config = DepthConfig()
        _check_config(config)
        assert isinstance(config.capacity, float)
        self.config = config
        self.block = block
        self.router = Router(width, config, config.capacity)
        self.tokenwise = dict(tokenwise or {})
        self.slot_mask = slot_mask

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "route": None}  # its tensors belong to a graph, which cannot be copied

    def forward(self, x: Tensor, *, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Process the stream x (B, T, D); `mask` (B, T) is True at real tokens and False at padding."""
        self._check_mask(mask)
        # 1. Choose. Without look-ahead, run on as many slots as the fullest row needs.
        self.looked_ahead = self.router.looks_ahead
        if self.looked_ahead:
            route: Route = self.router(x, mask)
        else:
            self.router.check_ready()
            check_not_recorded()
            decision = self.router.decide(x, mask, lookahead=False)
            num_slots = int(decision.chosen.sum(1).max())
            route = self.router.route(x, decision, num_slots)
        self.route = route

        # 2. Run the block on the chosen tokens, with everything that is indexed by token.
        y = x
        if route.index.shape[1] > 0:
            kwargs = self._gather_arguments(route, kwargs)
            processed: Tensor = self.block(route.gather(x), **kwargs)  # (B, K, D)
            y = route.blend(x, processed)  # (B, T, D)
        self.router.record_move(x, y)
        return y

    def _check_mask(self, mask: Tensor | None) -> None:
        if mask is None:
            return
        if self.slot_mask is None:
            raise ValueError("a mask leaves slots unused: name the block's keyword for them with slot_mask=...")
        if mask.dtype != torch.bool:
            raise ValueError(f"mask must be boolean, True at real tokens, not {mask.dtype}")

    def _gather_arguments(self, route: Route, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Shorten the arguments that are indexed by token, and add the mask of used slots."""
        for name, axes in self.tokenwise.items():
            if kwargs.get(name) is None:
                continue
            token_axes = (axes,) if isinstance(axes, int) else axes
            for axis in token_axes:
                kwargs[name] = route.gather(kwargs[name], axis)
        if self.slot_mask is not None:
            kwargs[self.slot_mask] = route.used
        return kwargs


def _check_config(config: DepthConfig) -> None:
    """Refuse settings that have no meaning for one block."""
    if isinstance(config.capacity, tuple):
        raise ValueError(f"one block takes one capacity, not {list(config.capacity)}")
    for name in ("target", "gate_on"):
        value = getattr(config, name)
        if value != "block":
            raise ValueError(f"{name}={value!r} is for language models: Routed takes one block")
    if config.experts is not None:
        raise ValueError(f"experts={config.experts.scheme!r} is for language models: Routed takes one block")
    if schemes.ends_the_stack(config.scheme):
        raise ValueError(f"scheme={config.scheme!r} skips all later layers of a language model: Routed takes one block")


def routing_loss(model: nn.Module) -> Tensor:
    """Compute the weighted routing losses of the last forward pass, over all `Routed` blocks of the model.

    Add it to the loss in a training loop: `(task_loss + mixdepth.routing_loss(model)).backward()`.
    It is 0 where the router learns only from the gate (`causal=None`, `causal="threshold"`).
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
        for loss in routing_losses([block.route], [block.router.capacity], block.config):
            losses.append(loss.coef * loss.value)
    if not losses:
        return torch.zeros((), device=blocks[0].router.projection.weight.device)
    return torch.stack(losses).mean()
