"""What commands print, and the files that they write their numbers to."""

from pathlib import Path
from typing import Any

from mixdepth.files import as_json, without_nan, write_json


def tell_numbers(text: str, numbers: Any, file: str | None) -> None:
    """Print a text, and write its numbers to a file too; to the file `-` they are printed instead."""
    numbers = without_nan(numbers)
    print(as_json(numbers) if file == "-" else text, end="" if file == "-" else "\n")
    if file not in (None, "-"):
        write_json(file, numbers)


def check_file(file: str | None) -> None:
    """Refuse a file for numbers that could not be written, before they are worked out."""
    if file not in (None, "-") and not Path(file).parent.is_dir():
        raise ValueError(f"{file!r} cannot be written: there is no folder {str(Path(file).parent)!r}")
