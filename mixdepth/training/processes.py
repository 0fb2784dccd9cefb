"""Several processes that train one model together."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

Answer = TypeVar("Answer")


def is_first() -> bool:
    """Return whether this process is the first of those that torchrun started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def main_first(state: PartialState, work: Callable[[], Answer]) -> Answer:
    """Do some work on the first process, and return its answer on all of them.

    The answer must be a value that can be pickled. If the work fails, all processes raise its error.
    """
    answer: Answer | None = None
    error: Exception | None = None
    if state.is_main_process:
        try:
            answer = work()
        except (ValueError, OSError) as refusal:
            error = refusal
    if state.num_processes > 1:
        message = None if error is None else str(error)
        shared: list[Any] = [answer, message]
        broadcast_object_list(shared)
        if not state.is_main_process:
            answer, message = shared
            error = None if message is None else ValueError(message)
    if error is not None:
        raise error
    return answer  # type: ignore[return-value]  # the first process had an answer, or an error
