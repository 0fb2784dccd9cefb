"""Router: scores tokens, decides which ones are processed, and weighs them. No other module decides.

Shapes: B batch, T tokens, D width, H hidden units of the predictor.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixdepth import schemes
from mixdepth.config import DepthConfig
from mixdepth.routes import Route, WholeRoute, edge, first_k, gaussian, slots, top_k
from mixdepth.schemes import Gate


class Chooser(nn.Module):
    """The base of all modules that choose tokens: look-ahead, and a threshold for when there is none."""

    capacity: float | None
    """The fraction of the tokens to choose. None sets no limit."""
    threshold: Tensor
    """() or, for experts, (A,): the score that a token must exceed by the causal rule."""
    observed: Tensor | float
    """(2, ...): the thresholds that would have chosen as training did since the last update, summed over rows, and the
    number of rows."""
    forced_lookahead: int = 0
    """How many `mixdepth.lookahead` contexts are open."""

    def __init__(self, shape: tuple[int, ...], config: DepthConfig, estimates: bool) -> None:
        super().__init__()
        self.momentum = config.threshold_momentum
        self.estimates = estimates
        """Whether the threshold is a running estimate. Otherwise it stays at 0, where both choices are as likely."""
        self.observed = 0.0  # from the start, or torch.compile would make a second graph once it exists
        self.register_buffer("threshold", torch.empty(shape, dtype=router_dtype()))

    def reset_threshold(self) -> None:
        """Forget the estimate: an unknown threshold is NaN."""
        nn.init.constant_(self.threshold, torch.nan if self.estimates else 0.0)

    def remember_edge(self, scores: Tensor, chosen: Tensor, candidates: Tensor) -> None:
        """Remember, until the next update, the threshold that would have made this choice among scores (B, ..., T).

        A recomputation adds the same values once more for every micro-batch, which does not change their mean.
        """
        at = edge(scores.detach(), chosen, candidates)  # (B, ...)
        rows = chosen.any(-1)  # (B, ...)
        sums = torch.stack([at.where(rows, 0).sum(0), rows.sum(0).to(at.dtype)])  # (2, ...)
        self.observed = self.observed + sums

    @torch.no_grad()
    def update(self, observed: Tensor) -> None:
        """Move the threshold towards the mean of the observed ones, given as sums and number of rows (2, ...)."""
        total, num_rows = observed.to(self.threshold.dtype)
        mean = total / num_rows
        moved = torch.lerp(mean, self.threshold, self.momentum).where(~self.threshold.isnan(), mean)
        self.threshold.copy_(moved.where(num_rows > 0, self.threshold))
        self.observed = 0.0

    @property
    def cutoff(self) -> Tensor | float:
        """The score that a token must exceed by the causal rule. At full capacity every score does."""
        return -torch.inf if self.capacity == 1 else self.edge_of_choice()

    def edge_of_choice(self) -> Tensor | float:
        """The score that a token must exceed below full capacity."""
        return self.threshold

    def check_ready(self) -> None:
        """Refuse to choose by a threshold that holds no number or was never estimated."""
        if self.threshold.is_meta:
            raise ValueError(
                "the buffers of routers hold no numbers: offload with offload_buffers=False, or initialise the model "
                "with init_weights() first"
            )
        if not self.estimates or self.capacity == 1:
            return
        check_not_recorded()  # already here, because the next line reads the thresholds on the host
        if self.threshold.isnan().any():
            raise ValueError(
                "the thresholds were never estimated: call mixdepth.update_routers(model) after each optimizer step, "
                "or mixdepth.calibrate(model, batches)"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "forced_lookahead": 0}  # a copy is in none of the contexts

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or cast, but keep float32 where the model is cast to half precision.

        Loading keeps routers in float32, too. In half precision scores would tie, and a running mean would lose the
        small steps of its updates.
        """

        def in_float32_or_better(tensor: Tensor) -> Tensor:
            changed: Tensor = fn(tensor)
            if changed.is_floating_point() and changed.dtype.itemsize < 4:
                return tensor.to(changed.device, torch.float32)
            return changed

        return super()._apply(in_float32_or_better, recurse)  # type: ignore[no-untyped-call]


