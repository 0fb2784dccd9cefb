"""Digests: whether the files of a checkpoint, or of a finished model, are still what was written.

A checkpoint has them in its complete.json and is refused if they do not match. A finished model has them in
digests.json; it may have been changed on purpose, so it is used with a note.
"""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mixdepth.files import is_inside, read_json, shortened, write_json

DIGESTS = "digests.json"
OF_MODELS = (
    "config.json",
    "generation_config.json",
    "conversion.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template.*",
    "adapter_*",
)
"""The files of a folder that say what its model computes. The model card is not among them: people edit it."""


def digests_of(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """Hash these files of a folder, each by its name within it, once they are on the disk."""
    digests = {}
    for path in sorted(files):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            digests[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def difference(folder: Path, digests: Any) -> str | None:
    """Say which file of the folder is not what these digests tell; None if all are."""
    if not isinstance(digests, dict):
        return "its digests are not by file name"
    for name, digest in digests.items():
        if not is_inside(name):
            return f"its digests name {shortened(name)}, which is not in the folder"
        try:
            with open(folder / name, "rb") as file:
                is_same = hashlib.file_digest(file, "sha256").hexdigest() == digest
        except FileNotFoundError:
            return f"{shortened(name)} is missing"
        except (OSError, ValueError) as error:  # a name may be none that a file can have
            return f"{shortened(name)} cannot be read: {getattr(error, 'strerror', None) or error}"
        if not is_same:
            return f"{name} is not what was written"
    return None


def write_digests(folder: Path) -> None:
    """Write digests.json for the finished model in this folder."""
    write_json(folder / DIGESTS, {"files": digests_of(folder, _model_files(folder))})


def change(folder: Path) -> str | None:
    """Say what has changed in a finished model's folder; None if nothing has, or if it has no digests."""
    path = folder / DIGESTS
    if not os.path.lexists(path):
        return None
    try:
        digests = read_json(path, ("files",))["files"]
    except (OSError, ValueError):
        return f"{DIGESTS} is damaged"
    problem = difference(folder, digests)
    if problem is not None and problem.startswith("its digests"):
        return f"{DIGESTS} is damaged: {problem}"
    if problem is not None:
        return problem
    # transformers reads whatever lies in a folder, such as an adapter next to a model
    for file in sorted(_model_files(folder)):
        if file.name not in digests:
            return f"{shortened(file.name)} was added"
    return None


def _model_files(folder: Path) -> set[Path]:
    """Find the files of a folder that say what its model computes."""
    files = set()
    for pattern in OF_MODELS:
        for path in folder.glob(pattern):
            if path.is_file():
                files.add(path)
    return files
