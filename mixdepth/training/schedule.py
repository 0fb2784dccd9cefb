"""The course of a run: how many steps, each at which capacity and learning rate, and for how many FLOPs."""

import bisect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mixdepth.hf.install import set_capacity
from mixdepth.models.flops import count_flops
from mixdepth.runs.settings import TrainConfig

Capacity = float | tuple[float, ...] | None
"""One capacity for all routed layers, or one for each; None for a dense model."""
CAPACITY_LEVELS = 16
"""How many values a falling capacity takes before its target. They are few: a compiler makes a graph for each."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The steps of a run."""

    steps: int
    warmup_steps: int
    """Steps in which the learning rate rises."""
    batch_size: int
    tokens_per_step: int
    capacity: Capacity
    """The capacity that is aimed at."""
    capacity_steps: int
    """Steps in which the capacity falls."""
    window_flops: Mapping[Capacity, int]
    """FLOPs of a forward pass over one window, by capacity."""
    start: float = 1.0
    """The capacity before it falls."""
    teacher_flops: int = 0
    """FLOPs of the teacher's forward pass over one window, in distillation."""

    def capacity_at(self, step: int) -> Capacity:
        """Return the capacity of a step, counted from 0."""
        if self.capacity is None or step >= self.capacity_steps:
            return self.capacity
        return self.level(step * CAPACITY_LEVELS // self.capacity_steps)

    def level(self, number: int) -> Capacity:
        """Return the capacity after this many of its 16 parts have fallen."""
        if self.capacity is None:
            return None
        if isinstance(self.capacity, tuple):
            return tuple(self._fallen(capacity, number) for capacity in self.capacity)
        return self._fallen(self.capacity, number)

    def _fallen(self, capacity: float, number: int) -> float:
        return self.start - (self.start - capacity) * number / CAPACITY_LEVELS

    def flops_at(self, step: int) -> int:
        """Return the training FLOPs of a step: three forward passes for each window, and one of the teacher."""
        return self.batch_size * (3 * self.window_flops[self.capacity_at(step)] + self.teacher_flops)

    def flops_until(self, step: int) -> int:
        """Return the training FLOPs of all steps before this one."""
        falling = min(self.capacity_steps, step)
        while_falling = sum(self.flops_at(earlier) for earlier in range(falling))
        return while_falling + (step - falling) * self.flops_at(self.capacity_steps)

    @property
    def flops(self) -> int:
        """The training FLOPs of the whole run."""
        return self.flops_until(self.steps)

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate as a share of its peak: a linear rise, then a cosine to 0 after the last step."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = math.pi * (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return 0.5 * (1 + math.cos(progress))


def plan(model: Any, config: TrainConfig, start: float = 1.0, teacher: Any = None) -> Schedule:
    """Plan the longest run within the budget, for a model with a capacity that falls from `start`."""
    # 1. Whether the capacity falls at all.
    capacity = None if config.depth is None else config.depth.capacity
    lowest = min(capacity) if isinstance(capacity, tuple) else capacity
    falls = config.capacity_steps > 0 and lowest is not None and lowest < start
    draft = Schedule(
        steps=0,
        warmup_steps=0,
        batch_size=config.batch_size,
        tokens_per_step=config.batch_size * config.context,
        capacity=capacity,
        capacity_steps=0,
        window_flops={},
        start=start,
    )

    # 2. The FLOPs of a window at each capacity on the way.
    window_flops: dict[Capacity, int] = {}
    if falls:
        assert capacity is not None
        for number in range(CAPACITY_LEVELS):
            level = draft.level(number)
            assert level is not None
            set_capacity(model, level)
            window_flops[level] = count_flops(model, config.context).total
        set_capacity(model, capacity)
    window_flops[capacity] = count_flops(model, config.context).total
    teacher_flops = 0
    if teacher is not None:
        teacher_flops = count_flops(teacher, config.context).total
    draft = replace(draft, window_flops=window_flops, teacher_flops=teacher_flops)

    # 3. The number of steps within the budget. Warm-up and fall are shares of it, and change what the steps cost.
    def of_length(steps: int) -> Schedule:
        capacity_steps = 0
        if falls:
            is_share = config.capacity_steps < 1
            capacity_steps = round(config.capacity_steps * steps) if is_share else int(config.capacity_steps)
        return replace(draft, steps=steps, warmup_steps=round(config.warmup * steps), capacity_steps=capacity_steps)

    schedule = of_length(_num_steps(of_length, config))
    if schedule.capacity_steps >= schedule.steps:
        raise ValueError(
            f"capacity_steps must be below the {schedule.steps} steps of the run, not {config.capacity_steps}"
        )
    return schedule


def _num_steps(of_length: Callable[[int], Schedule], config: TrainConfig) -> int:
    """Return the largest number of steps that the budget pays for."""
    if config.steps is not None:
        return config.steps
    name = "flops" if config.tokens is None else "tokens"
    budget: float = getattr(config, name)

    def spent(steps: int) -> int:
        schedule = of_length(steps)
        if name == "tokens":
            return steps * schedule.tokens_per_step
        return schedule.flops

    too_many = 1
    while spent(too_many) <= budget:
        too_many *= 2
    steps = bisect.bisect(range(too_many), budget, key=spent) - 1
    if steps < 1:
        raise ValueError(
            f"{name}={budget:g} is too small for one step, which takes {spent(1):.3g}: raise it, or lower batch_size"
        )
    return steps


TUNING_RATES = {"full": 1e-4, "lora": 3e-4, "router": 1e-3}
"""The learning rate of a pretrained model, by what is trained of it."""


def default_learning_rate(config: TrainConfig) -> float:
    """Return the peak learning rate of a run that has none in its settings.

    For a fresh model it is 8e-3 x (64 / width) x sqrt(2 / layers that a token passes on average), which was measured on
    small models: see docs/train.md.
    """
    if config.model is not None:
        return TUNING_RATES[config.method]
    skipped = 0.0
    if config.depth is not None:
        skipped = sum(1 - capacity for capacity in config.depth.routed_layers(config.layers).values())
    passed = config.layers - skipped
    return 8e-3 * (64 / config.width) * math.sqrt(2 / max(1, passed))
