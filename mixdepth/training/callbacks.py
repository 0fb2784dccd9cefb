"""What happens around a training step: the capacity falls, time is measured, a progress bar moves."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback

from mixdepth.hf.install import set_capacity
from mixdepth.training.schedule import Schedule


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
    """Shows one bar with steps, loss, FLOPs and the time left."""

    def __init__(self, is_shown: bool) -> None:
        self.is_shown = is_shown
        self.bar = tqdm(disable=True)

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

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.bar.set_postfix_str(f"loss {logs['loss']:.3f}, {logs['flops']:.2e} FLOPs", refresh=False)

    def close(self) -> None:
        self.bar.close()
