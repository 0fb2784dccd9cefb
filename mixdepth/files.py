"""Files that appear whole or not at all, and a clear word to the user."""

import errno
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

RESTORE = "restore it, or begin anew in another folder"


def as_json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def write_json(path: str | Path, value: Any) -> None:
    write_text(path, as_json(value))


def tell_numbers(text: str, numbers: Any, file: str | None) -> None:
    """Print a text, and write its numbers to a file too; to the file `-` they are printed instead."""
    numbers = without_nan(numbers)
    print(as_json(numbers) if file == "-" else text, end="" if file == "-" else "\n")
    if file not in (None, "-"):
        write_json(file, numbers)


def without_nan(value: Any) -> Any:
    """The same value with None in place of NaN and infinity, which JSON does not know."""
    if isinstance(value, dict):
        return {key: without_nan(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_file(file: str | None) -> None:
    """Refuse a file for numbers that could not be written, before they are worked out."""
    if file not in (None, "-") and not Path(file).parent.is_dir():
        raise ValueError(f"{file!r} cannot be written: there is no folder {str(Path(file).parent)!r}")


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
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is damaged ({error}): {way_out}") from error
    check_keys(value, keys, path, way_out)
    return value


def check_keys(value: Any, keys: Sequence[str], path: Path, way_out: str = RESTORE) -> None:
    """Refuse a part of a file that is no object with these keys."""
    missing = [key for key in keys if not isinstance(value, dict) or key not in value]
    if missing:
        raise ValueError(f"{str(path)!r} is damaged (it has no {missing[0]!r}): {way_out}")


def tell(sentence: str) -> None:
    print(f"mixdepth: {sentence}", file=sys.stderr, flush=True)