class Router(Chooser):
    """Gives each token a linear score, r = w . x, and chooses and weighs tokens by it.

    With look-ahead the router chooses as in training, over the whole row: its top k tokens. Without it, the router
    decides about each token separately, as the scheme or `config.causal` says.
    """

    capacity: float
    layer: int | None
    """The index of the decoder layer. None for a block outside a language model."""
    step: Tensor | None
    """(): the number of optimizer steps so far, which is a key of the noise of `random` in training."""
    given: "GivenScores | None" = None
    """The scores that replace the router's own within `mixdepth.given_scores`."""
    records: "tuple[list[Observation], ...]" = ()
    """The lists to which the open `mixdepth.observe` contexts want this router's observations added."""

    def __init__(self, width: int, config: DepthConfig, capacity: float, layer: int | None = None) -> None:
        super().__init__((), config, estimates=config.causal == "threshold")
        self.capacity = capacity
        self.scheme = config.scheme
        self.gate = config.gate
        self.causal = config.causal
        self.init_std = config.init_std
        self.router_input = config.router_input
        self.layer = layer
        self.noise_keys = (config.seed, layer or 0)
        self.projection = RouterLinear(width, 1, bias=False)
        # A weight that no loss reaches must not wait for a gradient: distributed training would wait forever.
        is_trained = config.gate != "one" or schemes.trains_scores(config.scheme, config.causal)
        self.projection.weight.requires_grad_(is_trained)
        self.predictor: Predictor | None = None
        if config.causal == "predictor":
            self.predictor = Predictor(width, config.predictor_width)
        step = None
        if schemes.uses_noise(config.scheme):
            step = torch.zeros((), dtype=torch.long)
        self.register_buffer("step", step)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weights, the threshold and the number of steps."""
        nn.init.normal_(self.projection.weight, std=self.init_std)
        self.reset_threshold()
        if self.predictor is not None:
            self.predictor.reset_parameters()
        if self.step is not None:
            nn.init.zeros_(self.step)

    def forward(self, x: Tensor, real: Tensor | None = None, lookahead: bool | None = None) -> Route:
        """Route the stream x (B, T, D); `real` (B, T) is False at padding tokens.

        `lookahead` says whether the choice may depend on later tokens. None follows the mode of the module.
        """
        if lookahead is None:
            lookahead = self.looks_ahead
        num_slots = x.shape[1]
        if lookahead:
            num_slots = slots(self.capacity, num_slots)
        decision = self.decide(x, real, lookahead)
        return self.route(x, decision, num_slots)

    def decide(
        self,
        x: Tensor,
        real: Tensor | None,
        lookahead: bool,
        candidates: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> "Decision":
        """Choose tokens of the stream x (B, T, D) among the `candidates` (B, T), or else among all real ones.

        `positions` (B or 1, T) are the tokens' positions. The default is their places among the row's real tokens.
        """
        if real is None:
            real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)  # (B, T)
        if candidates is None:
            candidates = real
        # 1. Find the scores that are compared. A causal predictor decides without the router's own score, which is
        #    then needed only if a token is chosen.
        predictor_logits: Tensor | None = None  # (B, T)
        own_scores: Tensor | None = None  # (B, T)
        scores: Tensor | None = None  # (B, T)
        if self.predictor is not None:
            predictor_logits = self.predictor(x)
        if self.given is not None:
            scores = self.given.scores_of(self.read(x))
        elif schemes.uses_noise(self.scheme):
            scores = self.noise(real, positions, with_step=lookahead and self.training)
        elif lookahead or predictor_logits is None:
            own_scores = self.score(x)
            scores = own_scores

        # 2. Choose. With look-ahead there is room for exactly k tokens; otherwise each token decides for itself.
        dropped = None
        if lookahead:
            assert scores is not None
            k = slots(self.capacity, real.sum(1))  # (B,)
            if schemes.limits_in_stream_order(self.scheme):
                wanted = candidates & (scores > self.cutoff)  # (B, T)
                chosen = first_k(wanted, k)  # (B, T)
                dropped = wanted.sum(1) - chosen.sum(1)  # (B,)
            else:
                chosen = top_k(scores.masked_fill(~candidates, -torch.inf), k)
            if self.estimates and self.training:
                self.remember_edge(scores, chosen, candidates)
        else:
            guess = predictor_logits if scores is None else scores  # (B, T)
            assert guess is not None
            chosen = candidates & (guess > self.cutoff)

        decision = Decision(
            chosen=chosen,
            real=real,
            candidates=candidates,
            dropped=dropped,
            scores=scores,
            own_scores=own_scores,
            predictor_logits=predictor_logits,
        )
        self._record_decision(x, decision)
        return decision

    def route(self, x: Tensor, decision: "Decision", num_slots: int, is_whole: bool = False) -> Route:
        """Make the route of a decision about the stream x (B, T, D); `is_whole` if every token was chosen."""
        own_scores = decision.own_scores
        if own_scores is None:
            own_scores = self.score(x)  # (B, T)
        scores = decision.scores
        if scores is None:
            scores = own_scores
        weight = weigh(own_scores, self.gate)  # (B, T)
        if is_whole:
            return WholeRoute.of(weight, scores, decision.predictor_logits, decision.real, decision.candidates)
        return Route.choose(
            decision.chosen,
            weight,
            scores,
            decision.predictor_logits,
            decision.real,
            num_slots,
            decision.candidates,
            decision.dropped,
        )

    @property
    def looks_ahead(self) -> bool:
        """Whether the router chooses as in training: in training, within `mixdepth.lookahead`, and where a scheme that
        looks ahead has no causal rule."""
        has_no_other_rule = self.causal is None and schemes.looks_ahead(self.scheme)
        return self.training or self.forced_lookahead > 0 or has_no_other_rule

    def edge_of_choice(self) -> Tensor | float:
        """The score that a token must exceed below full capacity."""
        if schemes.uses_noise(self.scheme):
            return NormalDist().inv_cdf(1 - self.capacity)
        return self.threshold

    def score(self, x: Tensor) -> Tensor:
        """The router's own scores (B, T) of the stream x (B, T, D), in float32 or better even under autocast."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        if self.gate == "straight":  # the weight is always 1, so the stream must get no gradient through the score
            x = x.detach()
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(dtype)
            scores: Tensor = _unadapted(self.projection)(x)[..., 0]  # (B, T)
            return scores if self.router_input == "stream" else scores * inverse_size(x)

    def read(self, x: Tensor) -> Tensor:
        """What the router reads (B, T, D) of the stream x (B, T, D): in float32 or better, and scaled for `normed`."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.router_input == "normed":
            return x * inverse_size(x)[..., None]
        return x

    def noise(self, real: Tensor, positions: Tensor | None, with_step: bool) -> Tensor:
        """The scores (B, T) of `random`: new in each training step, and the same in all evaluation."""
        assert self.step is not None
        if positions is None:
            positions = (real.cumsum(1) - 1).clamp(min=0)  # (B, T)
        step: Tensor | int = 0
        if with_step:
            step = self.step.long() + 1
        return gaussian(positions, *self.noise_keys, step).expand(real.shape)

    def record_move(self, before: Tensor, after: Tensor) -> None:
        """Complete the open observations: the tokens of the last decision moved from `before` to `after` (B, T, D)."""
        for record in self.records:
            if record and record[-1].moved is None:
                record[-1] = replace(record[-1], moved=after.detach() - before.detach())

    def _record_decision(self, x: Tensor, decision: "Decision") -> None:
        """Add an observation of this decision about the stream x (B, T, D) to the records of `mixdepth.observe`."""
        for record in self.records:
            own_scores = decision.own_scores
            if own_scores is None:
                own_scores = self.score(x)  # (B, T)
            observation = Observation(
                read=self.read(x).detach(),
                own_scores=own_scores.detach(),
                scores=decision.guess.detach(),
                chosen=decision.chosen,
                real=decision.real,
            )
            record.append(observation)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "given": None, "records": ()}

    def extra_repr(self) -> str:
        return f"{self.scheme}, capacity={self.capacity}, gate={self.gate!r}, causal={self.causal!r}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Decision:
    """The tokens of a stream that are chosen, and the scores that chose them."""

    chosen: Tensor  # (B, T) bool
    real: Tensor  # (B, T) bool: False for padding tokens
    candidates: Tensor  # (B, T) bool: the tokens among which the router chose
    dropped: Tensor | None  # (B,) long: the number of tokens that asked for the block and found it full
    scores: Tensor | None  # (B, T): the scores that were compared. None if a predictor decided
    own_scores: Tensor | None  # (B, T): the router's own scores. None if they were not needed for the choice
    predictor_logits: Tensor | None  # (B, T)

    @property
    def guess(self) -> Tensor:
        """(B, T): the scores by which the decision was made, or the predictor's logits if those decided."""
        if self.scores is not None:
            return self.scores
        assert self.predictor_logits is not None
        return self.predictor_logits

    def select(self, rows: Tensor) -> "Decision":
        """The same decision for these rows alone."""
        selected: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                value = value[rows]
            selected[field.name] = value
        return Decision(**selected)


