"""Router: scores tokens, decides which are processed, and weighs them. The only place that decides.

Shapes: B batch, T tokens, D width, H hidden units of the predictor.
"""

from statistics import NormalDist
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixdepth.config import LOOKS_AHEAD, DepthConfig, Gate
from mixdepth.routes import Route, WholeRoute, edge, first_k, gaussian, slots, top_k


class Chooser(nn.Module):
    """What all that choose tokens have in common: look-ahead, and a threshold for when there is none."""

    capacity: float | None
    """The fraction of the tokens to choose; None is no limit."""
    threshold: Tensor
    """What a score must exceed by the causal rule, one for each expert among experts."""
    observed: Tensor | float
    """(2, ...): what thresholds would have chosen as training did since the last update, summed over rows, and the
    number of rows."""
    forced_lookahead: int = 0
    """How many `mixdepth.lookahead` contexts are open."""

    def __init__(self, shape: tuple[int, ...], config: DepthConfig, estimates: bool) -> None:
        super().__init__()
        self.momentum = config.threshold_momentum
        self.estimates = estimates
        """Whether the threshold is a running estimate; otherwise it stays where it is, at even odds."""
        self.observed = 0.0  # from the start, or torch.compile would make another graph once it is there
        self.register_buffer("threshold", torch.empty(shape, dtype=router_dtype()))

    def reset_threshold(self) -> None:
        nn.init.constant_(self.threshold, torch.nan if self.estimates else 0.0)

    def observe(self, scores: Tensor, chosen: Tensor, candidates: Tensor) -> None:
        """Remember where the choice among scores (B, ..., T) fell, until the next update.

        A recomputation adds the same once more, for every micro-batch alike, and leaves the mean as it is.
        """
        at = edge(scores.detach(), chosen, candidates)  # (B, ...)
        rows = chosen.any(-1)
        self.observed = self.observed + torch.stack([at.where(rows, 0).sum(0), rows.sum(0).to(at.dtype)])

    @torch.no_grad()
    def update(self, observed: Tensor) -> None:
        """Move the threshold towards the mean of what was observed, (2, ...)."""
        total, num_rows = observed.to(self.threshold.dtype)
        mean = total / num_rows
        moved = torch.lerp(mean, self.threshold, self.momentum).where(~self.threshold.isnan(), mean)
        self.threshold.copy_(moved.where(num_rows > 0, self.threshold))
        self.observed = 0.0

    @property
    def cutoff(self) -> Tensor | float:
        """What a score must exceed by the causal rule; nothing at full capacity."""
        return -torch.inf if self.capacity == 1 else self.edge_of_choice()

    def edge_of_choice(self) -> Tensor | float:
        return self.threshold

    def check_ready(self) -> None:
        """Refuse to choose by a threshold that is not there or was never estimated."""
        if self.threshold.is_meta:
            raise ValueError(
                "the buffers of routers hold no numbers: offload with offload_buffers=False, or initialise the model "
                "with init_weights() first"
            )
        if not self.estimates or self.capacity == 1:
            return
        check_not_recorded()  # here already: the thresholds are read on the host
        if self.threshold.isnan().any():
            raise ValueError(
                "the thresholds were never estimated: call mixdepth.update_routers(model) after each optimizer step, "
                "or mixdepth.calibrate(model, batches)"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "forced_lookahead": 0}  # a copy is in none of the contexts

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or cast, but keep float32 where the model is cast to half precision.

        Loading keeps routers in float32 too. Scores would tie in half precision, and steps of a running mean be lost.
        """

        def in_float32_or_better(tensor: Tensor) -> Tensor:
            changed: Tensor = fn(tensor)
            if changed.is_floating_point() and changed.dtype.itemsize < 4:
                return tensor.to(changed.device, torch.float32)
            return changed

        return super()._apply(in_float32_or_better, recurse)  # type: ignore[no-untyped-call]


class Router(Chooser):
    """A linear score for each token, r = w . x, and what follows from it.

    With look-ahead it chooses as in training, over the whole row: its top k tokens. Without, each
    token by itself, as the scheme or `config.causal` says.
    """

    capacity: float
    step: Tensor | None
    """How many optimizer steps there were (`random`: it keys the noise of training)."""

    def __init__(self, width: int, config: DepthConfig, capacity: float, layer: int = 0) -> None:
        super().__init__((), config, estimates=config.causal == "threshold")
        self.capacity = capacity
        self.scheme = config.scheme
        self.gate = config.gate
        self.causal = config.causal
        self.init_std = config.init_std
        self.router_input = config.router_input
        self.noise_keys = (config.seed, layer)
        self.projection = RouterLinear(width, 1, bias=False)
        # What no loss can reach must not wait for a gradient: distributed training would, for ever.
        has_loss = config.causal == "aux_loss" or config.scheme == "token_choice"
        self.projection.weight.requires_grad_(config.gate != "one" or has_loss)
        self.predictor = Predictor(width, config.predictor_width) if config.causal == "predictor" else None
        self.register_buffer("step", torch.zeros((), dtype=torch.long) if config.scheme == "random" else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.projection.weight, std=self.init_std)
        self.reset_threshold()
        if self.predictor is not None:
            self.predictor.reset_parameters()
        if self.step is not None:
            nn.init.zeros_(self.step)

    def forward(self, x: Tensor, real: Tensor | None = None, lookahead: bool | None = None) -> Route:
        """Route the stream x (B, T, D); `real` (B, T) is False at padding tokens.

        `lookahead` says whether later tokens may be seen; by default as the module's mode has it.
        """
        if lookahead is None:
            lookahead = self.looks_ahead
        num_slots = slots(self.capacity, x.shape[1]) if lookahead else x.shape[1]
        return self.route(x, self.decide(x, real, lookahead), num_slots)

    def decide(
        self,
        x: Tensor,
        real: Tensor | None,
        lookahead: bool,
        candidates: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> "Decision":
        """Which tokens are chosen, of the `candidates` (B, T) or else of all real ones.

        `positions` (B or 1, T) are the tokens' own, by default their places among the row's real tokens.
        """
        if real is None:
            real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        candidates = real if candidates is None else candidates
        predictor_logits = None if self.predictor is None else self.predictor(x)  # (B, T)
        scores: Tensor | None = None  # (B, T)
        if self.scheme == "random":
            scores = self.noise(real, positions, with_step=lookahead and self.training)
        # A causal predictor decides without the score, which is needed only if somebody is chosen.
        elif lookahead or predictor_logits is None:
            scores = self.score(x)
        dropped = None
        if not lookahead:
            guess = scores if predictor_logits is None else predictor_logits
            assert guess is not None
            chosen = candidates & (guess > self.cutoff)
        else:
            assert scores is not None
            k = slots(self.capacity, real.sum(1))  # (B,)
            if self.scheme == "token_choice":
                wanted = candidates & (scores > self.cutoff)
                chosen = first_k(wanted, k)
                dropped = wanted.sum(1) - chosen.sum(1)
            else:
                chosen = top_k(scores.masked_fill(~candidates, -torch.inf), k)
            if self.estimates and self.training:
                self.observe(scores, chosen, candidates)
        return Decision(chosen, real, candidates, dropped, scores, predictor_logits)

    def route(self, x: Tensor, decision: "Decision", num_slots: int, is_whole: bool = False) -> Route:
        """The route of a decision about the stream x; `is_whole` if every token was chosen."""
        chosen, real, candidates, dropped, scores, predictor_logits = decision
        learned = self.score(x) if scores is None or self.scheme == "random" else scores
        scores = learned if scores is None else scores
        weight = weigh(learned, self.gate)
        if is_whole:
            return WholeRoute.of(weight, scores, predictor_logits, real, candidates)
        return Route.choose(chosen, weight, scores, predictor_logits, real, num_slots, candidates, dropped)

    @property
    def looks_ahead(self) -> bool:
        """Whether it chooses as in training: there, in `mixdepth.lookahead`, and where there is no causal rule."""
        return self.training or self.forced_lookahead > 0 or (self.causal is None and self.scheme in LOOKS_AHEAD)

    def edge_of_choice(self) -> Tensor | float:
        return NormalDist().inv_cdf(1 - self.capacity) if self.scheme == "random" else self.threshold

    def score(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T), in float32 or better even under autocast."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        if self.gate == "straight":  # the weight is 1 whatever the stream: only the router is told what more would do
            x = x.detach()
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(dtype)
            scores: Tensor = _unadapted(self.projection)(x)[..., 0]
            return scores if self.router_input == "stream" else scores * inverse_size(x)

    def noise(self, real: Tensor, positions: Tensor | None, with_step: bool) -> Tensor:
        """The scores (B, T) of `random`, new in each training step and the same in all evaluation."""
        assert self.step is not None
        if positions is None:
            positions = (real.cumsum(1) - 1).clamp(min=0)
        return gaussian(positions, *self.noise_keys, self.step.long() + 1 if with_step else 0).expand(real.shape)

    def extra_repr(self) -> str:
        return f"{self.scheme}, capacity={self.capacity}, gate={self.gate!r}, causal={self.causal!r}"


class Decision(NamedTuple):
    """Which tokens of a stream are chosen, and by what."""

    chosen: Tensor  # (B, T) bool
    real: Tensor  # (B, T) bool: False for padding tokens
    candidates: Tensor  # (B, T) bool: the tokens there were to choose from
    dropped: Tensor | None  # (B,) long: how many chose the block and found it full
    scores: Tensor | None  # (B, T): the scores, if they had a say
    predictor_logits: Tensor | None  # (B, T)

    def select(self, rows: Tensor) -> "Decision":
        """The decision about these rows alone."""
        return Decision(*(None if field is None else field[rows] for field in self))  # type: ignore[arg-type]


class RouterLinear(nn.Linear):
    """A linear layer that computes in the dtype of its input, whatever the dtype of its weights.

    Routers call it as a module and never read its weights: where weights are offloaded, a hook on the call brings
    them in.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias, dtype=router_dtype())

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Map (B, T, I) to (B, T, O): the product with the weights times `scale` (B, T, 1), plus the bias."""
        y = F.linear(x, self.weight.to(x.dtype))
        if scale is not None:
            y = y * scale
        if self.bias is not None:
            y = y + self.bias.to(x.dtype)
        return y


class Predictor(nn.Module):
    """Guesses from one token whether top-k would choose it. No gradient leaves it for the model."""

    def __init__(self, width: int, hidden: float) -> None:
        super().__init__()
        num_hidden = max(1, round(hidden * width)) if hidden else 0
        self.up = RouterLinear(width, num_hidden or 1)
        self.down = RouterLinear(num_hidden, 1) if num_hidden else None

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
        scale = inverse_size(x)[..., None]  # (B, T, 1)
        with torch.autocast(x.device.type, enabled=False):
            h = _unadapted(self.up)(x, scale)  # (B, T, H)
            if self.down is not None:
                h = _unadapted(self.down)(F.silu(h))  # (B, T, 1)
        logits: Tensor = h[..., 0]
        return logits


def inverse_size(x: Tensor) -> Tensor:
    """(B, T): one over the root mean square of each token of the stream x (B, T, D)."""
    inverse: Tensor = x.shape[-1] ** 0.5 / torch.linalg.vector_norm(x, dim=-1).clamp(min=1e-6)
    return inverse


def _unadapted(layer: nn.Module) -> nn.Module:
    """Return the layer, or refuse it if an adapter was wrapped around it: an adapter does not know of `scale`."""
    if isinstance(layer, RouterLinear):
        return layer
    raise ValueError(
        "an adapter was put into a router, whose scaling it does not know: leave depth_router out of target_modules "
        "and name it in modules_to_save, or use mixdepth.lora_config(model)"
    )


def check_not_recorded() -> None:
    """Refuse to be traced or exported where the program follows the choice of tokens: a record holds one choice."""
    way_out = "do so in training mode or within mixdepth.lookahead(model), where shapes do not depend on the choice"
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise ValueError(f"torch.jit.trace would freeze the tokens that this one input chose: {way_out}")
    if torch.compiler.is_exporting():
        raise ValueError(f"torch.export cannot record which tokens are chosen and which layers are skipped: {way_out}")


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
        case "straight":
            return torch.ones_like(logits) + (logits - logits.detach())  # 1 to the bit
        case "one":
            return torch.ones_like(logits)
