"""DepthConfig: every routing setting in one frozen value, validated and JSON-ready. No torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from itertools import pairwise
from typing import Any, Literal, get_args

Gate = Literal["raw", "sigmoid", "tanh", "unit", "straight", "one"]
CausalRule = Literal["predictor", "aux_loss", "threshold"]
Scheme = Literal["expert_choice", "token_choice", "early_exit", "random", "soft"]
Target = Literal["block", "attention", "mlp"]
GateOn = Literal["block", "mlp"]
RouterInput = Literal["stream", "normed"]
ExpertScheme = Literal["token_choice", "expert_choice"]

LOOKS_AHEAD = ("expert_choice", "early_exit")
"""The schemes whose choice depends on later tokens: they need a causal rule for sampling."""
MAX_DENOMINATOR = 10**6
FORMAT_VERSION = 3
"""Version of the routing settings in config.json; a newer one is refused, not guessed at."""


@dataclass(frozen=True, kw_only=True)
class DepthConfig:
    """How tokens are routed around layers.

    >>> DepthConfig(capacity=0.25, every=2).routed_layers(6)
    {1: 0.25, 3: 0.25, 5: 0.25}
    """

    scheme: Scheme = "expert_choice"
    """Who chooses. `expert_choice`: each layer takes its top k tokens (the paper). `token_choice`: each
    token decides from its own score. `early_exit`: a token that a layer does not choose skips all
    later layers too. `random`: top k of Gaussian noise, the paper's control; the gate is still learned.
    `soft`: every token passes, weighted by its gate; nothing is saved. See docs/family.md."""

    capacity: float | tuple[float, ...] = None  # type: ignore[assignment]
    """Fraction of a sequence's tokens that a routed layer processes, in (0, 1]: one number for all
    routed layers or one for each; for `early_exit` a falling list, one for each exit. At 1 every token
    is chosen in every mode. Default 0.125, for `soft` 1. Paper: 0.125 is best of 0.125 to 0.95; below
    it degrades."""

    every: int = 2
    """Route every n-th layer. Paper: every second layer; routing all of them is clearly worse."""

    first: int | None = None
    """Index of the first routed layer; None is `every - 1`, so that the n-th, 2n-th ... layers are
    routed. Paper: not stated (its Fig. 5 reads as 0)."""

    layers: tuple[int, ...] | None = None
    """The routed layers by index, in place of `every` and `first`; for `early_exit` the exits. Empty
    where only the experts are routed (`experts`)."""

    target: Target = "block"
    """What a token skips: the whole block (the paper), its attention alone or its MLP alone. The router
    reads the stream where that part begins."""

    gate: Gate = None  # type: ignore[assignment]
    """Weight w of a chosen token, x + w * (block(x) - x): its score as it is (`raw`), squashed
    (`sigmoid`, `tanh`), 1 + tanh(score) (`unit`: starts at the block itself), 1 with the score's
    gradient for the router alone (`straight`: the block itself, and the router learns), or 1 (`one`:
    no gradient reaches the router). Default `raw`, for `soft` `sigmoid`. Paper: raw in Eq. 1, though
    its Fig. 5 shows weights in [0, 1]."""

    gate_on: GateOn = "block"
    """What the weight multiplies: the update of all that is routed (Eq. 1 of the paper), or the MLP's
    update alone, with attention at full weight (its Fig. 1)."""

    router_input: RouterInput = "stream"
    """What the router scores: the stream as it is, or scaled to a root mean square of 1 (`normed`), which a pretrained
    model needs, whose stream grows by orders of magnitude from layer to layer. Paper: the stream."""

    init_std: float = 0.02
    """Standard deviation of the router's initial weights; 0 starts all scores at 0. Paper: not
    stated."""

    causal: CausalRule | None = None
    """The rule that replaces top-k where later tokens are not known: a second, small network trained
    to predict the top-k choice, with no gradient into the model (`predictor`); the router's own
    score, drawn towards the choice by a loss (`aux_loss`); or the router's own score against a running
    estimate of the k-th highest, with no loss (`threshold`; see `mixdepth.update_routers`). Paper:
    describes the first two. None is top-k in evaluation too, for blocks that sample nothing; a
    language model samples, so `mixdepth.route` puts `predictor` in its place. Only for
    `expert_choice` and `early_exit`: the other schemes are causal as they are."""

    predictor_width: float = 0.125
    """Hidden units of the predictor as a fraction of the model's width; 0 makes it linear. Paper:
    not stated."""

    predictor_loss_coef: float = 0.01
    """Weight of the predictor's loss in the training loss. It scales no gradient but the predictor's
    own. Paper: not stated."""

    router_aux_loss_coef: float = 0.01
    """Weight of the auxiliary loss on the router (`causal="aux_loss"`). Paper: not stated; costs
    0.2 to 0.3 % of the language-model loss."""

    capacity_loss_coef: float = 1.0
    """Weight of the loss that holds `token_choice` at its capacity."""

    threshold_momentum: float = 0.95
    """How much of the old threshold an update keeps (`causal="threshold"`, `experts="expert_choice"`)."""

    seed: int = 0
    """Of the noise by which `random` chooses."""

    experts: ExpertScheme | None = None
    """How tokens and the experts of a mixture-of-experts model find each other: each token picks its
    experts (`token_choice`) or each expert its tokens (`expert_choice`), in all layers that have
    experts, with load statistics. None leaves the experts to transformers."""

    expert_capacity: float | None = None
    """Fraction of the tokens that one expert takes. For expert choice None is an equal share,
    experts per token / number of experts; for token choice None is no limit, and a limit drops the
    tokens over it in training, in stream order."""

    num_noop_experts: int = 0
    """No-op experts beside the others: who is routed there keeps its value (integrated MoDE)."""

    expert_balance_coef: float = 0.01
    """Weight of the balance loss of `experts="token_choice"`."""

    def __post_init__(self) -> None:
        for name, choices in (
            *(("scheme", Scheme), ("target", Target), ("gate_on", GateOn)),
            ("router_input", RouterInput),
        ):
            _check_choice(name, getattr(self, name), get_args(choices))
        is_soft = self.scheme == "soft"
        if self.capacity is None:
            object.__setattr__(self, "capacity", 1.0 if is_soft else 0.125)
        if self.gate is None:
            object.__setattr__(self, "gate", "sigmoid" if is_soft else "raw")
        if isinstance(self.capacity, Sequence) and not isinstance(self.capacity, str):
            object.__setattr__(self, "capacity", tuple(check_capacity(c) for c in self.capacity))
        else:
            object.__setattr__(self, "capacity", check_capacity(self.capacity))
        _check_choice("gate", self.gate, get_args(Gate))
        _check_choice("causal", self.causal, (*get_args(CausalRule), None))
        _check_choice("experts", self.experts, (*get_args(ExpertScheme), None))
        self._check_layers()
        for name in ("seed", "num_noop_experts"):
            check_integer(name, getattr(self, name), minimum=0)
        if self.seed >= 2**32:
            raise ValueError(f"seed must be below 2**32, not {self.seed}")
        for name in (
            *("init_std", "predictor_width", "predictor_loss_coef", "router_aux_loss_coef", "capacity_loss_coef"),
            *("threshold_momentum", "expert_balance_coef"),
        ):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a number of at least 0, not {value!r}")
        if self.threshold_momentum >= 1:
            raise ValueError(f"threshold_momentum must be below 1, not {self.threshold_momentum}")
        if self.expert_capacity is not None:
            object.__setattr__(self, "expert_capacity", check_capacity(self.expert_capacity, "expert_capacity"))
        self._check_sense()

    def _check_layers(self) -> None:
        check_integer("every", self.every, minimum=1)
        if self.first is not None:
            check_integer("first", self.first, minimum=0)
        if self.layers is None:
            return
        if isinstance(self.layers, str) or not isinstance(self.layers, Sequence):
            raise ValueError(f"layers must be a list of layer indices, not {self.layers!r}")
        object.__setattr__(self, "layers", tuple(self.layers))
        for layer in self.layers:
            check_integer("layers", layer, minimum=0)
        if len(set(self.layers)) < len(self.layers) or not (self.layers or self.experts):
            raise ValueError(f"layers must name each routed layer once, not {list(self.layers)}")
        for name, usual in {"first": None, "every": 2}.items():
            if getattr(self, name) != usual:
                raise ValueError(
                    f"{name}={getattr(self, name)} has no meaning beside layers={list(self.layers)}: give one of them"
                )
        for name, default in {"scheme": "expert_choice", "target": "block", "gate_on": "block"}.items():
            if not self.layers and getattr(self, name) != default:
                raise ValueError(f"{name}={getattr(self, name)!r} has no meaning where layers=[] routes none")

    def _check_sense(self) -> None:
        """Refuse settings that contradict each other."""
        if self.causal is not None and self.scheme not in LOOKS_AHEAD:
            raise ValueError(
                f"causal={self.causal!r} has no meaning with scheme={self.scheme!r}, which is causal as it is: leave "
                "it out"
            )
        if self.scheme == "soft" and self.capacity != 1:
            raise ValueError(f"scheme='soft' processes every token: leave out capacity={self.capacity}")
        if self.gate == "straight" and self.scheme in ("random", "soft"):
            raise ValueError(
                f"gate='straight' tells the router whom to choose, and scheme={self.scheme!r} does not ask it: use "
                "gate='one'"
            )
        if self.scheme == "early_exit" and (self.target != "block" or self.gate_on != "block"):
            raise ValueError(
                f"scheme='early_exit' skips whole layers: leave out target={self.target!r} and gate_on={self.gate_on!r}"
            )
        if self.gate_on == "mlp" and self.target != "block":
            raise ValueError(f"gate_on='mlp' has no meaning with target={self.target!r}: leave it out")
        if self.experts is None:
            for name in ("expert_capacity", "num_noop_experts"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name}={getattr(self, name)} needs experts='token_choice' or experts='expert_choice'"
                    )

    def routed_layers(self, num_layers: int) -> dict[int, float]:
        """The routed layers of a model with `num_layers` layers, in order, each with its capacity."""
        if self.layers is not None:
            layers = list(self.layers)
            if max(layers, default=0) >= num_layers:
                raise ValueError(f"layers must be below the model's {num_layers} layers, not {max(layers)}")
        else:
            if self.every > num_layers:
                raise ValueError(f"every must be at most the model's {num_layers} layers, not {self.every}")
            first = self.every - 1 if self.first is None else self.first
            if first >= num_layers:
                raise ValueError(f"first must be below the model's {num_layers} layers, not {first}")
            layers = list(range(first, num_layers, self.every))
        capacities = self.capacity if isinstance(self.capacity, tuple) else (self.capacity,) * len(layers)
        if len(capacities) != len(layers):
            raise ValueError(f"capacity lists {len(capacities)} values for {len(layers)} routed layers {layers}")
        routed = dict(sorted(zip(layers, capacities, strict=True)))
        if self.scheme == "early_exit":
            values = list(routed.values())
            if any(later > earlier or later == earlier < 1 for earlier, later in pairwise(values)):
                raise ValueError(
                    f"capacity must fall from one exit to the next, as fewer tokens are left: {len(values)} exits "
                    f"{list(routed)} cannot have {values}"
                )
        return routed

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, with the version of the format."""
        settings = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
        return {"version": FORMAT_VERSION, **settings}

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "DepthConfig":
        """The inverse of `to_dict`.

        >>> DepthConfig.from_dict(DepthConfig(every=3).to_dict()).every
        3
        """
        if not isinstance(settings, Mapping):
            raise ValueError(f"routing settings must be a mapping of names to values, not {settings!r}")
        settings = dict(settings)
        version = settings.pop("version", None)
        if type(version) is not int or version < 1:
            raise ValueError(f"routing settings must have a format version of at least 1, not {version!r}")
        if version > FORMAT_VERSION:
            raise ValueError(
                f"these routing settings have format version {version}, this mixdepth reads up to "
                f"{FORMAT_VERSION}: install a newer mixdepth"
            )
        unknown = sorted(settings.keys() - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"unknown routing setting {unknown[0]!r}={settings[unknown[0]]!r}")
        return cls(**settings)


def check_capacity(capacity: object, name: str = "capacity") -> float:
    if not is_number(capacity) or not 0 < capacity <= 1:  # type: ignore[operator]
        raise ValueError(f"{name} must be a fraction in (0, 1], not {capacity!r}")
    return float(capacity)  # type: ignore[arg-type]


def as_ratio(capacity: float) -> tuple[int, int]:
    """The capacity as the simple fraction that was meant: 0.07 is 7/100, not its nearest float."""
    ratio = Fraction(capacity).limit_denominator(MAX_DENOMINATOR) or Fraction(1, MAX_DENOMINATOR)
    return ratio.numerator, ratio.denominator


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def check_integer(name: str, value: object, *, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name} must be a whole number of at least {minimum}, not {value!r}")


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")
