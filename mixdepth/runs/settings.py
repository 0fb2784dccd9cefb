"""TrainConfig: every setting of a training run in one frozen value, validated and JSON-ready. No torch."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from mixdepth.config import DepthConfig, check_integer, is_number

Engine = Literal["ddp", "fsdp"]
Method = Literal["full", "lora", "router"]

MAY_DIFFER = ("engine", "report_to", "compile", "gradient_checkpointing", "micro_batch_size")
"""Settings of how a run is computed, not of what: a run may be resumed with others."""

PLANNED = ("layers", "width", "heads", "shape", "depth", "flops", "tokens", "steps", "seed")
"""Settings that `mixdepth isoflop plan` finds for each run of a study."""
OF_PRETRAINED = ("model", "method", "lora_rank", "distill")
"""Settings that have a meaning for pretrained models alone."""
OF_FRESH = ("layers", "width", "heads", "shape", "num_experts", "experts_per_token", "tokenizer")
"""Settings that a pretrained model brings along."""
NOT_COMMON = (*PLANNED, *OF_PRETRAINED, "capacity_steps")
"""Settings that the runs of a study cannot share: dense models have no capacity to fall."""
STUDY_DEFAULTS: dict[str, Any] = {
    "corpus": "python",
    "validation": 0.02,
    "test": 0.02,
    "batch_size": 4,
    "beta2": 0.99,
    "eval_windows": 4096,
}
"""Where the runs of a study differ from a run by itself: much text, over 1 MB of it to evaluate on, and small batches,
with which dense models gain from a longer memory of the gradients' squares (LOG.md, section 5)."""

