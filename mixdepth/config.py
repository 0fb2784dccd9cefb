"""DepthConfig: every routing setting in one frozen value, validated and JSON-ready. No torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from typing import Any, Literal, get_args

Gate = Literal["raw", "sigmoid", "tanh", "unit", "one"]
CausalRule = Literal["predictor", "aux_loss"]

MAX_DENOMINATOR = 10**6
FORMAT_VERSION = 1
"""Version of the routing settings in config.json; a newer one is refused, not guessed at."""


@dataclass(frozen=True, kw_only=True)
class DepthConfig:
    """How tokens are routed around layers.

    >>> DepthConfig(capacity=0.25, every=2).routed_layers(6)
    {1: 0.25, 3: 0.25, 5: 0.25}
    """

    capacity: float | tuple[float, ...] = 0.125
    """Fraction of a sequence's tokens that a routed layer processes, in (0, 1]: one number for all
    routed layers or one for each. At 1 every token is chosen in every mode. Paper: 0.125 is best of
    0.125 to 0.95; below it degrades."""

    every: int = 2
    """Route every n-th layer. Paper: every second layer; routing all of them is clearly worse."""

    first: int | None = None
    """Index of the first routed layer; None is `every - 1`, so that the n-th, 2n-th ... layers are
    routed. Paper: not stated (its Fig. 5 reads as 0)."""

    layers: tuple[int, ...] | None = None
    """The routed layers by index, in place of `every` and `first`."""

    gate: Gate = "raw"
    """Weight w of a chosen token, x + w * (block(x) - x): its score as it is (`raw`), squashed
    (`sigmoid`, `tanh`), 1 + tanh(score) (`unit`: starts at the block itself), or 1 (`one`: no
    gradient reaches the router). Paper: raw in Eq. 1, though its Fig. 5 shows weights in [0, 1]."""

    init_std: float = 0.02
    """Standard deviation of the router's initial weights; 0 starts all scores at 0. Paper: not
    stated."""

    causal: CausalRule | None = None
    """The rule that replaces top-k where later tokens are not known: a second, small network trained
    to predict the top-k choice, with no gradient into the model (`predictor`), or the router's own
    score, drawn towards the choice by a loss (`aux_loss`). Paper: describes both. None is top-k in
    evaluation too, for blocks that sample nothing; a language model samples, so `mixdepth.route`
    puts `predictor` in its place."""

    predictor_width: float = 0.125
    """Hidden units of the predictor as a fraction of the model's width; 0 makes it linear. Paper:
    not stated."""

    predictor_loss_coef: float = 0.01
    """Weight of the predictor's loss in the training loss. It scales no gradient but the predictor's
    own. Paper: not stated."""

    router_aux_loss_coef: float = 0.01
    """Weight of the auxiliary loss on the router (`causal="aux_loss"`). Paper: not stated; costs
    0.2 to 0.3 % of the language-model loss."""

    def __post_init__(self) -> None:
        if isinstance(self.capacity, Sequence) and not isinstance(self.capacity, str):
            object.__setattr__(self, "capacity", tuple(check_capacity(c) for c in self.capacity))
        else:
            object.__setattr__(self, "capacity", check_capacity(self.capacity))
        _check_integer("every", self.every, minimum=1)
        if self.first is not None:
            _check_integer("first", self.first, minimum=0)
        if self.layers is not None:
            if isinstance(self.layers, str) or not isinstance(self.layers, Sequence):
                raise ValueError(f"layers must be a list of layer indices, not {self.layers!r}")
            object.__setattr__(self, "layers", tuple(self.layers))
            for layer in self.layers:
                _check_integer("layers", layer, minimum=0)
            if not self.layers or len(set(self.layers)) < len(self.layers):
                raise ValueError(f"layers must name each routed layer once, not {list(self.layers)}")
            if self.first is not None:
                raise ValueError(
                    f"first={self.first} has no meaning beside layers={list(self.layers)}: give one of them"
                )
        _check_choice("gate", self.gate, get_args(Gate))
        _check_choice("causal", self.causal, (*get_args(CausalRule), None))
        for name in ("init_std", "predictor_width", "predictor_loss_coef", "router_aux_loss_coef"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a number of at least 0, not {value!r}")

    def routed_layers(self, num_layers: int) -> dict[int, float]:
        """The routed layers of a model with `num_layers` layers, in order, each with its capacity."""
        if self.layers is not None:
            layers = list(self.layers)
            if max(layers) >= num_layers:
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
        return dict(sorted(zip(layers, capacities, strict=True)))

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


def check_capacity(capacity: object) -> float:
    if not _is_number(capacity) or not 0 < capacity <= 1:  # type: ignore[operator]
        raise ValueError(f"capacity must be a fraction in (0, 1], not {capacity!r}")
    return float(capacity)  # type: ignore[arg-type]


def as_ratio(capacity: float) -> tuple[int, int]:
    """The capacity as the simple fraction that was meant: 0.07 is 7/100, not its nearest float."""
    ratio = Fraction(capacity).limit_denominator(MAX_DENOMINATOR) or Fraction(1, MAX_DENOMINATOR)
    return ratio.numerator, ratio.denominator


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def _check_integer(name: str, value: object, *, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name} must be a whole number of at least {minimum}, not {value!r}")


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")
