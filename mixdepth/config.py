"""DepthConfig holds every routing setting in one frozen value, validated and ready for JSON. No torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from itertools import pairwise
from typing import Any, Literal, get_args

from mixdepth import schemes
from mixdepth.schemes import CausalRule, ExpertScheme, Gate, Scheme

Target = Literal["block", "attention", "mlp"]
GateOn = Literal["block", "mlp"]
RouterInput = Literal["stream", "normed"]

FORMAT_VERSION = 3
"""Version of the routing settings in config.json. Newer versions are refused."""
MAX_DENOMINATOR = 10**6
"""Largest denominator of the fraction that stands for a capacity."""
BY_SCHEME: Any = None
"""The default of a setting that depends on the scheme. `DepthConfig` puts the value in its place."""
EXPERT_KEYWORDS = {
    "experts": "scheme",
    "expert_capacity": "capacity",
    "num_noop_experts": "num_noop",
    "expert_balance_coef": "balance_coef",
}
"""The names of the fields of `ExpertConfig` where settings are flat: in `route()`, in flags and in JSON."""


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """How tokens and the experts of a mixture-of-experts model find each other."""

    scheme: ExpertScheme
    """How tokens are assigned to the experts of a mixture-of-experts model. `token_choice`: each token picks its
    experts. `expert_choice`: each expert picks its tokens. This holds for all layers that have experts, and adds load
    statistics. None leaves the experts to transformers."""

    capacity: float | None = None
    """Fraction of the tokens that one expert takes. For expert choice, None is an equal share: experts per token /
    number of experts. For token choice, None is no limit; a limit drops the tokens above it in training, in stream
    order."""

    num_noop: int = 0
    """Number of no-op experts in addition to the others. A token that is routed there keeps its value (integrated
    MoDE)."""

    balance_coef: float = 0.01
    """Weight of the balance loss of `experts="token_choice"`."""

    def __post_init__(self) -> None:
        _check_choice("experts", self.scheme, (*get_args(ExpertScheme), None))
        if self.capacity is not None:
            object.__setattr__(self, "capacity", check_capacity(self.capacity, "expert_capacity"))
        check_integer("num_noop_experts", self.num_noop, minimum=0)
        _check_at_least_0("expert_balance_coef", self.balance_coef)

    def to_flat(self) -> dict[str, Any]:
        """Return the settings by their flat names."""
        return {keyword: getattr(self, name) for keyword, name in EXPERT_KEYWORDS.items()}


@dataclass(frozen=True, kw_only=True)
class DepthConfig:
    """How tokens are routed around layers.

    >>> DepthConfig(capacity=0.25, every=2).routed_layers(6)
    {1: 0.25, 3: 0.25, 5: 0.25}
    """

    scheme: Scheme = "expert_choice"
    """How tokens are chosen. `expert_choice`: each layer takes its top k tokens (the paper). `token_choice`: each token
    decides from its own score. `early_exit`: a token that a layer does not choose skips all later layers too. `random`:
    top k of Gaussian noise, the paper's control; the gate is still learned. `soft`: every token is processed, weighted
    by its gate; nothing is saved. See docs/family.md."""

    capacity: float | tuple[float, ...] = BY_SCHEME
    """Share of the tokens that a routed layer processes. It lies in (0, 1], and is one number for all routed layers or
    one for each; for `early_exit` it is a falling list, one for each exit. At 1 every token is chosen in every
    mode. The default is 0.125, and 1 for `soft`. Paper: 0.125 is best of 0.125 to 0.95; lower capacities
    degrade."""

    every: int = 2
    """Route every n-th layer. Paper: every second layer; routing all of them is clearly worse."""

    first: int | None = None
    """Index of the first routed layer. None means `every - 1`, so that the n-th, 2n-th ... layers are routed. Paper:
    not stated (its Fig. 5 reads as 0)."""

    layers: tuple[int, ...] | None = None
    """Indices of the routed layers, in place of `every` and `first`. For `early_exit` they are the exits. The list is
    empty where only the experts are routed (`experts`)."""

    target: Target = "block"
    """Part of the layer that a token skips. It is the whole block (the paper), its attention alone or its MLP alone.
    The router reads the stream where that part begins."""

    gate: Gate = BY_SCHEME
    """How a score becomes the weight of a token. The weight is the w in x + w * (block(x) - x). `raw`: the score
    itself. `sigmoid`, `tanh`: the squashed score. `unit`: 1 + tanh(score), which starts at the block itself.
    `straight`: 1, with the score's gradient for the router alone, so that the router learns and the block is
    unweighted. `one`: 1, and no gradient reaches the router. The default is `raw`, and `sigmoid` for `soft`. Paper:
    raw in Eq. 1, though its Fig. 5 shows weights in [0, 1]."""

    gate_on: GateOn = "block"
    """Update that the weight multiplies. It is the update of everything that is routed (Eq. 1 of the paper), or the
    MLP's update alone, with attention at full weight (its Fig. 1)."""

    router_input: RouterInput = "stream"
    """What the router reads. `stream`: the residual stream as it is. `normed`: the stream scaled to a root mean square
    of 1, which pretrained models need, because their stream grows by orders of magnitude from layer to layer. Paper:
    the stream."""

    init_std: float = 0.02
    """Standard deviation of the router's initial weights. At 0 all scores start at 0. Paper: not stated."""

    causal: CausalRule | None = None
    """Rule that chooses without later tokens. It replaces top-k in evaluation and sampling. `predictor`: a second,
    small network learns to predict the top-k choice, with no gradient into the model. `aux_loss`: a loss moves the
    router's own score towards the choice. `threshold`: the router's own score is compared with a running estimate
    of the k-th highest score, with no loss (see `mixdepth.update_routers`). Paper: describes the first two. None is
    top-k in evaluation too, for blocks that sample nothing; a language model samples, so `mixdepth.route` replaces
    None with `predictor`. Only `expert_choice` and `early_exit` have such a rule: the other schemes are causal as
    they are."""

    predictor_width: float = 0.125
    """Hidden units of the predictor as a fraction of the model's width. 0 makes it linear. Paper: not stated."""

    predictor_loss_coef: float = 0.01
    """Weight of the predictor's loss in the training loss. It scales no gradient but the predictor's own. Paper: not
    stated."""

    router_aux_loss_coef: float = 0.01
    """Weight of the auxiliary loss on the router (`causal="aux_loss"`). Paper: not stated; costs 0.2 to 0.3 % of the
    language-model loss."""

    capacity_loss_coef: float = 1.0
    """Weight of the loss that holds `token_choice` at its capacity."""

    threshold_momentum: float = 0.95
    """Share of the old threshold that an update keeps (`causal="threshold"`, `experts="expert_choice"`)."""

    seed: int = 0
    """Random seed of the noise by which `scheme="random"` chooses."""

    experts: ExpertConfig | None = None
    """How tokens and the experts of a mixture-of-experts model find each other. None leaves the experts to
    transformers."""

    def __post_init__(self) -> None:
        _check_choice("scheme", self.scheme, get_args(Scheme))
        self._fill_in_defaults()
        for name, choices in (
            ("target", Target),
            ("gate", Gate),
            ("gate_on", GateOn),
            ("router_input", RouterInput),
        ):
            _check_choice(name, getattr(self, name), get_args(choices))
        _check_choice("causal", self.causal, (*get_args(CausalRule), None))
        if not isinstance(self.experts, ExpertConfig | None):
            raise ValueError(
                f"experts must be an ExpertConfig or None, not {self.experts!r}: or use DepthConfig.from_flat, "
                "which takes experts='token_choice'"
            )
        self._check_numbers()
        self._check_layers()
        self._check_combinations()

    def _fill_in_defaults(self) -> None:
        """Replace the defaults that depend on the scheme, and bring the capacity to its type."""
        if self.gate is BY_SCHEME:
            object.__setattr__(self, "gate", schemes.default_gate(self.scheme))
        capacity: Any = self.capacity
        if capacity is BY_SCHEME:
            capacity = schemes.default_capacity(self.scheme)
        if isinstance(capacity, Sequence) and not isinstance(capacity, str):
            checked: Any = tuple(check_capacity(value) for value in capacity)
        else:
            checked = check_capacity(capacity)
        object.__setattr__(self, "capacity", checked)

    def _check_numbers(self) -> None:
        check_integer("seed", self.seed, minimum=0)
        if self.seed >= 2**32:
            raise ValueError(f"seed must be below 2**32, not {self.seed}")
        for name in (
            "init_std",
            "predictor_width",
            "predictor_loss_coef",
            "router_aux_loss_coef",
            "capacity_loss_coef",
            "threshold_momentum",
        ):
            _check_at_least_0(name, getattr(self, name))
        if self.threshold_momentum >= 1:
            raise ValueError(f"threshold_momentum must be below 1, not {self.threshold_momentum}")

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
        routes_nothing = not self.layers and self.experts is None
        if len(set(self.layers)) < len(self.layers) or routes_nothing:
            raise ValueError(f"layers must name each routed layer once, not {list(self.layers)}")
        for name in ("first", "every"):
            if getattr(self, name) != _default(name):
                raise ValueError(
                    f"{name}={getattr(self, name)} has no meaning next to layers={list(self.layers)}: give one of them"
                )
        for name in ("scheme", "target", "gate_on"):
            if not self.layers and getattr(self, name) != _default(name):
                raise ValueError(f"{name}={getattr(self, name)!r} has no meaning where layers=[] routes none")

    def _check_combinations(self) -> None:
        """Refuse settings that contradict each other."""
        if self.causal is not None and self.causal not in schemes.causal_rules(self.scheme):
            raise ValueError(
                f"causal={self.causal!r} has no meaning with scheme={self.scheme!r}, which is causal as it is: "
                "leave it out"
            )
        if schemes.processes_everything(self.scheme) and self.capacity != 1:
            raise ValueError(f"scheme={self.scheme!r} processes every token: leave out capacity={self.capacity}")
        if self.gate not in schemes.gates(self.scheme):
            raise ValueError(
                f"gate={self.gate!r} trains the scores that choose tokens, and scheme={self.scheme!r} does not choose "
                "by scores: use gate='one'"
            )
        if schemes.ends_the_stack(self.scheme) and (self.target != "block" or self.gate_on != "block"):
            raise ValueError(
                f"scheme={self.scheme!r} skips whole layers: leave out target={self.target!r} and "
                f"gate_on={self.gate_on!r}"
            )
        if self.gate_on == "mlp" and self.target != "block":
            raise ValueError(f"gate_on='mlp' has no meaning with target={self.target!r}: leave it out")

    def routed_layers(self, num_layers: int) -> dict[int, float]:
        """Return the routed layers of a model with `num_layers` layers, in order, each with its capacity."""
        layers = self._layers_of(num_layers)
        capacities = self.capacity
        if not isinstance(capacities, tuple):
            capacities = (capacities,) * len(layers)
        if len(capacities) != len(layers):
            raise ValueError(f"capacity lists {len(capacities)} values for {len(layers)} routed layers {layers}")
        capacity_of = dict(sorted(zip(layers, capacities, strict=True)))
        if schemes.ends_the_stack(self.scheme):
            _check_falling(capacity_of)
        return capacity_of

    def _layers_of(self, num_layers: int) -> list[int]:
        if self.layers is not None:
            last = max(self.layers, default=0)
            if last >= num_layers:
                raise ValueError(f"layers must be below the model's {num_layers} layers, not {last}")
            return list(self.layers)
        if self.every > num_layers:
            raise ValueError(f"every must be at most the model's {num_layers} layers, not {self.every}")
        first = self.first
        if first is None:
            first = self.every - 1
        if first >= num_layers:
            raise ValueError(f"first must be below the model's {num_layers} layers, not {first}")
        return list(range(first, num_layers, self.every))

    def to_flat(self) -> dict[str, Any]:
        """Return the settings as `from_flat` takes them, with those of the experts among them."""
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        del settings["experts"]
        if self.experts is not None:
            return settings | self.experts.to_flat()
        for keyword, name in EXPERT_KEYWORDS.items():
            settings[keyword] = EXPERT_DEFAULTS[name]
        return settings

    @classmethod
    def from_flat(cls, **settings: Any) -> "DepthConfig":
        """Make a DepthConfig from flat settings, in which those of the experts have names of their own.

        >>> DepthConfig.from_flat(capacity=0.5, experts="token_choice", num_noop_experts=2).experts.num_noop
        2
        """
        unknown = [name for name in settings if name not in FLAT_SETTINGS]
        if unknown:
            raise ValueError(f"there is no setting {unknown[0]!r}; the settings are {', '.join(FLAT_SETTINGS)}")
        of_experts = {}
        for keyword, name in EXPERT_KEYWORDS.items():
            if keyword in settings:
                of_experts[name] = settings.pop(keyword)
        if of_experts.get("scheme") is not None:
            return cls(**settings, experts=ExpertConfig(**of_experts))
        for keyword in ("expert_capacity", "num_noop_experts"):
            value = of_experts.get(EXPERT_KEYWORDS[keyword])
            if value:
                raise ValueError(f"{keyword}={value} needs experts='token_choice' or experts='expert_choice'")
        return cls(**settings)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, with the version of the format."""
        settings: dict[str, Any] = {"version": FORMAT_VERSION}
        for name, value in self.to_flat().items():
            settings[name] = list(value) if isinstance(value, tuple) else value
        return settings

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "DepthConfig":
        """Read what `to_dict` wrote, in this version of the format or an older one.

        >>> DepthConfig.from_dict(DepthConfig(every=3).to_dict()).every
        3
        """
        if not isinstance(settings, Mapping):
            raise ValueError(f"routing settings must be a mapping of names to values, not {settings!r}")
        flat = dict(settings)
        version = flat.pop("version", None)
        if type(version) is not int or version < 1:
            raise ValueError(f"routing settings must have a format version of at least 1, not {version!r}")
        if version > FORMAT_VERSION:
            raise ValueError(
                f"these routing settings have format version {version}, this mixdepth reads up to "
                f"{FORMAT_VERSION}: install a newer mixdepth"
            )
        unknown = sorted(flat.keys() - {*FLAT_SETTINGS})
        if unknown:
            raise ValueError(f"unknown routing setting {unknown[0]!r}={flat[unknown[0]]!r}")
        return cls.from_flat(**flat)


FLAT_SETTINGS = (*(field.name for field in fields(DepthConfig) if field.name != "experts"), *EXPERT_KEYWORDS)
"""The names of all settings of `DepthConfig.from_flat`, in order."""
EXPERT_DEFAULTS = {field.name: field.default for field in fields(ExpertConfig)} | {"scheme": None}
"""The flat settings of a model without routed experts."""


def check_capacity(capacity: object, name: str = "capacity") -> float:
    """Return the capacity as a float, or refuse it if it is not a fraction in (0, 1]."""
    if not is_number(capacity) or not 0 < capacity <= 1:  # type: ignore[operator]
        raise ValueError(f"{name} must be a fraction in (0, 1], not {capacity!r}")
    return float(capacity)  # type: ignore[arg-type]


def as_ratio(capacity: float) -> tuple[int, int]:
    """Return numerator and denominator of the simple fraction that was meant: 7/100 for 0.07, not its nearest float."""
    ratio = Fraction(capacity).limit_denominator(MAX_DENOMINATOR) or Fraction(1, MAX_DENOMINATOR)
    return ratio.numerator, ratio.denominator


def is_number(value: object) -> bool:
    """Return whether the value is an int or a float, but no bool and no NaN."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def check_integer(name: str, value: object, *, minimum: int) -> None:
    """Refuse a value that is not a whole number of at least `minimum`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name} must be a whole number of at least {minimum}, not {value!r}")


def _check_at_least_0(name: str, value: Any) -> None:
    if not is_number(value) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number of at least 0, not {value!r}")


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def _check_falling(capacity_of: Mapping[int, float]) -> None:
    """Refuse capacities of exits that do not fall: at each exit, the tokens are chosen among those that are left."""
    values = list(capacity_of.values())
    for earlier, later in pairwise(values):
        stays_at_all = earlier == later == 1
        if later >= earlier and not stays_at_all:
            raise ValueError(
                f"capacity must fall from one exit to the next, as fewer tokens are left: {len(values)} exits "
                f"{list(capacity_of)} cannot have {values}"
            )


def _default(name: str) -> Any:
    """Return the default of a setting."""
    for field in fields(DepthConfig):
        if field.name == name:
            return field.default
    raise KeyError(name)
