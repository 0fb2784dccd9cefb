"""The variants that a study compares: `dense`, `mod`, `random:capacity=0.5`, `mod:every=1:gate=tanh`."""

from typing import Any, NamedTuple, get_args

from mixdepth import schemes
from mixdepth.config import FLAT_SETTINGS, DepthConfig, is_number
from mixdepth.runs.settings import BY_VARIANT, TrainConfig
from mixdepth.schemes import Scheme
from mixdepth.text import parse_value

DENSE, MOD = "dense", "mod"
DEFAULT_SCHEME: Scheme = "expert_choice"
"""The scheme of `mod`."""
DENSE_ASPECT, ROUTED_ASPECT = 32.0, 16.0
"""The width per layer: 64 x 2 for a dense model, 64 x 4 for a routed one. See experiments/05-study-settings."""


class Variant(NamedTuple):
    """One curve of the study."""

    name: str
    depth: DepthConfig | None
    training: dict[str, Any]
    """The settings of the run that the variant has for itself."""
    aspect: float
    """The width per layer."""

    @property
    def every(self) -> int:
        return 1 if self.depth is None else self.depth.every


def parse_variant(text: str) -> Variant:
    """Read a variant by its name: its kind, then settings of the routing or the run.

    Each variant has one name: the kind, and the settings that are not the defaults, in alphabetical order.

    >>> parse_variant("random:capacity=0.5").depth.scheme
    'random'
    >>> parse_variant("expert_choice:gate=tanh:capacity=0.125").name
    'mod:gate=tanh'
    """
    # 1. Separate the kind from the settings, and settings of the routing from those of the run.
    kind, *words = text.split(":")
    _check_kind(kind)
    is_dense = kind == DENSE
    settings = _settings(words, text)
    aspect_of_kind = DENSE_ASPECT if is_dense else ROUTED_ASPECT
    aspect = aspect_of_kind
    if "aspect" in settings:
        aspect = _positive(settings.pop("aspect"), text)
    routing_names = _routing_names(is_dense)
    routing: dict[str, Any] = {}
    training: dict[str, Any] = {}
    for name, value in settings.items():
        if name in BY_VARIANT:
            training[name] = parse_value(value)
        elif name in routing_names:
            routing[name] = parse_value(value)
        else:
            allowed = sorted({"aspect", *BY_VARIANT, *routing_names})
            raise ValueError(f"variant {text!r} cannot have {name!r}; the settings are {', '.join(allowed)}")

    # 2. Check the values.
    depth = None
    try:
        if not is_dense:
            depth = DepthConfig.from_flat(scheme=_scheme(kind), **routing)
        TrainConfig.from_dict({"steps": 10**9, **training, "depth": depth})
    except ValueError as error:
        raise ValueError(f"variant {text!r} makes no sense: {error}") from error
    if depth is not None and depth.first is not None and depth.first >= depth.every:
        raise ValueError(
            f"variant {text!r} must begin within its first every={depth.every} layers, not at {depth.first}"
        )

    # 3. Name the variant by what it sets.
    named_settings = _not_defaults(routing, depth) | training
    if aspect != aspect_of_kind:
        named_settings["aspect"] = aspect
    return Variant(_name(kind, named_settings), depth, training, aspect)


def _check_kind(kind: str) -> None:
    """Refuse an unknown kind. Schemes that need a capacity for each layer cannot be variants."""
    kinds = [DENSE, MOD]
    for scheme in get_args(Scheme):
        if not schemes.ends_the_stack(scheme):
            kinds.append(scheme)
    if kind not in kinds:
        raise ValueError(f"there is no variant {kind!r}: give one of {', '.join(kinds)}")


def _scheme(kind: str) -> Scheme:
    if kind == MOD:
        return DEFAULT_SCHEME
    scheme: Scheme = kind  # type: ignore[assignment]
    return scheme


def _settings(words: list[str], text: str) -> dict[str, str]:
    """Read the settings name=value of a variant."""
    settings: dict[str, str] = {}
    for word in words:
        name, is_given, value = word.partition("=")
        if not is_given:
            raise ValueError(f"{word!r} in variant {text!r} is no setting: write name=value")
        if name in settings:
            raise ValueError(f"variant {text!r} sets {name!r} twice")
        settings[name] = value
    return settings


def _routing_names(is_dense: bool) -> set[str]:
    """List the routing settings that a variant can have."""
    if is_dense:
        return set()
    return {*FLAT_SETTINGS} - {"scheme", "seed", "layers"}


def _not_defaults(routing: dict[str, Any], depth: DepthConfig | None) -> dict[str, Any]:
    """Keep the routing settings whose values are not the defaults of the scheme."""
    if depth is None:
        return {}
    values = depth.to_flat()
    defaults = DepthConfig(scheme=depth.scheme).to_flat()
    return {name: value for name, value in routing.items() if values[name] != defaults[name]}


def _name(kind: str, settings: dict[str, Any]) -> str:
    parts = [MOD if kind == DEFAULT_SCHEME else kind]
    for name in sorted(settings):
        value = settings[name]
        parts.append(f"{name}={value:g}" if is_number(value) else f"{name}={value}")
    return ":".join(parts)


def _positive(value: str, text: str) -> float:
    number = parse_value(value)
    if not isinstance(number, int | float) or not number > 0:
        raise ValueError(f"aspect in variant {text!r} must be a positive number, not {value!r}")
    return float(number)
