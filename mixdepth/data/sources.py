"""Sources of text: the standard library, files, JSONL, parquet, datasets. A document is text in UTF-8."""

import importlib.util
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from glob import glob
from pathlib import Path
from typing import Any

STDLIB, PYTHON = "stdlib", "python"
PYTHON_PACKAGES = ("torch", "transformers")
"""The packages that `python` adds to the standard library. They are installed wherever mixdepth is."""
STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}
"""Folders of the standard library that are not read."""
HUB = "hf:"
DATASET_FILES = ("dataset_info.json", "dataset_dict.json")
"""Files that a folder has if `datasets` saved it."""

Documents = Callable[[], Iterator[bytes]]
"""Reads the documents of a corpus. A corpus is read more than once, and is never held in memory."""


def stdlib_files() -> list[Path]:
    """List the files of the standard library, without its tests, by name."""
    files = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = [name for name in folders if name not in STDLIB_LEFT_OUT]  # not walked: site-packages may be large
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)


def python_files() -> list[Path]:
    """List the files of the standard library and of torch and transformers, about 110 MB."""
    files = stdlib_files()
    for name in PYTHON_PACKAGES:
        package = importlib.util.find_spec(name)
        assert package is not None
        assert package.origin is not None
        files += sorted(Path(package.origin).parent.rglob("*.py"))
    return files


BUILT_IN = {STDLIB: stdlib_files, PYTHON: python_files}


def absolute(source: str) -> str:
    """Return the source by a name that means the same in every folder."""
    if source in BUILT_IN or source.startswith(HUB):
        return source
    return os.path.abspath(source)


def absolute_tokenizer(name: str) -> str:
    """Return a tokenizer by a name that means the same in every folder. It is a folder if there is one of its name."""
    if name != "bytes" and os.path.isdir(name):
        return os.path.abspath(name)
    return name


def open_source(source: str, text_field: str) -> Documents:
    """Find the documents that `source` means; `load_corpus` explains what it may be."""
    path = Path(source)
    if source in BUILT_IN:
        return lambda: _read_all(BUILT_IN[source](), text_field)
    if source.startswith(HUB) or any((path / name).is_file() for name in DATASET_FILES):
        return _dataset(source, text_field)
    files = _files(path)
    if not files:
        problem = "has no files" if path.is_dir() else "is not a file, a folder or a glob that matches one"
        raise ValueError(
            f"corpus {source!r} {problem}: give 'stdlib', 'python', a path, or 'hf:name' for a dataset of the hub"
        )
    return lambda: _read_all(files, text_field)


def _files(path: Path) -> list[Path]:
    """List the files of a folder, or those that a glob matches, by name. A file stands for itself."""
    if path.is_file():
        return [path]
    if path.is_dir():
        paths = [inner for inner in sorted(path.rglob("*")) if not _is_hidden(inner.relative_to(path))]
    else:
        paths = [Path(name) for name in sorted(glob(str(path), recursive=True))]
    return [inner for inner in paths if inner.is_file()]


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _read_all(files: list[Path], text_field: str) -> Iterator[bytes]:
    """Yield the documents of all files; the ending of a file says what is in it."""
    for file in files:
        try:
            match file.suffix:
                case ".jsonl" | ".ndjson":
                    yield from _jsonl(file, text_field)
                case ".parquet":
                    yield from _parquet(file, text_field)
                case _:
                    yield _text(file)
        except OSError as error:
            raise ValueError(f"{str(file)!r} cannot be read ({error.strerror or error})") from error


def _text(file: Path) -> bytes:
    """Read a text file, and refuse one that is not text."""
    text = file.read_bytes()
    try:
        text.decode()
        is_text = b"\0" not in text
    except UnicodeDecodeError:
        is_text = False
    if not is_text:
        raise ValueError(f"{str(file)!r} is not text in UTF-8: leave it out, as by the glob 'folder/**/*.txt'")
    return text


def _jsonl(file: Path, text_field: str) -> Iterator[bytes]:
    """Yield a document for each line of a JSONL file."""
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number} of {str(file)!r} is not JSON: {error}") from error
            yield _text_of(entry, text_field, f"line {number} of {str(file)!r}")


def _parquet(file: Path, text_field: str) -> Iterator[bytes]:
    """Yield a document for each row of a parquet file."""
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ValueError("parquet files need pyarrow: pip install 'mixdepth[data]'") from error
    try:
        table = parquet.ParquetFile(file)
    except Exception as error:  # pyarrow's own kinds
        raise ValueError(f"{str(file)!r} is not a parquet file ({error})") from error
    _check_column(text_field, table.schema_arrow.names, str(file))
    number = 0
    for batch in table.iter_batches(columns=[text_field]):
        for entry in batch.to_pylist():
            number += 1
            yield _text_of(entry, text_field, f"row {number} of {str(file)!r}")


def _dataset(source: str, text_field: str) -> Documents:
    """Load a dataset of the hub, or one that was saved to disk."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError("datasets need a package: pip install 'mixdepth[data]'") from error
    try:
        if source.startswith(HUB):
            name, config, split, *_ = [*source.removeprefix(HUB).split(":"), "", ""]
            data = datasets.load_dataset(name, config or None, split=split or "train")
        else:
            data = datasets.load_from_disk(source)
    except Exception as error:  # the hub has many ways to fail
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"corpus {source!r} cannot be loaded ({reason})") from error
    if isinstance(data, datasets.DatasetDict):
        if "train" not in data:
            raise ValueError(f"corpus {source!r} has the splits {list(data)} and no 'train': name the folder of one")
        data = data["train"]
    _check_column(text_field, data.column_names, source)

    def rows() -> Iterator[bytes]:
        for number, row in enumerate(data, start=1):
            yield _text_of(row, text_field, f"row {number} of {source!r}")

    return rows


def _check_column(text_field: str, names: list[str], where: str) -> None:
    """Refuse a table without the column that holds the text."""
    if text_field not in names:
        raise ValueError(f"{where!r} has no column {text_field!r}, but {names}: see text_field")


def _text_of(entry: Any, text_field: str, where: str) -> bytes:
    """Return the text of a row as a document. It gets no NUL, which ends documents."""
    if not isinstance(entry, dict):
        raise ValueError(f"{where} has no text under {text_field!r}, but {type(entry).__name__}: see text_field")
    text = entry.get(text_field)
    if not isinstance(text, str):
        raise ValueError(f"{where} has no text under {text_field!r}, but {list(entry)}: see text_field")
    return text.replace("\0", "").encode(errors="replace")
