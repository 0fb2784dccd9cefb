"""The version of this package, and the commit that it was made from."""

import functools
import subprocess
from pathlib import Path

__version__ = "0.1.0"


@functools.cache
def commit() -> str | None:
    """The commit of the source tree that this package is imported from; None if it is installed without one."""
    folder = Path(__file__).parents[1]
    if not (folder / ".git").exists():
        return None
    try:
        answer = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()