@dataclass(frozen=True, kw_only=True, eq=False)
class Observation:
    """What one router read, decided and moved in one forward pass (see `mixdepth.observe`)."""

    read: Tensor
    """(B, T, D): the stream as the router reads it, in float32 or better."""
    own_scores: Tensor
    """(B, T): the router's own scores, from which the gate follows."""
    scores: Tensor
    """(B, T): what was compared: the router's own scores, given ones, noise, or the logits of a predictor."""
    chosen: Tensor
    """(B, T) bool: the chosen tokens."""
    real: Tensor
    """(B, T) bool: False at padding tokens."""
    moved: Tensor | None = None
    """(B, T, D): what the routed part added to the stream, 0 at tokens that skipped it. None for a router that was
    called by itself."""


@dataclass(frozen=True)
class GivenScores:
    """Scores that replace those of a router (see `mixdepth.given_scores`)."""

    source: Tensor | Callable[[Tensor], Tensor]

    def scores_of(self, read: Tensor) -> Tensor:
        """The scores (B, T) for what the router reads (B, T, D), in its dtype."""
        scores = self.source
        if not isinstance(scores, Tensor):
            scores = scores(read)
        if scores.shape != read.shape[:2]:
            raise ValueError(
                f"given scores must have the shape {tuple(read.shape[:2])} of the stream's tokens, not "
                f"{tuple(scores.shape)}: give a function of what the router reads where the number of tokens changes"
            )
        return scores.to(read)