CONVERT_DEFAULTS: dict[str, Any] = {"capacity": 0.5, "gate": "unit", "router_input": "normed"}
"""Where routing a pretrained model differs from routing a fresh one."""
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
"""Where tuning a pretrained model differs from training a fresh one: its weights are near where they should be, its
routers are not."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run: what is trained, on what, for how long.

    >>> TrainConfig(steps=100, depth=None).batch_size
    8
    """

    corpus: str = "stdlib"
    """What to train on: `stdlib` (the Python standard library's source, 11 MB), `python` (that and the source of torch
    and transformers, 110 MB), a text file, a folder, a glob, a .jsonl or .parquet file, a dataset saved to disk, or
    `hf:name[:config[:split]]` for one of the hub."""

    text_field: str = "text"
    """Where the text is in JSONL, parquet and datasets."""

    tokenizer: str = "bytes"
    """`bytes`; `bpe:SIZE`, trained on the corpus; or a Hugging Face tokenizer's name or folder."""

    validation: float = 0.1
    """Share of the text that is held out, by whole documents, to be evaluated on."""

    test: float = 0.0
    """A further share that is held out and not looked at: `mixdepth eval --split test` does."""

    context: int = 256
    """Tokens in a window, over which a routed layer takes its top k."""

    model: str | None = None
    """Start from this pretrained model, routed or not: a folder, a name of the hub, or `smollm2`. Its tokenizer comes
    with it. None is a fresh model of `layers` and `width`."""

    method: Method = "full"
    """What is trained of a pretrained model: all weights, low-rank adapters beside the routers (`lora`, by peft), or
    routers and predictors alone (`router`)."""

    lora_rank: int = 16
    """Rank of the adapters."""

    distill: float = 0.0
    """Share of the loss that is the divergence from what the pretrained model itself foretells; the rest is the
    text's. Its passes count as FLOPs."""

    layers: int = 8
    """How many decoder layers."""

    width: int = 256
    """Width of the model, a multiple of 16."""

    heads: int | None = None
    """Attention heads. None is width / 16 below a width of 256, width / 32 from there on."""

    shape: str | None = None
    """In place of `layers` and `width`: `params=1.5M` or `flops=2M` (of a forward pass, for each token) finds the
    shape nearest to it."""

    num_experts: int = 0
    """Experts of a Mixtral, with its balance loss; 0 is a Llama."""

    experts_per_token: int = 2
    """Experts that a token goes through."""

    depth: DepthConfig | None = field(default_factory=DepthConfig)
    """How tokens are routed; None is the dense model."""

    flops: float | None = None
    """Budget in training FLOPs (three forward passes for each window, with attention, logits, routers and
    predictors). Give this, `tokens` or `steps`."""

    tokens: float | None = None
    """Budget in tokens."""

    steps: int | None = None
    """Budget in optimizer steps."""

    batch_size: int = 8
    """Windows in an optimizer step, over all processes and micro-batches."""

    micro_batch_size: int | None = None
    """Windows in one pass of one process; fewer need less memory. None is all of a process's share."""

    learning_rate: float | None = None
    """Peak of the learning rate. None is the rule in docs/train.md, by width and depth, one for all."""

    warmup: float = 0.3
    """Share of the steps in which the learning rate rises; it then falls as a cosine, to 0 where the budget ends."""

    weight_decay: float = 0.1
    """Of weight matrices. Norms, biases and routers have none."""

    beta2: float = 0.95
    """AdamW's second momentum; the first is 0.9."""

    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 leaves them."""

    router_learning_rate: float | None = None
    """Learning rate of routers, as a multiple of the model's. None is that of their layer."""

    predictor_learning_rate: float = 1.0
    """Learning rate of predictors, as a multiple of the model's."""

    routed_learning_rate: float | None = None
    """Learning rate of the other weights of routed layers, as a multiple of the model's. None is the root of the
    capacity: a layer sees that share of the tokens, and Adam's rate goes with the root of the batch."""

    capacity_steps: float = 0
    """Optimizer steps over which the capacity falls from 1 to its target, in 16 equal parts; below 1 it is a share of
    all steps; 0 starts at the target."""

    calibrate: int = 0
    """Windows of the training text on which thresholds are set when training ends, so that causal routing takes the
    share that it should; 0 leaves them as they were learned. Not counted as FLOPs."""

    seed: int = 0
    """Of weights and of the order of the windows."""

    bf16: bool = False
    """Compute in bfloat16 under autocast; weights and routers stay in float32."""

    compile: bool = False
    """Compile the model with torch.compile."""

    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass instead of keeping its activations."""

    engine: Engine = "ddp"
    """Over several processes (torchrun): replicate the model (`ddp`) or shard it (`fsdp`). One process does neither."""

    log_every: int = 10
    """Steps between two lines of metrics.jsonl."""

    save_every: int | None = None
    """Steps between two checkpoints; None is a tenth of the run."""

    eval_every: int | None = None
    """Steps between two evaluations; None evaluates once, at the end."""

    eval_windows: int | None = 256
    """Windows of the validation text in an evaluation, evenly spaced; None is all of them."""

    report_to: tuple[str, ...] = ()
    """Trackers of transformers, such as `tensorboard`; metrics.jsonl is always written."""

    def __post_init__(self) -> None:
        for name in ("context", "layers", "width", "batch_size", "log_every", "experts_per_token", "lora_rank"):
            check_integer(name, getattr(self, name), minimum=1)
        for name in ("heads", "micro_batch_size", "save_every", "eval_every", "eval_windows", "steps"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), minimum=1)
        for name in ("num_experts", "seed", "calibrate"):
            check_integer(name, getattr(self, name), minimum=0)
        self._check_number("capacity_steps", positive=False)
        if self.capacity_steps >= 1 and self.capacity_steps != int(self.capacity_steps):
            raise ValueError(f"capacity_steps must be a whole number, or a share below 1, not {self.capacity_steps}")
        self._check_pretrained()
        if self.context < 2:
            raise ValueError(f"context must be at least 2, not {self.context}: the first token of a window is given")
        if self.seed >= 2**32:
            raise ValueError(f"seed must be below 2**32, not {self.seed}")
        for name in ("learning_rate", "router_learning_rate", "routed_learning_rate", "flops", "tokens"):
            if getattr(self, name) is not None:
                self._check_number(name, positive=True)
        for name in ("predictor_learning_rate", "beta2", "validation"):
            self._check_number(name, positive=True)
        for name in ("weight_decay", "max_grad_norm", "warmup", "test"):
            self._check_number(name, positive=False)
        for name in ("validation", "test", "warmup", "beta2"):
            if not getattr(self, name) < 1:
                raise ValueError(f"{name} must be below 1, not {getattr(self, name)}")
        for name in ("bf16", "compile", "gradient_checkpointing"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if self.engine not in get_args(Engine):
            raise ValueError(f"engine must be one of {', '.join(get_args(Engine))}, not {self.engine!r}")
        budgets = [name for name in ("flops", "tokens", "steps") if getattr(self, name) is not None]
        if len(budgets) != 1:
            raise ValueError(f"give one budget of flops, tokens and steps, not {' and '.join(budgets) or 'none'}")
        if not isinstance(self.depth, DepthConfig | None):
            raise ValueError(f"depth must be a DepthConfig, or None for a dense model, not {self.depth!r}")
        for name in ("corpus", "tokenizer", "model"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, str(getattr(self, name)))  # a Path too
        trackers = (self.report_to,) if isinstance(self.report_to, str) else tuple(self.report_to or ())
        object.__setattr__(self, "report_to", tuple(name for name in trackers if name != "none"))
        if self.micro_batch_size is not None and self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch_size must be a multiple of micro_batch_size={self.micro_batch_size}, not {self.batch_size}"
            )
        if self.capacity_steps and self.depth is None:
            raise ValueError("capacity_steps has no meaning for a dense model: leave it out")

    def _check_pretrained(self) -> None:
        if self.method not in get_args(Method):
            raise ValueError(f"method must be one of {', '.join(get_args(Method))}, not {self.method!r}")
        self._check_number("distill", positive=False)
        if self.distill > 1:
            raise ValueError(f"distill must be a share of at most 1, not {self.distill}")
        if self.model is None and (self.method != "full" or self.distill):
            given = f"method={self.method!r}" if self.method != "full" else f"distill={self.distill}"
            raise ValueError(f"{given} needs a pretrained model: give one by model")
        if self.method == "lora" and self.engine == "fsdp":
            raise ValueError("method='lora' cannot be sharded: leave out engine='fsdp'")
        if self.method == "router" and self.depth is None:
            raise ValueError("method='router' trains routers, and a dense model has none: leave it out")
        for setting in fields(self):
            value = getattr(self, setting.name)
            if self.model is not None and setting.name in OF_FRESH and value != setting.default:
                raise ValueError(f"a pretrained model has its own {setting.name}: leave out {setting.name}={value!r}")

    def _check_number(self, name: str, positive: bool) -> None:
        value = getattr(self, name)
        if not is_number(value) or not math.isfinite(value) or value < 0 or (positive and value == 0):
            raise ValueError(f"{name} must be a {'positive ' if positive else ''}number, not {value!r}")

    def to_dict(self) -> dict[str, Any]:
        settings = asdict(self)
        settings["report_to"] = list(self.report_to)
        settings["depth"] = None if self.depth is None else self.depth.to_dict()
        return settings

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "TrainConfig":
        known = [setting.name for setting in fields(cls)]
        unknown = [name for name in settings if name not in known]
        if unknown:
            raise ValueError(f"there is no training setting {unknown[0]!r}; the settings are {', '.join(known)}")
        settings = dict(settings)
        doubled = [name for name in ("layers", "width") if name in settings and settings.get("shape") is not None]
        if doubled:
            raise ValueError(f"shape finds layers and width: give it or {doubled[0]}, not both")
        if isinstance(settings.get("depth"), Mapping):
            settings["depth"] = DepthConfig.from_dict(settings["depth"])
        return cls(**settings)
