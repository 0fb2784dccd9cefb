"""What happens around a training step: the capacity falls, time is measured, a progress bar moves."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tqdm import tqdm
from transformers import TrainerCallback

from mixdepth.hf.install import set_capacity
from mixdepth.text import tell
from mixdepth.training.schedule import Schedule

TIMED_STEPS = 3
"""After how many steps the time to go is estimated. The step before them does not count: it warms up."""
UNITS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}
"""Units of time, in seconds."""


class LogAtCheckpoints(TrainerCallback):
    """Writes a line of the log at each checkpoint.

    The running sums are then empty at a checkpoint, so that a resumed run logs what an undisturbed one does.
    """

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_save:
            control.should_log = True
        if state.global_step == state.max_steps:  # the finished model is evaluated in any case
            control.should_evaluate = False


class FollowSchedule(TrainerCallback):
    """Sets the capacity before each step."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        capacity = self.schedule.capacity_at(state.global_step)
        if capacity is not None and kwargs["model"].depth_config.capacity != capacity:
            set_capacity(kwargs["model"], capacity)


class Clock(TrainerCallback):
    """Measures the time of training. Evaluation and checkpoints do not count."""

    def __init__(self) -> None:
        self.start = 0.0
        self.step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.start = time.perf_counter()
        self.step = state.global_step

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock within this context."""
        begin = time.perf_counter()
        yield
        self.start += time.perf_counter() - begin

    def read(self, step: int, schedule: Schedule, peak: float | None) -> dict[str, Any]:
        """Return the speed since the last reading; `peak` is what the machine can do at best, in FLOPs per second."""
        now = time.perf_counter()
        elapsed = max(now - self.start, 1e-9)
        speed = (step - self.step) * schedule.tokens_per_step / elapsed
        timings = {"step": step, "seconds": elapsed, "tokens_per_second": speed}
        if peak is not None:
            flops = schedule.flops_until(step) - schedule.flops_until(self.step)
            timings["share_of_peak"] = flops / elapsed / peak
        self.start = now
        self.step = step
        return timings


class Progress(TrainerCallback):
    """Shows one bar with steps, loss, speed, FLOPs and the time left, and says early how long training will take."""

    def __init__(self, schedule: Schedule, *, is_shown: bool) -> None:
        self.schedule = schedule
        self.is_shown = is_shown
        self.bar = tqdm(disable=True)
        self.first_step: int | None = None
        self.start = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.is_shown:
            self.bar = tqdm(
                desc="training",
                total=state.max_steps,
                initial=state.global_step,
                unit="step",
                mininterval=1,
                smoothing=0.1,
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.update()
        step = state.global_step
        if not self.is_shown:
            return
        if self.first_step is None:
            self.first_step = step
            self.start = _time_on_device()
        elif step == self.first_step + TIMED_STEPS and step < state.max_steps:
            self._say_how_long(step, state.max_steps, _time_on_device() - self.start)

    def _say_how_long(self, step: int, num_steps: int, elapsed: float) -> None:
        """Estimate the time to go. Where the capacity falls, later steps take less: it goes by their FLOPs."""
        speed = TIMED_STEPS * self.schedule.tokens_per_step / elapsed
        flops = self.schedule.flops_until(step)
        timed_flops = flops - self.schedule.flops_until(step - TIMED_STEPS)
        flops_to_go = self.schedule.flops_until(num_steps) - flops
        seconds = elapsed * flops_to_go / timed_flops
        with tqdm.external_write_mode(file=sys.stderr):  # the bar makes room for the line
            tell(f"about {duration(seconds)} to go, at {speed:,.0f} tokens/s")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            speed = f"{logs['tokens_per_second']:,.0f} tokens/s"
            self.bar.set_postfix_str(f"loss {logs['loss']:.3f}, {speed}, {logs['flops']:.2e} FLOPs", refresh=False)

    def close(self) -> None:
        self.bar.close()


def _time_on_device() -> float:
    """Return the time when the device has done all that it was given."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def duration(seconds: float) -> str:
    """Return a time in words, in the unit that fits.

    >>> duration(40), duration(250), duration(5500)
    ('40 seconds', '4 minutes', '1.5 hours')
    """
    # 1. The largest unit of which it is at least one and a half.
    unit = "second"
    for name, size in UNITS.items():
        if seconds >= 1.5 * size:
            unit = name
    number = seconds / UNITS[unit]

    # 2. Hours and days have a decimal while they are few.
    if UNITS[unit] >= 3600 and number < 10:
        return f"{number:.1f} {unit}s"
    number = max(1, round(number))
    return f"{number} {unit}" if number == 1 else f"{number} {unit}s"
