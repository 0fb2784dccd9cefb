"""The version of this package, and the commit that it was made from."""

import functools
import subprocess
from collections.abc import Mapping
from pathlib import Path

__version__ = "0.2.0"


@functools.cache
def commit() -> str | None:
    """Return the commit of the source tree that this package is imported from; None if it is installed without one."""
    folder = Path(__file__).parents[1]
    if not (folder / ".git").exists():
        return None
    try:
        answer = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()


def made_by() -> dict[str, str]:
    """Return what a file records of the mixdepth that wrote it: its version, and its commit where there is one."""
    versions = {"mixdepth": __version__}
    source = commit()
    if source is not None:
        versions["commit"] = source
    return versions


def how_to_install(versions: Mapping[str, str]) -> str:
    """Say how to get the mixdepth that wrote these `versions` into a file.

    >>> how_to_install({"mixdepth": "0.1.0"})
    'install that version (pip install mixdepth==0.1.0)'
    >>> how_to_install({"mixdepth": "0.2.0", "commit": "4bdb977"})
    'install that version (git checkout 4bdb977, then pip install .)'
    """
    if "commit" in versions:
        command = f"git checkout {versions['commit']}, then pip install ."
    else:
        command = f"pip install mixdepth=={versions.get('mixdepth')}"
    return f"install that version ({command})"
