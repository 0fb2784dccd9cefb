"""Where a process of the command line begins. Ctrl-C is heard before anything of size is imported."""

import os
import signal
import sys
from types import FrameType

STOPPED = 130
"""Exit code of a command that was stopped with Ctrl-C, as shells have it."""
IMPORTING = "<frozen importlib._bootstrap>"
"""The file of the functions of Python that import a module."""


def run() -> int:
    """Run the command that the process was given, and return its exit code."""
    # 1. Hear Ctrl-C, unless a shell has started this process in the background, where it hears none.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)

    # 2. Run the command.
    try:
        from mixdepth.cli import main

        return main()
    except KeyboardInterrupt:
        _say_stopped()
        return STOPPED
    finally:
        # 3. The work is done or stopped: a second Ctrl-C would only break the end of the process.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _stop(number: int, frame: FrameType | None) -> None:
    """End the process if it is importing, and raise KeyboardInterrupt elsewhere.

    An interrupted import may hide the exception or raise another one, and it has nothing to save.
    """
    while frame is not None:
        if frame.f_code.co_filename == IMPORTING:
            _say_stopped()
            os._exit(STOPPED)
        frame = frame.f_back
    raise KeyboardInterrupt


def _say_stopped() -> None:
    # The process may be inside a print, in which another print would fail.
    os.write(2, b"mixdepth: stopped; finished work is kept\n")


if __name__ == "__main__":
    sys.exit(run())
