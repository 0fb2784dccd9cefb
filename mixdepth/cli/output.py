"""Printing results, and writing them to a file as JSON."""

from pathlib import Path
from typing import Any

from mixdepth.files import as_json, without_nan, write_json

SCREEN = "-"
"""The file name by which `--json` prints the numbers in place of the table."""


def print_numbers(table: str, numbers: Any, file: str | None) -> None:
    """Print a table, and write its numbers to a file if one is given."""
    numbers = without_nan(numbers)
    if file == SCREEN:
        print(as_json(numbers), end="")
        return
    print(table)
    if file is not None:
        write_json(file, numbers)


def check_file(file: str | None) -> None:
    """Refuse a file that could not be written, before its numbers are computed."""
    if file is None or file == SCREEN:
        return
    folder = Path(file).parent
    if not folder.is_dir():
        raise ValueError(f"{file!r} cannot be written: there is no folder {str(folder)!r}")
