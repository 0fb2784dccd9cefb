"""The course of a run: how many steps, each at which capacity and for how many FLOPs."""

import bisect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mixdepth.hf.install import set_capacity
from mixdepth.models.flops import count_flops
from mixdepth.runs.settings import TrainConfig

Capacity = float | tuple[float, ...] | None
CAPACITY_LEVELS = 16
"""A falling capacity takes few values: each is a shape of its own to a compiler."""


class Schedule(NamedTuple):
    """A run, step by step."""

    steps: int
    warmup_steps: int
    batch_size: int
    tokens_per_step: int
    capacity: Capacity  # one for all routed layers, or one for each; None: dense
    capacity_steps: int
    window_flops: Mapping[Capacity, int]  # of a forward pass, by capacity
    start: float = 1.0  # the capacity that it falls from
    teacher_flops: int = 0  # of a forward pass of the model that is learned from

    def capacity_at(self, step: int) -> Capacity:
        """The capacity of a step, counted from 0."""
        if self.capacity is None or step >= self.capacity_steps:
            return self.capacity
        return self.level(step * CAPACITY_LEVELS // self.capacity_steps)

    def level(self, number: int) -> Capacity:
        """The capacity after that many of its 16 parts have fallen."""
        if isinstance(self.capacity, tuple):
            return tuple(self._fallen(capacity, number) for capacity in self.capacity)
        return None if self.capacity is None else self._fallen(self.capacity, number)

    def _fallen(self, capacity: float, number: int) -> float:
        return self.start - (self.start - capacity) * number / CAPACITY_LEVELS

    def flops_at(self, step: int) -> int:
        """Training FLOPs of a step: three forward passes for each window, and the teacher's."""
        return self.batch_size * (3 * self.window_flops[self.capacity_at(step)] + self.teacher_flops)

    def flops_until(self, step: int) -> int:
        """Training FLOPs of all steps before this one."""
        falling = min(self.capacity_steps, step)
        return sum(map(self.flops_at, range(falling))) + (step - falling) * self.flops_at(self.capacity_steps)

    @property
    def flops(self) -> int:
        """Training FLOPs of the whole run."""
        return self.flops_until(self.steps)

    def learning_rate_at(self, step: int) -> float:
        """As a share of its peak: a rise, then a cosine that is 0 when the last step is done."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return 0.5 * (1 + math.cos(math.pi * (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)))


def plan(model: Any, config: TrainConfig, start: float = 1.0, teacher: Any = None) -> Schedule:
    """The longest run within the budget, of a model whose capacity falls from `start`."""
    capacity = None if config.depth is None else config.depth.capacity
    lowest = min(capacity) if isinstance(capacity, tuple) else capacity
    falls = bool(config.capacity_steps) and lowest is not None and lowest < start
    schedule = Schedule(0, 0, config.batch_size, config.batch_size * config.context, capacity, 0, {}, start)
    flops: dict[Capacity, int] = {}
    for level in {*map(schedule.level, range(CAPACITY_LEVELS))} if falls else ():
        assert level is not None
        set_capacity(model, level)
        flops[level] = count_flops(model, config.context).total
    if falls:
        assert capacity is not None
        set_capacity(model, capacity)
    flops[capacity] = count_flops(model, config.context).total
    teacher_flops = 0 if teacher is None else count_flops(teacher, config.context).total
    schedule = schedule._replace(window_flops=flops, teacher_flops=teacher_flops)

    def of(steps: int) -> Schedule:
        given = config.capacity_steps if falls else 0
        falling = int(given) if given >= 1 else round(given * steps)
        warmup_steps = round(config.warmup * steps)
        return schedule._replace(steps=steps, warmup_steps=warmup_steps, capacity_steps=falling)

    found = of(_steps(of, config))
    if found.capacity_steps >= found.steps:
        raise ValueError(
            f"capacity_steps must be below the {found.steps} steps of the run, not {config.capacity_steps}"
        )
    return found


def _steps(of: Callable[[int], Schedule], config: TrainConfig) -> int:
    if config.steps is not None:
        return config.steps
    if config.tokens is not None:
        budget, name = config.tokens, "tokens"
    else:
        assert config.flops is not None
        budget, name = config.flops, "flops"

    def spent(steps: int) -> int:
        return steps * of(steps).tokens_per_step if name == "tokens" else of(steps).flops

    most = 1
    while spent(most) <= budget:
        most *= 2
    steps = bisect.bisect(range(most), budget, key=spent) - 1
    if steps < 1:
        raise ValueError(
            f"{name}={getattr(config, name):g} is too small for one step, which takes {spent(1):.3g}: raise it, or "
            "lower batch_size"
        )
    return steps


TUNING_RATES = {"full": 1e-4, "lora": 3e-4, "router": 1e-3}


def default_learning_rate(config: TrainConfig) -> float:
    """8e-3 for two layers of width 64, less for wider models and where a token passes more layers on average: LOG.md,
    section 5. Of a pretrained model by what is trained."""
    if config.model is not None:
        return TUNING_RATES[config.method]
    routed = {} if config.depth is None else config.depth.routed_layers(config.layers)
    passed = config.layers - sum(1 - capacity for capacity in routed.values())
    return 8e-3 * (64 / config.width) * math.sqrt(2 / max(1, passed))
