"""Files that appear whole or not at all, and a clear word to the user."""

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
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

RESTORE = "restore it, or begin anew in another folder"


def as_json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def write_json(path: str | Path, value: Any) -> None:
    write_text(path, as_json(value))


def without_nan(value: Any) -> Any:
    """The same value with None in place of NaN and infinity, which JSON does not know."""
    if isinstance(value, dict):
        return {key: without_nan(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_name(path: str | Path) -> None:
    """Refuse a name that no file can have."""
    try:
        os.lstat(path)
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is no file: a name cannot hold the character NUL") from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ValueError(explained(error)) from error


def is_inside(name: Any) -> bool:
    """Whether a name that a file tells is that of a file in the same folder, or below it."""
    return isinstance(name, str) and not PurePath(name).is_absolute() and ".." not in PurePath(name).parts


def shortened(text: str, length: int = 60) -> str:
    """Quote a text that may be long, or hold characters that a terminal obeys."""
    return repr(text) if len(text) <= length else f"{text[:length]!r}..."


def explained(error: Exception) -> str:
    """An error as a sentence, without the number that the system has for it."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    said = "the name is too long" if error.errno == errno.ENAMETOOLONG else error.strerror
    return said if error.filename is None else f"{str(error.filename)!r}: {said}"


def write_text(path: str | Path, text: str) -> None:
    """Write aside, then rename: whoever reads the file reads all of it."""
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
    """What a file says; if `keys` are given, an object that has them all."""
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
    """Refuse a part of a file that is no object with these keys."""
    missing = [key for key in keys if not isinstance(value, dict) or key not in value]
    if missing:
        raise ValueError(f"{str(path)!r} is damaged (it has no {missing[0]!r}): {way_out}")


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says where room is lacking."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Whatever goes wrong in writing, in one sentence: each library has its own kind of error for a full disk."""
    try:
        yield
    except Timeout:  # an OSError too
        raise
    except (OSError, SafetensorError, RuntimeError, CheckpointException) as error:
        if isinstance(error, RuntimeError) and "PytorchStreamWriter" not in str(error):
            raise
        reason = _reason(error)
        way_out = "choose another folder"
        if _is_full(error):
            way_out = "make room or choose another folder, and give the same command again"
        raise OSError(
            f"{str(path)!r} cannot be written ({reason}); what was finished before is untouched: {way_out}"
        ) from error


def _reason(error: BaseException) -> str:
    """Why something could not be written, without the class and the number of the error."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return "the name is too long"
    said = getattr(error, "strerror", None) or (str(error).strip().splitlines() or [type(error).__name__])[-1]
    said = re.sub(r"^(\w+\.)*\w+(Error|Exception): ", "", said)
    return re.sub(r"\[Errno \d+\] ", "", said)


def _is_full(error: BaseException) -> bool:
    """Whether room is lacking. Libraries that write for us may say so in words alone."""
    number = getattr(error, "errno", None)
    words = [os.strerror(code) for code in FULL]
    return number in FULL if number is not None else any(word in str(error) for word in words)
