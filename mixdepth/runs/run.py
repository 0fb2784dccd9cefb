"""The folder of a training run: its settings, logs, results and text. `layout.py` lists its files."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mixdepth.data.corpus import Corpus, TokenisedText, tokenise_corpus
from mixdepth.files import check_name, read_json, write_json, writing
from mixdepth.runs.layout import COMPLETE, METRICS, RESULT, SETTINGS, TIMINGS
from mixdepth.runs.settings import MAY_DIFFER, TrainConfig
from mixdepth.version import how_to_install

LOCK = ".lock"
DERIVED = ("learning_rate", "steps", "flops", "parameters", "heads")
"""Values in run.json that follow from the settings. Another version may derive others from the same settings."""


class Run:
    """The folder of a training run."""

    def __init__(self, folder: str | Path) -> None:
        check_name(folder)
        self.folder = Path(folder)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def settings(self) -> TrainConfig:
        """The settings in run.json."""
        try:
            return TrainConfig.from_dict(self.about["settings"])
        except (TypeError, AttributeError) as error:
            path = str(self.folder / SETTINGS)
            raise ValueError(f"{path!r} is damaged (its settings make no sense: {error}): restore it") from error

    @property
    def about(self) -> dict[str, Any]:
        """The content of run.json."""
        about: dict[str, Any] = read_json(self.folder / SETTINGS, keys=("settings", "corpus_digest", "versions"))
        return about

    @property
    def result(self) -> dict[str, Any] | None:
        """The content of result.json; None while the run is not finished."""
        path = self.folder / RESULT
        if not path.exists():
            return None
        result: dict[str, Any] = read_json(path, keys=("validation_loss",))
        return result

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
        if not path.exists():
            return []
        try:
            *lines, _ = path.read_text().split("\n")  # what follows the last line's end is still being written
            return [json.loads(line) for line in lines]
        except ValueError as error:
            raise ValueError(f"{str(path)!r} is damaged ({error}): restore it, or train again elsewhere") from error

    def append(self, name: str, line: dict[str, Any]) -> None:
        """Append a line to one of the logs."""
        with writing(self.folder / name), open(self.folder / name, "a") as file:
            file.write(json.dumps(line) + "\n")

    def corpus(self) -> Corpus:
        """Read the text that this run was trained on, with the run's own tokenizer. Any other text is refused."""
        settings = self.settings
        tokenizer = settings.tokenizer
        if settings.model is not None:
            tokenizer = str(self.folder)
        corpus = tokenise(settings, tokenizer).open()
        if self.about["corpus_digest"] != corpus.digest:
            raise ValueError(
                f"the corpus {settings.corpus!r} is no longer what {str(self.folder)!r} was trained on: restore it, or "
                "name another text"
            )
        return corpus

    def is_of(self, config: TrainConfig) -> bool:
        """Say whether this run has these settings, apart from those of how it is computed."""
        ignored = dict.fromkeys(MAY_DIFFER)
        return self.settings.to_dict() | ignored == config.to_dict() | ignored

    @contextmanager
    def open(self, about: dict[str, Any]) -> Iterator[None]:
        """Make the run that `about` describes, or find it in its folder, and lock the folder within this context.

        A finished run is only compared: nothing is written to it, and its folder may allow no writing.
        """
        path = self.folder
        if (path / SETTINGS).exists() and (path / RESULT).exists():
            self._check_same(about)
            yield
            return
        self._check_folder()
        lock = FileLock(path / LOCK)
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

    def _check_folder(self) -> None:
        """Refuse a folder that holds something other than a run."""
        path = self.folder
        if path.exists() and not path.is_dir():
            raise ValueError(f"{str(path)!r} is a file, not the folder of a run: choose another --out")
        if not path.is_dir() or (path / SETTINGS).exists():
            return
        leftovers = {LOCK, f"{SETTINGS}.part"}  # of a process that was killed before it wrote the settings
        others = sorted(file.name for file in path.iterdir() if file.name not in leftovers)
        if others:
            raise ValueError(
                f"{str(path)!r} holds {others[0]!r} and no {SETTINGS}: it is not a run's folder; choose another --out"
            )

    def _check_same(self, about: dict[str, Any]) -> None:
        """Refuse to resume a run that `about` does not describe, and name what differs."""
        folder = repr(str(self.folder))
        old = self.about
        # An older version knew fewer settings: reading them has filled in the defaults of those that it lacked.
        before = _flat(self.settings.to_dict())
        now = _flat(about["settings"])

        # 1. A dense and a routed model differ in everything about routing: say only that.
        was_dense = "depth" in before
        if was_dense != ("depth" in now):
            kind = "dense" if was_dense else "routed"
            raise ValueError(f"{folder} holds a run of a {kind} model: choose another --out")

        # 2. Settings.
        differing = [name for name in now if before.get(name) != now[name] and name not in MAY_DIFFER]
        if differing:
            changes = "; ".join(f"{name} was {before.get(name)!r} and is now {now[name]!r}" for name in differing)
            raise ValueError(f"{folder} holds a run with other settings: {changes}. Choose another --out")

        # 3. What another version of mixdepth has derived from the same settings.
        for name in DERIVED:
            if old.get(name) != about[name]:
                raise ValueError(
                    f"{folder} holds a run of mixdepth {old['versions'].get('mixdepth')}, in which {name} was "
                    f"{old.get(name, 'not recorded')}, not {about[name]}: {how_to_install(old['versions'])}, or choose "
                    "another --out"
                )

        # 4. The text.
        if old["corpus_digest"] != about["corpus_digest"]:
            raise ValueError(
                f"the corpus {now['corpus']!r} or its tokenizer is no longer what {folder} was trained on: choose "
                "another --out"
            )


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings under dotted names, such as `depth.capacity`. A dense model has the one name `depth`."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def tokenise(config: TrainConfig, tokenizer: str | None = None) -> TokenisedText:
    """Read, split and tokenise the text that these settings name, with their own tokenizer or one that is the same."""
    if tokenizer is None:
        tokenizer = config.tokenizer if config.model is None else tokenizer_of(config.model)
    return tokenise_corpus(
        config.corpus,
        tokenizer,
        text_field=config.text_field,
        validation=config.validation,
        test=config.test,
    )


def tokenizer_of(name: str) -> str:
    """Return the place of a model's tokenizer. A checkpoint's is in its run's folder."""
    path = Path(name)
    if (path / COMPLETE).exists():
        return str(path.parent)
    return name


def corpus_of(config: TrainConfig) -> Corpus:
    """Read the text that these settings name."""
    return tokenise(config).open()
