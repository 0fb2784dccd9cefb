"""TrainConfig: every setting of a training run in one frozen value. This module imports no torch."""

# ruff: noqa: RUF009 - `setting` declares a field, and has no effect of its own

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from mixdepth.config import DepthConfig, check_integer, is_number

Engine = Literal["ddp", "fsdp"]
Method = Literal["full", "lora", "router"]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What holds for a setting besides its default: which runs it belongs to, and what it may change."""

    only_for: Literal["fresh", "pretrained"] | None = None
    """The kind of model that it has a meaning for; None is both."""
    may_differ: bool = False
    """Whether it changes how a run is computed and not what, so that a run may be resumed with another value."""
    shared_in_studies: bool = True
    """Whether all runs of a study may share a value that is given to `mixdepth isoflop plan`."""
    by_variant: bool = False
    """Whether a variant of a study may have a value for itself."""


def setting(default: Any = MISSING, *, default_factory: Any = MISSING, **facts: Any) -> Any:
    """Declare a field of the settings with its default and its `Facts`."""
    return field(default=default, default_factory=default_factory, metadata={"facts": Facts(**facts)})


STUDY_DEFAULTS: dict[str, Any] = {
    "corpus": "python",
    "validation": 0.02,
    "test": 0.02,
    "batch_size": 4,
    "beta2": 0.99,
    "eval_windows": 4096,
}
"""Defaults of the runs of a study that are not those of a single run: much text, over 1 MB of it to evaluate on, and
small batches. With small batches dense models gain from a longer average of the squared gradients (`beta2`)."""

CONVERT_DEFAULTS: dict[str, Any] = {"capacity": 0.5, "gate": "unit", "router_input": "normed"}
"""Defaults of routing a pretrained model that are not those of routing a fresh one."""

TUNE_DEFAULTS: dict[str, Any] = {
    "context": 512,
    "warmup": 0.1,
    "capacity_steps": 0.5,
    "router_learning_rate": 10.0,
    "routed_learning_rate": 1.0,
    "predictor_learning_rate": 10.0,
    "calibrate": 4,
    "eval_windows": 64,
}
"""Defaults of tuning a pretrained model that are not those of training a fresh one. Its weights are near where they
should be, and its routers are not."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of a training run: what is trained, on what, and for how long.

    >>> TrainConfig(steps=100, depth=None).batch_size
    8
    """

    # The text

    corpus: str = "stdlib"
    """Text to train on: `stdlib`, `python`, a file or a folder. `stdlib` is the source of the Python standard library
    (11 MB), `python` adds the source of torch and transformers (110 MB). A glob, a .jsonl or .parquet file, a dataset
    saved to disk, and `hf:name[:config[:split]]` for a dataset of the hub work too."""

    text_field: str = "text"
    """Name of the field that holds the text, in JSONL, parquet and datasets."""

    tokenizer: str = setting("bytes", only_for="fresh")
    """Tokenizer of the text. `bytes` has one token for each byte, and `bpe:SIZE` is trained on the corpus. Other values
    are names or folders of Hugging Face tokenizers."""

    validation: float = 0.1
    """Share of the text that is held out for evaluation, in whole documents."""

    test: float = 0.0
    """Further share of the text that is held out. `mixdepth eval --split test` evaluates on it, and so does each cell
    of a study when it ends; only `mixdepth isoflop fit --split test` reads what the cells measured."""

    context: int = 256
    """Tokens in a window. A routed layer takes its top k over a window."""

    # The model, and what of it is trained

    model: str | None = setting(None, only_for="pretrained", shared_in_studies=False)
    """The pretrained model to start from, routed or not: a folder, a name of the hub, or `smollm2`. It brings its
    tokenizer. None is a fresh model of `layers` and `width`."""

    method: Method = setting("full", only_for="pretrained", shared_in_studies=False)
    """The part of a pretrained model that is trained: all weights (`full`), low-rank adapters and routers (`lora`, by
    peft), or only routers and predictors (`router`)."""

    lora_rank: int = setting(16, only_for="pretrained", shared_in_studies=False)
    """Rank of the low-rank adapters."""

    distill: float = setting(0.0, only_for="pretrained", shared_in_studies=False)
    """Weight of the distillation loss, the KL divergence from the original model's predictions. The language-model loss
    gets the rest. The original model's forward passes count as FLOPs."""

    layers: int = setting(8, only_for="fresh", shared_in_studies=False)
    """Number of decoder layers."""

    width: int = setting(256, only_for="fresh", shared_in_studies=False)
    """Width of the model, a multiple of 16."""

    heads: int | None = setting(None, only_for="fresh", shared_in_studies=False)
    """Number of attention heads. None is width / 16 below a width of 256, and width / 32 from there on."""

    shape: str | None = setting(None, only_for="fresh", shared_in_studies=False)
    """Target from which `layers` and `width` are found: `params=1.5M` (parameters) or `flops=2M` (of a forward pass,
    for each token) gives the nearest shape."""

    num_experts: int = setting(0, only_for="fresh", by_variant=True)
    """Number of experts in a Mixtral, which has a balance loss. 0 is a Llama."""

    experts_per_token: int = setting(2, only_for="fresh", by_variant=True)
    """Number of experts that process a token."""

    depth: DepthConfig | None = setting(default_factory=DepthConfig, shared_in_studies=False)
    """How tokens are routed. None is a dense model."""

    # The budget, and how it is divided into steps

    flops: float | None = setting(None, shared_in_studies=False)
    """Budget in training FLOPs. A window costs three forward passes, with attention, logits, routers and predictors.
    Give this, `tokens` or `steps`."""

    tokens: float | None = setting(None, shared_in_studies=False)
    """Budget in tokens."""

    steps: int | None = setting(None, shared_in_studies=False)
    """Budget in optimizer steps."""

    batch_size: int = setting(8, by_variant=True)
    """Windows in an optimizer step. All processes and micro-batches share them."""

    micro_batch_size: int | None = setting(None, may_differ=True)
    """Windows in one forward pass of one process; fewer need less memory. None is all of a process's share."""

    # The optimizer

    learning_rate: float | None = setting(None, by_variant=True)
    """Peak learning rate. None follows the rule in docs/train.md, which is the same for dense and routed models."""

    warmup: float = setting(0.3, by_variant=True)
    """Share of the steps in which the learning rate rises. It then falls as a cosine, to 0 at the last step."""

    weight_decay: float = setting(0.1, by_variant=True)
    """Weight decay of matrices. Norms, biases and routers have none."""

    beta2: float = setting(0.95, by_variant=True)
    """AdamW's second momentum. The first is 0.9."""

    max_grad_norm: float = setting(1.0, by_variant=True)
    """Norm to which larger gradients are scaled down. 0 leaves them as they are."""

    router_learning_rate: float | None = setting(None, by_variant=True)
    """Learning rate of routers, as a multiple of the model's. None is the rate of their layer."""

    predictor_learning_rate: float = 1.0
    """Learning rate of predictors, as a multiple of the model's."""

    routed_learning_rate: float | None = setting(None, by_variant=True)
    """Learning rate of the other weights of routed layers, as a multiple of the model's. None is the square root of the
    capacity: a layer sees that share of the tokens, and Adam's rate grows with the square root of the batch."""

    # Routing in the course of the run

    capacity_steps: float = setting(0, shared_in_studies=False, by_variant=True)
    """Optimizer steps over which the capacity falls from 1 to its target, in 16 equal parts. A value below 1 is a share
    of all steps. 0 starts at the target."""

    calibrate: int = 0
    """Windows of the training text on which thresholds are set when training ends, so that causal routing takes its
    intended share of the tokens. 0 leaves thresholds as they were learned. These passes do not count as FLOPs."""

    # How the run is computed

    seed: int = setting(0, shared_in_studies=False)
    """Random seed of weights and data. It sets the initial weights and the order of the training windows."""

    bf16: bool = False
    """Compute in bfloat16 under autocast. Weights and routers stay in float32."""

    compile: bool = setting(False, may_differ=True)
    """Compile the model with torch.compile."""

    gradient_checkpointing: bool = setting(False, may_differ=True)
    """Compute each layer again in the backward pass instead of keeping its activations."""

    engine: Engine = setting("ddp", may_differ=True)
    """How several processes (torchrun) share the model: each has a copy (`ddp`) or a shard (`fsdp`)."""

    # What is written, and when

    log_every: int = 10
    """Steps between two lines of metrics.jsonl."""

    save_every: int | None = None
    """Steps between two checkpoints. None is a tenth of the run."""

    eval_every: int | None = None
    """Steps between two evaluations. None evaluates once, at the end."""

    eval_windows: int | None = 256
    """Windows of the validation text in an evaluation, evenly spaced. None is all of them."""

    report_to: tuple[str, ...] = setting((), may_differ=True)
    """Trackers of transformers that log too, such as `tensorboard`. metrics.jsonl is always written."""

    def __post_init__(self) -> None:
        self._normalise()
        self._check_integers()
        self._check_numbers()
        self._check_model()
        self._check_budget()

    def _normalise(self) -> None:
        """Accept a Path where a name is meant, and one tracker in place of several."""
        for name in ("corpus", "tokenizer", "model"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, str(value))
        trackers = self.report_to or ()
        if isinstance(trackers, str):
            trackers = (trackers,)
        object.__setattr__(self, "report_to", tuple(name for name in trackers if name != "none"))

    def _check_integers(self) -> None:
        for name in ("context", "layers", "width", "batch_size", "log_every", "experts_per_token", "lora_rank"):
            check_integer(name, getattr(self, name), minimum=1)
        for name in ("heads", "micro_batch_size", "save_every", "eval_every", "eval_windows", "steps"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), minimum=1)
        for name in ("num_experts", "seed", "calibrate"):
            check_integer(name, getattr(self, name), minimum=0)
        if self.context < 2:
            raise ValueError(f"context must be at least 2, not {self.context}: the first token of a window is given")
        if self.seed >= 2**32:
            raise ValueError(f"seed must be below 2**32, not {self.seed}")
        if self.micro_batch_size is not None and self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch_size must be a multiple of micro_batch_size={self.micro_batch_size}, not {self.batch_size}"
            )

    def _check_numbers(self) -> None:
        for name in ("learning_rate", "router_learning_rate", "routed_learning_rate", "flops", "tokens"):
            if getattr(self, name) is not None:
                self._check_number(name, positive=True)
        for name in ("predictor_learning_rate", "beta2", "validation"):
            self._check_number(name, positive=True)
        for name in ("weight_decay", "max_grad_norm", "warmup", "test", "capacity_steps", "distill"):
            self._check_number(name, positive=False)
        for name in ("validation", "test", "warmup", "beta2"):
            if not getattr(self, name) < 1:
                raise ValueError(f"{name} must be below 1, not {getattr(self, name)}")
        if self.distill > 1:
            raise ValueError(f"distill must be a share of at most 1, not {self.distill}")
        if self.capacity_steps >= 1 and self.capacity_steps != int(self.capacity_steps):
            raise ValueError(f"capacity_steps must be a whole number, or a share below 1, not {self.capacity_steps}")

    def _check_number(self, name: str, positive: bool) -> None:
        value = getattr(self, name)
        if not is_number(value) or not math.isfinite(value) or value < 0 or (positive and value == 0):
            kind = "positive number" if positive else "number"
            raise ValueError(f"{name} must be a {kind}, not {value!r}")

    def _check_model(self) -> None:
        # 1. Values of the right kind.
        if self.method not in get_args(Method):
            raise ValueError(f"method must be one of {', '.join(get_args(Method))}, not {self.method!r}")
        if self.engine not in get_args(Engine):
            raise ValueError(f"engine must be one of {', '.join(get_args(Engine))}, not {self.engine!r}")
        for name in ("bf16", "compile", "gradient_checkpointing"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if not isinstance(self.depth, DepthConfig | None):
            raise ValueError(f"depth must be a DepthConfig, or None for a dense model, not {self.depth!r}")

        # 2. Settings that have no meaning for this kind of model.
        if self.model is None:
            for name in ("method", "distill"):
                value = getattr(self, name)
                if value != _default_of(name):
                    raise ValueError(f"{name}={value!r} needs a pretrained model: give one by model")
        else:
            for name in OF_FRESH:
                value = getattr(self, name)
                if value != _default_of(name):
                    raise ValueError(f"a pretrained model has its own {name}: leave out {name}={value!r}")

        # 3. Settings that exclude each other.
        if self.method == "lora" and self.engine == "fsdp":
            raise ValueError("method='lora' cannot be sharded: leave out engine='fsdp'")
        if self.method == "router" and self.depth is None:
            raise ValueError("method='router' trains routers, and a dense model has none: leave it out")
        if self.capacity_steps and self.depth is None:
            raise ValueError("capacity_steps has no meaning for a dense model: leave it out")

    def _check_budget(self) -> None:
        budgets = [name for name in ("flops", "tokens", "steps") if getattr(self, name) is not None]
        if len(budgets) != 1:
            raise ValueError(f"give one budget of flops, tokens and steps, not {' and '.join(budgets) or 'none'}")

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as run.json holds them."""
        settings = asdict(self)
        settings["report_to"] = list(self.report_to)
        settings["depth"] = None if self.depth is None else self.depth.to_dict()
        return settings

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "TrainConfig":
        """Make settings from what `to_dict` returned; those that are not given have their defaults."""
        names = [field.name for field in fields(cls)]
        unknown = [name for name in settings if name not in names]
        if unknown:
            raise ValueError(f"there is no training setting {unknown[0]!r}; the settings are {', '.join(names)}")
        settings = dict(settings)
        if settings.get("shape") is not None:
            for name in ("layers", "width"):
                if name in settings:
                    raise ValueError(f"shape finds layers and width: give it or {name}, not both")
        if isinstance(settings.get("depth"), Mapping):
            settings["depth"] = DepthConfig.from_dict(settings["depth"])
        return cls(**settings)


def _default_of(name: str) -> object:
    return TrainConfig.__dataclass_fields__[name].default


FACTS: dict[str, Facts] = {field.name: field.metadata.get("facts", Facts()) for field in fields(TrainConfig)}
"""The facts of each setting, by its name."""
MAY_DIFFER = tuple(name for name, facts in FACTS.items() if facts.may_differ)
"""Settings of how a run is computed, and not of what: a run may be resumed with others."""
OF_FRESH = tuple(name for name, facts in FACTS.items() if facts.only_for == "fresh")
"""Settings that a pretrained model brings with it."""
OF_PRETRAINED = tuple(name for name, facts in FACTS.items() if facts.only_for == "pretrained")
"""Settings that have a meaning for pretrained models only."""
NOT_COMMON = tuple(name for name, facts in FACTS.items() if not facts.shared_in_studies)
"""Settings that the runs of a study cannot share."""
BY_VARIANT = tuple(name for name, facts in FACTS.items() if facts.by_variant)
"""Settings that a variant of a study may have for itself."""
