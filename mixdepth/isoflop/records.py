"""cells.jsonl: what the cells of a study came to, one line for each cell that is settled.

```
{"name": "1e13/mod/4x64/seed0", "run": {...}, "result": {...}, "test": {...}}
{"name": "1e13/mod/4x64/seed1", "failed": {"kind": "diverged", "message": "..."}}
```

Each part is the content of a file of the cell's folder: `run.json`, `result.json`, `test.json` and `failed.json`.
A study is published with this file alone. The folders hold weights, checkpoints and logs, and are not needed after it.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mixdepth.files import write_text, writing
from mixdepth.isoflop.forms import damaged

RECORDS = "cells.jsonl"
PARTS = ("run", "result", "test", "failed")
RESTORE_FILE = "restore it, or delete it while the folders of the cells are there"
RESTORE_LINE = "restore it, or delete the line of this cell and run the study again"


@dataclass(frozen=True, kw_only=True)
class CellRecord:
    """One line of cells.jsonl. A part is None where the line does not have it; its content is not checked here."""

    name: str
    run: Any = None
    result: Any = None
    test: Any = None
    failed: Any = None

    def to_dict(self) -> dict[str, Any]:
        parts = {"run": self.run, "result": self.result, "test": self.test, "failed": self.failed}
        present = {part: content for part, content in parts.items() if content is not None}
        return {"name": self.name, **present}


def read_records(folder: Path) -> dict[str, CellRecord]:
    """Read the cells.jsonl of a study: the records by the names of their cells."""
    path = folder / RECORDS
    if not path.exists():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise damaged(path, str(error), RESTORE_FILE) from error
    records: dict[str, CellRecord] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        record = _read_line(line, path, number)
        if record.name in records:
            raise damaged(path, f"line {number} is about {record.name!r}, as an earlier line is", RESTORE_FILE)
        records[record.name] = record
    return records


def _read_line(line: str, path: Path, number: int) -> CellRecord:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise damaged(path, f"line {number}: {error}", RESTORE_FILE) from error
    if not isinstance(content, dict) or not isinstance(content.get("name"), str):
        raise damaged(path, f"line {number} has no name of a cell", RESTORE_FILE)
    unknown = [part for part in content if part not in ("name", *PARTS)]
    if unknown:
        raise damaged(path, f"line {number} has the unknown part {unknown[0]!r}", RESTORE_FILE)
    return CellRecord(**content)


def write_records(folder: Path, records: Iterable[CellRecord]) -> None:
    """Write the whole of cells.jsonl: a reader sees the old file or the new one."""
    lines = [json.dumps(record.to_dict()) + "\n" for record in records]
    path = folder / RECORDS
    with writing(path):
        write_text(path, "".join(lines))


def check_names(records: Mapping[str, CellRecord], names: set[str], folder: Path) -> None:
    """Refuse records of cells that the plan does not have."""
    for name in records:
        if name not in names:
            raise damaged(folder / RECORDS, f"it has the cell {name!r}, which study.json does not plan", RESTORE_FILE)
