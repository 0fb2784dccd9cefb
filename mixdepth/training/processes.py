"""Several processes that train one model together."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list


def main_first(state: PartialState, work: Callable[[], Any]) -> Any:
    """Do it on the first process and hand the result to all; what it refuses, all refuse."""
    answer: list[Any] = [None, None]
    if state.is_main_process:
        try:
            answer[0] = work()
        except (ValueError, OSError) as error:
            answer[1] = error
    if state.num_processes > 1:
        told = [answer[0] if isinstance(answer[0], Path) else None, None if answer[1] is None else str(answer[1])]
        broadcast_object_list(told)
        if not state.is_main_process:
            answer = [told[0], None if told[1] is None else ValueError(told[1])]
    if answer[1] is not None:
        raise answer[1]
    return answer[0]
