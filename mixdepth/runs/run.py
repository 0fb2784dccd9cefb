"""A run's folder: its settings, its metrics, its checkpoints, and at the end its model.

```
run.json            the settings, and what follows from them
metrics.jsonl       losses and counts; the same to the bit however often the run was interrupted
timings.jsonl       how fast it was
checkpoint-100/     what it takes to go on from step 100; it counts once complete.json is there
config.json, model.safetensors, tokenizer.json ...   the trained model, as transformers reads it
digests.json        what the files of the model were when it was finished
result.json         the last file to appear: the run is finished
```
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mixdepth.data.corpus import Corpus, load_corpus
from mixdepth.files import check_name, read_json, write_json, writing
from mixdepth.runs.digests import difference, digests_of
from mixdepth.runs.settings import MAY_DIFFER, TrainConfig

SETTINGS, METRICS, TIMINGS, RESULT = "run.json", "metrics.jsonl", "timings.jsonl", "result.json"
MARKER = "complete.json"
PREFIX = "checkpoint-"
DERIVED = ("learning_rate", "steps", "flops", "parameters", "heads")
"""What follows from the settings, and may follow differently in another version."""
NUM_KEPT = 2
"""Checkpoints that are kept: the newest, and one to fall back to."""


class Run:
    """A run's folder."""

    def __init__(self, folder: str | Path) -> None:
        check_name(folder)
        self.folder = Path(folder)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def settings(self) -> TrainConfig:
        try:
            return TrainConfig.from_dict(self.about["settings"])
        except (TypeError, AttributeError) as error:
            path = str(self.folder / SETTINGS)
            raise ValueError(f"{path!r} is damaged (its settings make no sense: {error}): restore it") from error

    @property
    def about(self) -> dict[str, Any]:
        """What run.json says."""
        about: dict[str, Any] = read_json(self.folder / SETTINGS, keys=("settings", "corpus_digest", "versions"))
        return about

    @property
    def result(self) -> dict[str, Any] | None:
        """What a finished run came to; None while it is not finished."""
        path = self.folder / RESULT
        return read_json(path, keys=("validation_loss",)) if path.exists() else None

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return self._lines(METRICS)

    @property
    def timings(self) -> list[dict[str, Any]]:
        """The lines of timings.jsonl."""
        return self._lines(TIMINGS)

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        try:
            lines = path.read_text().split("\n") if path.exists() else [""]
            return [json.loads(line) for line in lines[:-1]]  # what follows the last line's end is being written
        except ValueError as error:
            raise ValueError(f"{str(path)!r} is damaged ({error}): restore it, or train anew elsewhere") from error

    @contextmanager
    def open(self, about: dict[str, Any]) -> Iterator[None]:
        """Make the folder, or find the run that `about` describes in it; within this context it is nobody else's.

        A finished run is only looked at: nobody writes to it, and its folder may allow no writing.
        """
        path = self.folder
        if (path / SETTINGS).exists() and (path / RESULT).exists():
            self._check_same(about)
            yield
            return
        if path.exists() and not path.is_dir():
            raise ValueError(f"{str(path)!r} is a file, not the folder of a run: choose another --out")
        if path.is_dir() and any(path.iterdir()) and not (path / SETTINGS).exists():
            leftovers = {".lock", f"{SETTINGS}.part"}
            others = sorted(file.name for file in path.iterdir() if file.name not in leftovers)
            if others:
                raise ValueError(
                    f"{str(path)!r} holds {others[0]!r} and no {SETTINGS}: it is no run's folder; choose another --out"
                )
        lock = FileLock(path / ".lock")
        try:
            with writing(path):
                path.mkdir(parents=True, exist_ok=True)
                lock.acquire(timeout=0)
        except Timeout as error:
            raise ValueError(f"another process is training in {str(path)!r}: wait for it, or stop it") from error
        try:
            if (path / SETTINGS).exists():
                self._check_same(about)
            else:
                with writing(path):
                    write_json(path / SETTINGS, about)
            yield
        finally:
            lock.release()

    def is_of(self, config: TrainConfig) -> bool:
        """Whether this run was one of these settings."""
        same = dict.fromkeys(MAY_DIFFER)
        return self.settings.to_dict() | same == config.to_dict() | same

    def _check_same(self, about: dict[str, Any]) -> None:
        old = self.about
        before, now = _flat(self.settings.to_dict()), _flat(about["settings"])  # an older version knew fewer
        if ("depth" in before) != ("depth" in now):  # where it is None, the model is dense
            kind = "dense" if "depth" in before else "routed"
            raise ValueError(f"{str(self.folder)!r} holds a run of a {kind} model: choose another --out")
        differing = [name for name in now if before.get(name) != now[name] and name not in MAY_DIFFER]
        if differing:
            changes = "; ".join(f"{name} was {before.get(name)!r} and is now {now[name]!r}" for name in differing)
            raise ValueError(f"{str(self.folder)!r} holds a run with other settings: {changes}. Choose another --out")
        for name in DERIVED:
            if old.get(name) != about[name]:
                raise ValueError(
                    f"{str(self.folder)!r} holds a run of mixdepth {old['versions']['mixdepth']}, in which {name} was "
                    f"{old.get(name, 'not told')}, not {about[name]}: go on with that version, or choose another --out"
                )
        if old["corpus_digest"] != about["corpus_digest"]:
            raise ValueError(
                f"the corpus {now['corpus']!r} or its tokenizer is no longer what {str(self.folder)!r} was trained on: "
                "choose another --out"
            )

    def checkpoints(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        return [path for path in self._all_checkpoints() if (path / MARKER).is_file()]

    def _all_checkpoints(self) -> list[Path]:
        found = [path for path in self.folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdecimal()]
        return sorted(found, key=step_of)

    def newest_checkpoint(self) -> tuple[Path | None, list[str]]:
        """The newest checkpoint that is whole, and a sentence for each newer one that is not."""
        damaged: list[str] = []
        for path in reversed(self.checkpoints()):
            problem = damage(path)
            if problem is None:
                return path, damaged
            damaged.append(f"{path.name} is damaged ({problem})")
        return None, damaged

    def go_back_to(self, checkpoint: Path | None) -> None:
        """Forget what came after the checkpoint: later lines of the logs, later or unfinished checkpoints."""
        marker = {} if checkpoint is None else read_json(checkpoint / MARKER)
        for name in (METRICS, TIMINGS):
            path = self.folder / name
            path.touch()
            os.truncate(path, marker.get(name, 0))
        for path in self._all_checkpoints():
            if not (path / MARKER).is_file():
                shutil.rmtree(path)
            elif checkpoint is None or step_of(path) > step_of(checkpoint):
                shutil.rmtree(self.folder / f"damaged-{path.name}", ignore_errors=True)
                path.rename(self.folder / f"damaged-{path.name}")

    def complete(self, checkpoint: Path) -> None:
        """Write the marker of a checkpoint whose files are all there, then let go of old ones."""
        files = digests_of(checkpoint, (path for path in checkpoint.rglob("*") if path.is_file()))
        lengths = {}
        for name in (METRICS, TIMINGS):
            with open(self.folder / name, "rb") as file:
                os.fsync(file.fileno())
                lengths[name] = file.seek(0, os.SEEK_END)
        write_json(checkpoint / MARKER, {"files": files, **lengths})
        for path in self.checkpoints()[:-NUM_KEPT]:
            (path / MARKER).unlink()  # first: a folder that is half deleted must not count
            shutil.rmtree(path)

    def append(self, name: str, line: dict[str, Any]) -> None:
        with writing(self.folder / name), open(self.folder / name, "a") as file:
            file.write(json.dumps(line) + "\n")


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(PREFIX))


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint's files, if anything."""
    try:
        marker = read_json(checkpoint / MARKER, keys=("files", METRICS, TIMINGS))
        for name in (METRICS, TIMINGS):
            if (checkpoint.parent / name).stat().st_size < marker[name]:
                return f"{name} is shorter than it was"
    except (OSError, ValueError, TypeError) as error:
        return str(error)
    return difference(checkpoint, marker["files"])


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def tokenizer_of(name: str) -> str:
    """Where a model's tokenizer is: that of a checkpoint lies in its run's folder."""
    path = Path(name)
    return str(path.parent) if (path / MARKER).exists() else name


def corpus_of(config: TrainConfig, tokenizer: str | None = None) -> Corpus:
    """The text that these settings name, by the model's tokenizer or another that is the same."""
    own = config.tokenizer if config.model is None else tokenizer_of(config.model)
    return load_corpus(
        config.corpus,
        tokenizer or own,
        text_field=config.text_field,
        validation=config.validation,
        test=config.test,
    )


def text_of(run: Run) -> Corpus:
    """The text that a run was trained on, by the run's own tokenizer; any other is refused."""
    settings = run.settings
    corpus = corpus_of(settings, None if settings.model is None else str(run.folder))
    if run.about["corpus_digest"] != corpus.digest:
        raise ValueError(
            f"the corpus {settings.corpus!r} is no longer what {str(run.folder)!r} was trained on: restore it, or name "
            "another text"
        )
    return corpus
