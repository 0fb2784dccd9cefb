"""Router: scores tokens, decides which are processed, and weighs them. The only place that decides.

Shapes: B batch, T tokens, D width, H hidden units of the predictor.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixdepth.config import DepthConfig, Gate
from mixdepth.routing import Route, slots, top_k


class Router(nn.Module):
    """A linear score for each token, r = w . x, and what follows from it.

    With look-ahead it chooses the row's top k tokens; without, each token by itself: by the
    predictor or by the sign of its own score, as `config.causal` says.
    """

    capacity: float
    forced_lookahead: int = 0
    """How many `mixdepth.lookahead` contexts are open."""

    def __init__(self, width: int, config: DepthConfig, capacity: float) -> None:
        super().__init__()
        self.capacity = capacity
        self.gate = config.gate
        self.causal = config.causal
        self.init_std = config.init_std
        self.projection = nn.Linear(width, 1, bias=False, dtype=router_dtype())
        # What no loss can reach must not wait for a gradient: distributed training would, for ever.
        self.projection.weight.requires_grad_(config.gate != "one" or config.causal == "aux_loss")
        self.predictor = Predictor(width, config.predictor_width) if config.causal == "predictor" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.projection.weight, std=self.init_std)
        if self.predictor is not None:
            self.predictor.reset_parameters()

    def forward(self, x: Tensor, real: Tensor | None = None, lookahead: bool | None = None) -> Route:
        """Route the stream x (B, T, D); `real` (B, T) is False at padding tokens.

        `lookahead` says whether later tokens may be seen; by default as the module's mode has it.
        """
        if lookahead is None:
            lookahead = self.looks_ahead
        num_slots = slots(self.capacity, x.shape[1]) if lookahead else x.shape[1]
        return self.route(x, self.decide(x, real, lookahead), num_slots)

    def decide(self, x: Tensor, real: Tensor | None, lookahead: bool) -> "Decision":
        """Which tokens are chosen."""
        if real is None:
            real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        predictor_logits = None if self.predictor is None else self.predictor(x)  # (B, T)
        # A causal predictor decides without the score, which then is worth computing for chosen tokens only.
        logits = self.score(x) if lookahead or predictor_logits is None else None  # (B, T)
        if lookahead:
            assert logits is not None
            chosen = top_k(logits.masked_fill(~real, -torch.inf), slots(self.capacity, real.sum(1)))
        else:
            guess = logits if predictor_logits is None else predictor_logits
            assert guess is not None
            chosen = real & (guess > self.threshold)
        return Decision(chosen, real, logits, predictor_logits)

    def route(self, x: Tensor, decision: "Decision", num_slots: int) -> Route:
        """The route of a decision about the stream x."""
        chosen, real, logits, predictor_logits = decision
        logits = self.score(x) if logits is None else logits
        return Route.choose(chosen, weigh(logits, self.gate), logits, predictor_logits, real, num_slots)

    @property
    def looks_ahead(self) -> bool:
        """Whether top-k chooses: in training, in `mixdepth.lookahead`, and where there is no causal rule."""
        return self.training or self.forced_lookahead > 0 or self.causal is None

    @property
    def threshold(self) -> float:
        """The logit that a token must exceed by the causal rule: even odds; none at full capacity."""
        return 0.0 if self.capacity < 1 else -torch.inf

    def score(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T), in float32 or better even under autocast."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            return _linear(x.to(dtype), self.projection)[..., 0]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "forced_lookahead": 0}  # a copy is in none of the contexts

    def extra_repr(self) -> str:
        return f"capacity={self.capacity}, gate={self.gate!r}, causal={self.causal!r}"


class Decision(NamedTuple):
    """Which tokens of a stream are chosen, and by what."""

    chosen: Tensor  # (B, T) bool
    real: Tensor  # (B, T) bool: False for padding tokens
    logits: Tensor | None  # (B, T): the scores, if they had a say
    predictor_logits: Tensor | None  # (B, T)


class Predictor(nn.Module):
    """Guesses from one token whether top-k would choose it. No gradient leaves it for the model."""

    def __init__(self, width: int, hidden: float) -> None:
        super().__init__()
        num_hidden = max(1, round(hidden * width)) if hidden else 0
        self.up = nn.Linear(width, num_hidden or 1, dtype=router_dtype())
        self.down = nn.Linear(num_hidden, 1, dtype=router_dtype()) if num_hidden else None

    def reset_parameters(self) -> None:
        self.up.reset_parameters()
        if self.down is not None:
            self.down.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T)"""
        dtype = torch.promote_types(x.dtype, torch.float32)
        x = x.detach().to(dtype)
        # As if the stream were normalised, since its scale grows over layers and training by orders of
        # magnitude; scaling the few hidden units instead spares a copy of the stream.
        scale = x.shape[-1] ** 0.5 / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=1e-6)  # (B, T, 1)
        h = F.linear(x, self.up.weight.to(dtype)) * scale + self.up.bias.to(dtype)  # (B, T, H)
        if self.down is not None:
            h = _linear(F.silu(h), self.down)  # (B, T, 1)
        logits: Tensor = h[..., 0].to(dtype)
        return logits


def _linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """The layer in the dtype of x, even if the weights were cast to a lower one with the model's."""
    return F.linear(x, layer.weight.to(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype))


def router_dtype() -> torch.dtype:
    """At least float32, whatever the model's dtype: in bf16 many scores tie, and ties reorder the top-k."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


def weigh(logits: Tensor, gate: Gate) -> Tensor:
    """The gate: how far a chosen token moves, from its score."""
    match gate:
        case "raw":
            return logits
        case "sigmoid":
            return logits.sigmoid()
        case "tanh":
            return logits.tanh()
        case "unit":
            return 1 + logits.tanh()
        case "one":
            return torch.ones_like(logits)


@contextmanager
def lookahead(model: nn.Module) -> Iterator[None]:
    """Within this context the model's routers choose by top-k in evaluation, seeing later tokens.

    Losses measured so are not those of sampling; `generate()` stays causal.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    if not routers:
        raise ValueError(f"{type(model).__name__} has no routers: it is not routed")
    for router in routers:
        router.forced_lookahead += 1
    try:
        yield
    finally:
        for router in routers:
            router.forced_lookahead -= 1
