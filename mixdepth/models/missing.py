"""Refuses the name of a model that can only be a local folder and is missing. It imports nothing heavy."""

import difflib
import os
import re
from pathlib import Path

HUB_NAME = re.compile(r"\b[\w\-.]{1,96}\b(/\b[\w\-.]{1,96}\b)?", re.ASCII)
"""A name that the hub may have: `name` or `owner/name`, as huggingface_hub checks it."""
IN_MODEL_FOLDERS = ("run.json", "config.json")
"""A folder that has one of these files is a run, or a model's folder."""
NOT_FOLDERS = ("smollm2",)
"""Models that are in a Python package: their names mean no folder and no name of the hub."""
MOST_NEIGHBOURS = 5
"""How many runs a sentence names."""


def missing_run(name: str) -> str | None:
    """Return a sentence if the name is a local path where nothing is. Return None if something may have this name.

    A name of the hub is local, too, if its first part is a folder here, or if runs lie next to where it would be.
    """
    # 1. What exists is looked at elsewhere, and so is a name that no file can have.
    if name in NOT_FOLDERS:
        return None
    try:
        os.stat(name)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError):
        return None
    else:
        return None

    # 2. Decide whether it can be meant as a name of the hub.
    path = Path(name)
    neighbours = _neighbours(path)
    is_bare = len(path.parts) == 1
    if HUB_NAME.fullmatch(name):
        is_local = bool(_close(path, neighbours)) if is_bare else bool(neighbours) or os.path.exists(path.parts[0])
        if not is_local:
            return None

    # 3. Say what there is instead.
    sentence = f"there is no run {name!r}"
    if not neighbours:
        return f"{sentence} and no model's folder of this name"
    verb = "is" if len(neighbours) == 1 else "are"
    listed = ", ".join(neighbours[:MOST_NEIGHBOURS])
    num_more = len(neighbours) - MOST_NEIGHBOURS
    more = f" and {num_more} more" if num_more > 0 else ""
    return f"{sentence}; there {verb} {listed}{more}"


def _neighbours(path: Path) -> list[str]:
    """List the runs and model folders that lie in the same folder as the path, those with close names first."""
    try:
        folders = sorted(path.parent.iterdir())
    except OSError:  # there is no such folder, or it cannot be read
        return []
    names = [str(folder) for folder in folders if _is_model_folder(folder)]
    close = _close(path, names)
    return close + [name for name in names if name not in close]


def _is_model_folder(folder: Path) -> bool:
    return any(os.path.isfile(folder / file) for file in IN_MODEL_FOLDERS)


def _close(path: Path, names: list[str]) -> list[str]:
    """Return the names that are spelt nearly like the path, the closest first."""
    return difflib.get_close_matches(str(path), names, n=MOST_NEIGHBOURS, cutoff=0.75)
