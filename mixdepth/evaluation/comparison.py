"""`evaluate_runs`: models side by side on the same held-out text."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from mixdepth.config import check_integer
from mixdepth.data.corpus import HELD_OUT, Corpus, Side, load_corpus
from mixdepth.data.sources import absolute
from mixdepth.evaluation.held_out import Evaluation, evaluate
from mixdepth.evaluation.intervals import Interval, interval
from mixdepth.hf.model import RoutedCausalLM
from mixdepth.models.flops import count_flops
from mixdepth.models.loading import Loaded, load, positions
from mixdepth.runs.run import tokenizer_of
from mixdepth.text import columns

DEFAULT_CONTEXT = 1024
"""The length of a window where no run says how long its windows were in training."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One model's numbers."""

    name: str
    note: str
    """A sentence that a reader of the numbers must know, or nothing."""
    parameters: int
    flops_per_token: float | None
    """FLOPs of a forward pass at the configured capacity; None for architectures whose FLOPs are not counted."""
    bits_per_nat: float
    """Bits per byte of text for each nat per token."""
    is_routed: bool
    evaluation: Evaluation
    text: str
    """A digest of text, tokenizer and window length. Models with the same digest are compared window by window."""

    def bits_per_byte(self, nats: float) -> float:
        return nats * self.bits_per_nat

    def to_dict(self) -> dict[str, Any]:
        evaluation = self.evaluation
        return {
            "name": self.name,
            "note": self.note,
            "parameters": self.parameters,
            "flops_per_token": self.flops_per_token,
            "loss": evaluation.loss,
            "lookahead_loss": evaluation.lookahead_loss,
            "bits_per_byte": self.bits_per_byte(evaluation.loss),
            "lookahead_bits_per_byte": self.bits_per_byte(evaluation.lookahead_loss),
            "causal_minus_lookahead": evaluation.gap.to_dict(),
            "windows": len(evaluation.rows),
            "layers": {index: layer.to_dict() for index, layer in evaluation.layers.items()},
            "loads": evaluation.loads,
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Models side by side. The others are compared with the first."""

    entries: list[Entry]

    def difference(self, entry: Entry) -> Interval | None:
        """Return the causal loss minus that of the first model, window by window; None for different windows."""
        first = self.entries[0]
        if entry is first or entry.text != first.text:
            return None
        pairs = zip(entry.evaluation.rows, first.evaluation.rows, strict=True)
        differences = []
        weights = []
        for row, first_row in pairs:
            differences.append(row.loss - first_row.loss)
            weights.append(row.num_labels)
        return interval(differences, weights)

    def to_dict(self) -> dict[str, Any]:
        models = []
        for entry in self.entries:
            difference = self.difference(entry)
            as_dict = None if difference is None else difference.to_dict()
            models.append({**entry.to_dict(), "difference_to_first": as_dict})
        return {"models": models}

    def __str__(self) -> str:
        """Return a table with one column for each model, and notes."""
        lines: list[tuple[str, Callable[[Entry], str]]] = [
            ("", lambda entry: entry.name),
            ("parameters", lambda entry: f"{entry.parameters:,}"),
            ("FLOPs per token", _flops_cell),
            ("loss (nats per token)", lambda entry: f"{entry.evaluation.loss:.4f}"),
            ("  with look-ahead", lambda entry: f"{entry.evaluation.lookahead_loss:.4f}"),
            ("  causal - look-ahead", lambda entry: str(entry.evaluation.gap) if entry.is_routed else ""),
            ("bits per byte", lambda entry: f"{entry.bits_per_byte(entry.evaluation.loss):.4f}"),
            ("  with look-ahead", lambda entry: f"{entry.bits_per_byte(entry.evaluation.lookahead_loss):.4f}"),
        ]
        if len(self.entries) > 1:
            lines.append((f"loss - {self.entries[0].name}", self._difference_cell))
        lines += [
            ("realised capacity", _capacities_cell),
            ("F1 against top-k", _f1_cell),
            ("windows", lambda entry: f"{len(entry.evaluation.rows):,}"),
        ]
        rows = []
        for title, cell in lines:
            rows.append([title, *(cell(entry) for entry in self.entries)])
        return "\n".join([columns(rows, left=(0,)), *self._notes()])

    def _difference_cell(self, entry: Entry) -> str:
        difference = self.difference(entry)
        return "-" if difference is None else str(difference)

    def _notes(self) -> list[str]:
        notes = [entry.note for entry in self.entries if entry.note]
        if len({entry.text for entry in self.entries}) > 1:
            notes.append("not on the same windows: text, split, tokens or context differ, so losses do not compare")
        return notes


def _flops_cell(entry: Entry) -> str:
    if entry.flops_per_token is None:
        return "not counted"
    return f"{entry.flops_per_token:,.0f}"


def _capacities_cell(entry: Entry) -> str:
    return " ".join(f"{layer.capacity:.1%}" for layer in entry.evaluation.layers.values())


def _f1_cell(entry: Entry) -> str:
    return " ".join(f"{layer.f1:.2f}" for layer in entry.evaluation.layers.values())


@dataclass(frozen=True, kw_only=True)
class _Windows:
    """Which windows of which text the models are evaluated on. It is the same for all of them."""

    corpus: str | None
    """The text for every model; None: each run brings its own."""
    corpus_of_runs: Corpus | None
    """A text of runs that has been read already."""
    text_field: str
    shares: dict[str, Any]
    """The held-out shares of `corpus`; empty for the defaults."""
    split: str
    number: int | None
    """How many windows, evenly spaced; None: all."""
    batch_size: int


def evaluate_runs(
    names: Sequence[str],
    *,
    corpus: str | None = None,
    text_field: str = "text",
    context: int | None = None,
    windows: int | None = None,
    batch_size: int = 16,
    split: str = "validation",
    corpus_of_runs: Corpus | None = None,
) -> Comparison:
    """Evaluate runs, folders or models of the hub on held-out text.

    A run brings its own corpus and context, and is evaluated on what it held out. A `corpus` given here is used for
    all models: the part of it that one of the runs held out, or else a tenth of it. `split` is `validation`, or `test`
    for the second part that runs with `test` set have held out. `windows` takes that many of the windows, evenly
    spaced. `corpus_of_runs` is the corpus of runs that has been read already, and is not read again for them. The same
    call gives the same numbers every time.
    """
    # 1. Check the arguments before a model is loaded.
    if not names:
        raise ValueError("there is nothing to evaluate: name at least one run")
    if context is not None:
        check_integer("context", context, minimum=2)
    if windows is not None:
        check_integer("windows", windows, minimum=1)
    check_integer("batch_size", batch_size, minimum=1)
    if split not in HELD_OUT:
        raise ValueError(f"split must be one of {', '.join(HELD_OUT)}, not {split!r}")
    if corpus is not None:
        corpus = absolute(corpus)
    loaded = [load(name) for name in names]
    # 2. A model that is not one of our runs borrows the context length and the split of the runs next to it, so that
    #    they are evaluated on the same windows.
    runs = [model.run.settings for model in loaded if model.run is not None]
    borrowed_context = min((settings.context for settings in runs), default=DEFAULT_CONTEXT)
    shares: dict[str, Any] = {}
    for settings in runs:
        if settings.corpus == corpus:
            shares = {"validation": settings.validation, "test": settings.test}
            break
    chosen = _Windows(
        corpus=corpus,
        corpus_of_runs=corpus_of_runs,
        text_field=text_field,
        shares=shares,
        split=split,
        number=windows,
        batch_size=batch_size,
    )
    # 3. Evaluate one model after the other.
    entries = []
    for name, model in zip(names, loaded, strict=True):
        default_context = borrowed_context if model.run is None else model.run.settings.context
        entries.append(_evaluate(name, model, context or default_context, chosen))
    return Comparison(entries=entries)


def _evaluate(name: str, loaded: Loaded, context: int, chosen: _Windows) -> Entry:
    """Evaluate one model on windows of `context` tokens, or as many as it has positions for."""
    model = loaded.model
    # 1. Read the text, and cut it into windows.
    source, text = _text_for(name, loaded, chosen)
    if loaded.run is None:
        context = min(context, positions(model))
    side: Side = getattr(text, chosen.split)
    windows = side.windows(context).spread(chosen.number)
    if not len(windows):
        raise ValueError(f"the {chosen.split} text of {source!r} is shorter than a window of {context} tokens")
    if loaded.tokenizer.get_vocab() != text.tokenizer.get_vocab():
        raise ValueError(f"the tokenizer in {name!r} has another vocabulary than the one that it was trained with")
    # 2. Evaluate the model, with a bar that shows how far it is.
    device = next(model.parameters()).device
    num_batches = -(-len(windows) // chosen.batch_size)
    bar = tqdm(windows.batches(chosen.batch_size), desc=name, unit="batch", leave=False, total=num_batches)
    evaluation = evaluate(model, (batch.to(device) for batch in bar))
    # 3. Say what a reader of the numbers must know.
    note = loaded.note
    if not (math.isfinite(evaluation.loss) and math.isfinite(evaluation.lookahead_loss)):
        not_finite = f"{name}: its loss is not a number, as its products are not finite"
        note = f"{note}; {not_finite}" if note else not_finite
    return Entry(
        name=name,
        note=note,
        parameters=model.num_parameters(),
        flops_per_token=_flops_per_token(model, context),
        bits_per_nat=side.bits_per_nat,
        is_routed=isinstance(model, RoutedCausalLM),
        evaluation=evaluation,
        text=f"{text.digest}/{chosen.split}/{context}/{len(windows)}",
    )


def _text_for(name: str, loaded: Loaded, chosen: _Windows) -> tuple[str, Corpus]:
    """Return the source of the text that this model is evaluated on, and the text."""
    run = loaded.run
    if run is not None and chosen.corpus in (None, run.settings.corpus):
        text = chosen.corpus_of_runs
        if text is None or text.digest != run.about["corpus_digest"]:
            text = run.corpus()
        return run.settings.corpus, text
    if chosen.corpus is None:
        raise ValueError(f"{name!r} is not a run and has no corpus of its own: give one by --corpus")
    text = load_corpus(chosen.corpus, tokenizer_of(name), text_field=chosen.text_field, **chosen.shares)
    return chosen.corpus, text


def _flops_per_token(model: Any, context: int) -> float | None:
    try:
        return count_flops(model, context).total / context
    except ValueError:  # not every architecture is counted
        return None
