"""Files that appear whole or not at all, and errors of reading and writing as plain sentences."""

import errno
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

from filelock import Timeout

TOO_LONG = "the name is too long"
RESTORE = "restore it, or start again in another folder"


def as_json(value: Any) -> str:
    """Return a value as the text of a JSON file."""
    return json.dumps(value, indent=2) + "\n"


def write_json(path: str | Path, value: Any) -> None:
    """Write a value to a JSON file, which appears whole or not at all."""
    write_text(path, as_json(value))


def without_nan(value: Any) -> Any:
    """Return the same value with None in place of NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: without_nan(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def check_name(path: str | Path) -> None:
    """Refuse a name that no file can have."""
    try:
        os.lstat(path)
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not a file: a name cannot hold the character NUL") from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ValueError(explained(error)) from error


def is_inside(name: Any) -> bool:
    """Say whether a name that is written in a file is that of a file in the same folder, or below it."""
    if not isinstance(name, str):
        return False
    path = PurePath(name)
    return not path.is_absolute() and ".." not in path.parts


def shortened(text: str, length: int = 60) -> str:
    """Quote a text that may be long, or hold characters that a terminal obeys."""
    return repr(text) if len(text) <= length else f"{text[:length]!r}..."


def explained(error: Exception) -> str:
    """Return an error as a sentence, without the number that the system has for it."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    reason = TOO_LONG if error.errno == errno.ENAMETOOLONG else error.strerror
    if error.filename is None:
        return reason
    return f"{str(error.filename)!r}: {reason}"


def write_text(path: str | Path, text: str) -> None:
    """Write to a temporary file, then rename it: a reader sees all of the text or none of it."""
    aside = Path(f"{path}.part")
    try:
        with open(aside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def read_json(path: Path, keys: Sequence[str] = (), way_out: str = RESTORE) -> Any:
    """Read a JSON file. If `keys` are given, it must be an object that has them all."""
    check_name(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{str(path.parent)!r} is not the folder of a run: it has no {path.name}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is damaged ({error}): {way_out}") from error
    check_keys(value, keys, path, way_out)
    return value


def check_keys(value: Any, keys: Sequence[str], path: Path, way_out: str = RESTORE) -> None:
    """Refuse a part of a file that is not an object with these keys."""
    for key in keys:
        if not isinstance(value, dict) or key not in value:
            raise ValueError(f"{str(path)!r} is damaged (it has no {key!r}): {way_out}")


ERRORS_OF_WRITERS = ("SafetensorError", "CheckpointException")
"""What safetensors and torch raise, by name: to import these classes would import torch."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The numbers of errors for a full disk."""
NAME_OF_ERROR = re.compile(r"^(\w+\.)*\w+(Error|Exception): ")
NUMBER_OF_ERROR = re.compile(r"\[Errno \d+\] ")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error in writing into one sentence: each library has its own kind of error for a full disk."""
    try:
        yield
    except BaseException as error:
        if not _is_about_writing(error):
            raise
        reason = _reason(error)
        way_out = "choose another folder"
        if _is_full(error):
            way_out = "make room or choose another folder, and give the same command again"
        raise OSError(
            f"{str(path)!r} cannot be written ({reason}); what was finished before is untouched: {way_out}"
        ) from error


def _is_about_writing(error: BaseException) -> bool:
    """Say whether this is an error in writing a file."""
    if isinstance(error, Timeout):  # an OSError too: another process holds the lock
        return False
    if isinstance(error, RuntimeError):
        return "PytorchStreamWriter" in str(error)
    return isinstance(error, OSError) or type(error).__name__ in ERRORS_OF_WRITERS


def _reason(error: BaseException) -> str:
    """Say why something could not be written, without the class and the number of the error."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return TOO_LONG
    reason = getattr(error, "strerror", None)
    if not reason:
        lines = str(error).strip().splitlines()
        reason = lines[-1] if lines else type(error).__name__
    reason = NAME_OF_ERROR.sub("", reason)
    return NUMBER_OF_ERROR.sub("", reason)


def _is_full(error: BaseException) -> bool:
    """Say whether the disk is full. Libraries that write for us may say so in words only."""
    number = getattr(error, "errno", None)
    if number is not None:
        return number in FULL
    return any(os.strerror(code) in str(error) for code in FULL)
