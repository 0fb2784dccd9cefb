"""What a study compares: `dense`, `mod`, `random:capacity=0.5`, `mod:every=1:gate=tanh`, `dense:learning_rate=2e-3`."""

from dataclasses import fields
from typing import Any, NamedTuple, get_args

from mixdepth.config import DepthConfig, Scheme, is_number
from mixdepth.runs.settings import TrainConfig
from mixdepth.text import parse_value

DENSE, MOD = "dense", "mod"
ASPECTS = {"dense": 32.0, "routed": 16.0}
"""Width per layer: 64 x 2 for a dense model, 64 x 4 for a routed one. See LOG.md, section 5."""
OF_TRAINING = (
    *("learning_rate", "router_learning_rate", "routed_learning_rate", "warmup", "weight_decay", "beta2"),
    *("max_grad_norm", "batch_size", "capacity_steps", "num_experts", "experts_per_token"),
)
"""Settings of the run that a variant may have for itself; the others are the same for all."""


class Variant(NamedTuple):
    """One curve of the study."""

    name: str
    depth: DepthConfig | None
    training: dict[str, Any]
    aspect: float

    @property
    def every(self) -> int:
        return 1 if self.depth is None else self.depth.every


def parse_variant(text: str) -> Variant:
    """A variant by its name: what it is, then settings of the routing or the run.

    >>> parse_variant("random:capacity=0.5").depth.scheme
    'random'
    >>> parse_variant("expert_choice:gate=tanh:capacity=0.125").name  # one name for one curve
    'mod:gate=tanh'
    """
    kind, *words = text.split(":")
    schemes = [scheme for scheme in get_args(Scheme) if scheme != "early_exit"]  # it has a capacity for each layer
    if kind not in (DENSE, MOD, *schemes):
        raise ValueError(f"there is no variant {kind!r}: give one of {', '.join((DENSE, MOD, *schemes))}")
    of_routing = {field.name for field in fields(DepthConfig)} - {"scheme", "seed", "layers"}
    routing: dict[str, Any] = {} if kind in (DENSE, MOD) else {"scheme": kind}
    training: dict[str, Any] = {}
    given: set[str] = set()
    aspect = ASPECTS["dense" if kind == DENSE else "routed"]
    for word in words:
        name, is_given, value = word.partition("=")
        if not is_given:
            raise ValueError(f"{word!r} in variant {text!r} is no setting: write name=value")
        if name in given:
            raise ValueError(f"variant {text!r} sets {name!r} twice")
        given.add(name)
        if name == "aspect":
            aspect = _positive(value, text)
        elif name in OF_TRAINING:
            training[name] = parse_value(value)
        elif name in of_routing and kind != DENSE:
            routing[name] = parse_value(value)
        else:
            known = sorted({*OF_TRAINING, "aspect"} | (of_routing if kind != DENSE else set()))
            raise ValueError(f"variant {text!r} cannot have {name!r}; the settings are {', '.join(known)}")
    try:
        depth = None if kind == DENSE else DepthConfig(**routing)
        usual = None if depth is None else DepthConfig(scheme=depth.scheme)
        TrainConfig.from_dict({"steps": 10**9, **training, "depth": depth})
    except ValueError as error:
        raise ValueError(f"variant {text!r} makes no sense: {error}") from error
    if depth is not None and depth.first is not None and depth.first >= depth.every:
        raise ValueError(
            f"variant {text!r} must begin within its first every={depth.every} layers, not at {depth.first}"
        )
    said = {name: value for name, value in routing.items() if getattr(depth, name) != getattr(usual, name)} | training
    if aspect != ASPECTS["dense" if kind == DENSE else "routed"]:
        said["aspect"] = aspect
    settings = [f"{name}={said[name]:g}" if is_number(said[name]) else f"{name}={said[name]}" for name in sorted(said)]
    return Variant(":".join([MOD if kind == "expert_choice" else kind, *settings]), depth, training, aspect)


def _positive(value: str, text: str) -> float:
    number = parse_value(value)
    if not isinstance(number, int | float) or not number > 0:
        raise ValueError(f"aspect in variant {text!r} must be a positive number, not {value!r}")
    return float(number)
