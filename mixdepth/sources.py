"""Where text comes from: the standard library, files, JSONL, parquet, datasets. A document is its UTF-8."""

import json
import sysconfig
from collections.abc import Callable, Iterator
from glob import glob
from pathlib import Path
from typing import Any

STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}

Documents = Callable[[], Iterator[bytes]]
"""The documents of a corpus, each time anew: it is read more than once, and never held in memory."""


def stdlib_files() -> list[Path]:
    """The files of the standard library, without its tests, by name."""
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(path for path in root.rglob("*.py") if not STDLIB_LEFT_OUT & set(path.relative_to(root).parts))


def open_source(source: str, text_field: str) -> Documents:
    """Find the documents that `source` means, see `load_corpus`."""
    path = Path(source)
    if source == "stdlib":
        return lambda: _texts(stdlib_files())
    if source.startswith("hf:") or (path / "dataset_info.json").is_file():
        return _dataset(source, text_field)
    if path.suffix == ".parquet" and path.is_file():
        return lambda: _parquet(path, text_field)
    if path.suffix in (".jsonl", ".ndjson") and path.is_file():
        return lambda: _jsonl(path, text_field)
    files = [path] if path.is_file() else []
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if file.is_file() and not _is_hidden(file.relative_to(path))]
    elif not files:
        files = [Path(name) for name in sorted(glob(source, recursive=True)) if Path(name).is_file()]
    if not files:
        what = "has no files" if path.is_dir() else "is no file, folder or glob that matches one"
        raise ValueError(f"corpus {source!r} {what}: give 'stdlib', a path, or 'hf:name' for a dataset of the hub")
    return lambda: _texts(files)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _texts(files: list[Path]) -> Iterator[bytes]:
    for file in files:
        text = file.read_bytes()
        try:
            text.decode()
            is_text = b"\0" not in text
        except UnicodeDecodeError:
            is_text = False
        if not is_text:
            raise ValueError(
                f"{str(file)!r} is not text in UTF-8: leave it out, as by a glob such as 'folder/**/*.txt'"
            )
        yield text


def _jsonl(file: Path, text_field: str) -> Iterator[bytes]:
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number} of {str(file)!r} is not JSON: {error}") from error
            known = list(entry) if isinstance(entry, dict) else type(entry).__name__
            yield _text_of(entry, text_field, f"line {number} of {str(file)!r}", known)


def _parquet(file: Path, text_field: str) -> Iterator[bytes]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ValueError("parquet files need pyarrow: pip install 'mixdepth[data]'") from error
    try:
        table = parquet.ParquetFile(file)
    except Exception as error:  # pyarrow's own kinds
        raise ValueError(f"{str(file)!r} is not a parquet file ({error})") from error
    if text_field not in table.schema_arrow.names:
        raise ValueError(f"{str(file)!r} has no column {text_field!r}, but {table.schema_arrow.names}: see text_field")
    for batch in table.iter_batches(columns=[text_field]):
        for entry in batch.to_pylist():
            yield _text_of(entry, text_field, f"a row of {str(file)!r}", list(entry))


def _dataset(source: str, text_field: str) -> Documents:
    try:
        import datasets
    except ImportError as error:
        raise ValueError("datasets need a package: pip install 'mixdepth[data]'") from error
    if source.startswith("hf:"):
        name, config, split, *_ = [*source.removeprefix("hf:").split(":"), "", ""]
        try:
            data = datasets.load_dataset(name, config or None, split=split or "train")
        except Exception as error:  # the hub has many ways to fail
            raise ValueError(f"corpus {source!r} cannot be loaded ({str(error).splitlines()[0]})") from error
    else:
        data = datasets.load_from_disk(source)
        if isinstance(data, datasets.DatasetDict):
            data = data["train"]
    if text_field not in data.column_names:
        raise ValueError(f"corpus {source!r} has no column {text_field!r}, but {data.column_names}: see text_field")
    return lambda: (_text_of(entry, text_field, f"a row of {source!r}", data.column_names) for entry in data)


def _text_of(entry: Any, text_field: str, where: str, known: Any) -> bytes:
    text = entry.get(text_field) if isinstance(entry, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"{where} has no text under {text_field!r}, but {known}: see text_field")
    return text.replace("\0", "").encode()