class RouterLinear(nn.Linear):
    """A linear layer that computes in the dtype of its input, whatever the dtype of its weights.

    Routers call it as a module and never read its weights: where weights are offloaded, a hook on the call brings
    them in.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias, dtype=router_dtype())

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Map (B, T, I) to (B, T, O): the product with the weights times `scale` (B, T, 1), plus the bias."""
        y = F.linear(x, self.weight.to(x.dtype))  # (B, T, O)
        if scale is not None:
            y = y * scale
        if self.bias is not None:
            y = y + self.bias.to(x.dtype)
        return y


class Predictor(nn.Module):
    """Predicts from one token whether top-k would choose it. It sends no gradient into the model."""

    def __init__(self, width: int, hidden: float) -> None:
        super().__init__()
        self.down: RouterLinear | None = None
        if hidden == 0:  # a linear predictor
            self.up = RouterLinear(width, 1)
        else:
            num_hidden = max(1, round(hidden * width))
            self.up = RouterLinear(width, num_hidden)
            self.down = RouterLinear(num_hidden, 1)

    def reset_parameters(self) -> None:
        """Initialise the weights."""
        self.up.reset_parameters()
        if self.down is not None:
            self.down.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Map the stream x (B, T, D) to logits (B, T)."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        x = x.detach().to(dtype)
        # The predictor reads the normalised stream, because its scale grows over layers and training by orders of
        # magnitude. Scaling the few hidden units instead of the stream saves a copy of the stream.
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
    """Return the layer, or refuse it if an adapter was wrapped around it: an adapter has no argument `scale`."""
    if isinstance(layer, RouterLinear):
        return layer
    raise ValueError(
        "an adapter was put into a router, and adapters do not know its scaling: leave depth_router out of "
        "target_modules and name it in modules_to_save, or use mixdepth.lora_config(model)"
    )


def check_not_recorded() -> None:
    """Refuse to be traced or exported where the program depends on the chosen tokens: a record holds one choice."""
    way_out = "do so in training mode or within mixdepth.lookahead(model), where shapes do not depend on the choice"
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise ValueError(f"torch.jit.trace would freeze the tokens that this one input chose: {way_out}")
    if torch.compiler.is_exporting():
        raise ValueError(f"torch.export cannot record which tokens are chosen and which layers are skipped: {way_out}")


def router_dtype() -> torch.dtype:
    """Return the dtype of routers, float32 or better: in bf16 many scores tie, and ties reorder the top-k."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


def weigh(logits: Tensor, gate: Gate) -> Tensor:
    """The gate: how far each token moves if it is chosen, from its score. Both have the shape (B, T)."""
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
            # The value is 1 to the bit, and the gradient is that of the score.
            return torch.ones_like(logits) + (logits - logits.detach())
        case "one":
            return torch.ones_like(logits)
