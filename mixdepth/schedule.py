"""The course of a run: how many steps, each at which capacity and for how many FLOPs."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from mixdepth.flops import count_flops
from mixdepth.hf import set_capacity
from mixdepth.settings import TrainConfig

CAPACITY_LEVELS = 16
"""A falling capacity takes few values: each is a shape of its own to a compiler."""


class Schedule(NamedTuple):
    """A run, step by step."""

    steps: int
    warmup_steps: int
    batch_size: int
    tokens_per_step: int
    capacity: float | None  # None: dense, or a capacity for each layer, which stays
    capacity_steps: int
    window_flops: Mapping[float | None, int]  # of a forward pass, by capacity

    def capacity_at(self, step: int) -> float | None:
        """The capacity of a step, counted from 0."""
        if self.capacity is None or step >= self.capacity_steps:
            return self.capacity
        return 1 - (1 - self.capacity) * (step * CAPACITY_LEVELS // self.capacity_steps) / CAPACITY_LEVELS

    def flops_at(self, step: int) -> int:
        """Training FLOPs of a step: three forward passes for each window."""
        return 3 * self.batch_size * self.window_flops[self.capacity_at(step)]

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


def plan(model: Any, config: TrainConfig) -> Schedule:
    """The longest run within the budget."""
    depth = config.depth
    capacity = depth.capacity if depth is not None and isinstance(depth.capacity, float) else None
    unlimited = Schedule(
        0, 0, config.batch_size, config.batch_size * config.context, capacity, config.capacity_steps, {}
    )
    levels = {unlimited.capacity_at(step) for step in range(config.capacity_steps)} | {capacity}
    flops = {}
    for level in levels:
        if config.capacity_steps and level is not None:
            set_capacity(model, level)
        flops[level] = count_flops(model, config.context).total
    if config.capacity_steps and capacity is not None:
        set_capacity(model, capacity)
    schedule = unlimited._replace(window_flops=flops)
    steps = _steps(schedule, config)
    if config.capacity_steps >= steps:
        raise ValueError(f"capacity_steps must be below the {steps} steps of the run, not {config.capacity_steps}")
    return schedule._replace(steps=steps, warmup_steps=round(config.warmup * steps))


def _steps(schedule: Schedule, config: TrainConfig) -> int:
    if config.steps is not None:
        return config.steps
    if config.tokens is not None:
        steps, name, least = int(config.tokens // schedule.tokens_per_step), "tokens", schedule.tokens_per_step
    else:
        assert config.flops is not None
        left, steps = config.flops, 0
        name, least = "flops", schedule.flops_at(0)
        while steps < config.capacity_steps and left >= schedule.flops_at(steps):
            left -= schedule.flops_at(steps)
            steps += 1
        if steps == config.capacity_steps:
            steps += int(left // schedule.flops_at(steps))
    if steps < 1:
        raise ValueError(
            f"{name}={getattr(config, name):g} is too small for one step, which takes {least:.3g}: raise it, or lower "
            "batch_size"
        )
    return steps
