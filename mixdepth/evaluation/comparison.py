"""`evaluate_runs`: models side by side on held-out text."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from tqdm import tqdm

from mixdepth.config import check_integer
from mixdepth.data.corpus import HELD_OUT, Side, load_corpus
from mixdepth.data.sources import absolute
from mixdepth.evaluation.held_out import Evaluation, Interval, evaluate, interval
from mixdepth.hf.model import RoutedCausalLM
from mixdepth.models.flops import count_flops
from mixdepth.models.loading import Loaded, load, positions
from mixdepth.runs.run import text_of, tokenizer_of
from mixdepth.text import columns


class Entry(NamedTuple):
    """One model's numbers."""

    name: str
    note: str
    parameters: int
    flops_per_token: float | None
    """Of a forward pass at the configured capacity; None where FLOPs are not counted."""
    bits_per_nat: float
    """Bits per byte for each nat per token."""
    is_routed: bool
    evaluation: Evaluation
    text: str  # digest of text, tokenizer and window length: two models with the same can be paired

    def bits_per_byte(self, nats: float) -> float:
        return nats * self.bits_per_nat

    def to_dict(self) -> dict[str, Any]:
        found = self.evaluation
        return {
            "name": self.name,
            "note": self.note,
            "parameters": self.parameters,
            "flops_per_token": self.flops_per_token,
            "loss": found.loss,
            "lookahead_loss": found.lookahead_loss,
            "bits_per_byte": self.bits_per_byte(found.loss),
            "lookahead_bits_per_byte": self.bits_per_byte(found.lookahead_loss),
            "causal_minus_lookahead": found.gap._asdict(),
            "windows": len(found.rows),
            "layers": {index: {**layer._asdict(), "f1": layer.f1} for index, layer in found.layers.items()},
            "loads": found.loads,
        }


class Comparison(NamedTuple):
    """Models side by side, the first the one that the others are measured against."""

    entries: list[Entry]

    def difference(self, entry: Entry) -> Interval | None:
        """Causal loss minus that of the first model, window by window; None where the windows are not the same."""
        first = self.entries[0]
        if entry is first or entry.text != first.text:
            return None
        pairs = list(zip(entry.evaluation.rows, first.evaluation.rows, strict=True))
        return interval([a.loss - b.loss for a, b in pairs], [a.num_labels for a, _ in pairs])

    def to_dict(self) -> dict[str, Any]:
        models = []
        for entry in self.entries:
            difference = self.difference(entry)
            versus = None if difference is None else difference._asdict()
            models.append({**entry.to_dict(), "difference_to_first": versus})
        return {"models": models}

    def __str__(self) -> str:
        """A table, one column for each model."""
        rows: list[list[str]] = [["", *(entry.name for entry in self.entries)]]
        rows.append(["parameters", *(f"{entry.parameters:,}" for entry in self.entries)])
        costs = [entry.flops_per_token for entry in self.entries]
        rows.append(["FLOPs per token", *("not counted" if cost is None else f"{cost:,.0f}" for cost in costs)])
        found = [entry.evaluation for entry in self.entries]
        rows.append(["loss (nats per token)", *(f"{e.loss:.4f}" for e in found)])
        rows.append(["  with look-ahead", *(f"{e.lookahead_loss:.4f}" for e in found)])
        gaps = [_with_interval(e.evaluation.gap) if e.is_routed else "" for e in self.entries]
        rows.append(["  causal - look-ahead", *gaps])
        rows.append(["bits per byte", *(f"{e.bits_per_byte(e.evaluation.loss):.4f}" for e in self.entries)])
        rows.append(
            ["  with look-ahead", *(f"{e.bits_per_byte(e.evaluation.lookahead_loss):.4f}" for e in self.entries)]
        )
        if len(self.entries) > 1:
            differences = [self.difference(entry) for entry in self.entries]
            cells = ["-" if d is None else _with_interval(d) for d in differences]
            rows.append([f"loss - {self.entries[0].name}", *cells])
        capacities = [" ".join(f"{layer.capacity:.1%}" for layer in e.layers.values()) for e in found]
        rows.append(["realised capacity", *capacities])
        rows.append(["F1 against top-k", *(" ".join(f"{layer.f1:.2f}" for layer in e.layers.values()) for e in found)])
        rows.append(["windows", *(f"{len(e.rows):,}" for e in found)])
        notes = [entry.note for entry in self.entries if entry.note]
        if len({entry.text for entry in self.entries}) > 1:
            notes.append("not on the same windows: text, split, tokens or context differ, so losses do not compare")
        return "\n".join([columns(rows, left=(0,)), *notes])


def evaluate_runs(
    names: Sequence[str],
    *,
    corpus: str | None = None,
    text_field: str = "text",
    context: int | None = None,
    windows: int | None = None,
    batch_size: int = 16,
    split: str = "validation",
) -> Comparison:
    """Evaluate runs, folders or models of the hub on held-out text, the same for each of them.

    A run brings its own corpus and context, and what it held out of it; of a `corpus` given here a tenth is held out
    and used, or what one of the runs held out of it, the same for all models. `split` is `validation`, or `test` for
    what runs with `test` set have held out further. `windows` takes that many of the windows, evenly spaced. Numbers do
    not change from call to call.
    """
    if not names:
        raise ValueError("there is nothing to evaluate: name at least one run")
    for name, value in {"context": context, "windows": windows, "batch_size": batch_size}.items():
        if value is not None:
            check_integer(name, value, minimum=2 if name == "context" else 1)
    if split not in HELD_OUT:
        raise ValueError(f"split must be one of {', '.join(HELD_OUT)}, not {split!r}")
    corpus = None if corpus is None else absolute(corpus)
    loaded = [load(name) for name in names]
    # what is no run takes the context of the runs beside it, and the split of one on this text, so that they compare
    runs = [model.run.settings for model in loaded if model.run is not None]
    of_runs = min((settings.context for settings in runs), default=1024)
    beside = next((settings for settings in runs if settings.corpus == corpus), None)
    shares: dict[str, Any] = {} if beside is None else {"validation": beside.validation, "test": beside.test}
    entries = []
    for name, model in zip(names, loaded, strict=True):
        length = context or (of_runs if model.run is None else model.run.settings.context)
        entries.append(_evaluate(name, model, corpus, text_field, shares, length, windows, batch_size, split))
    return Comparison(entries)


def _evaluate(
    name: str,
    loaded: Loaded,
    source: str | None,
    text_field: str,
    shares: dict[str, Any],
    context: int,
    windows: int | None,
    batch: int,
    split: str,
) -> Entry:
    model, tokenizer, run, note = loaded
    if run is not None and source in (None, run.settings.corpus):
        source = run.settings.corpus
        text = text_of(run)
    elif source is None:
        raise ValueError(f"{name!r} is no run and has no corpus of its own: give one by --corpus")
    else:
        text = load_corpus(source, tokenizer_of(name), text_field=text_field, **shares)
    if run is None:
        context = min(context, positions(model))
    side: Side = getattr(text, split)
    chosen = side.windows(context).spread(windows)
    if not len(chosen):
        raise ValueError(f"the {split} text of {source!r} is shorter than a window of {context} tokens")
    if tokenizer.get_vocab() != text.tokenizer.get_vocab():
        raise ValueError(f"the tokenizer in {name!r} has another vocabulary than the one that it was trained with")
    device = next(model.parameters()).device
    bar = tqdm(chosen.batches(batch), desc=name, unit="batch", leave=False, total=-(-len(chosen) // batch))
    batches = (part.to(device) for part in bar)
    found = evaluate(model, batches)
    try:
        flops = count_flops(model, context).total / context
    except ValueError:  # not every architecture is counted
        flops = None
    is_routed = isinstance(model, RoutedCausalLM)
    key = f"{text.digest}/{split}/{context}/{len(chosen)}"
    if not (math.isfinite(found.loss) and math.isfinite(found.lookahead_loss)):
        note = "; ".join([*filter(None, [note]), f"{name}: its loss is not a number, as its products are not finite"])
    return Entry(name, note, model.num_parameters(), flops, side.bits_per_nat, is_routed, found, key)


def _with_interval(value: Interval) -> str:
    return f"{value.mean:+.4f}" + ("" if value.low is None else f" [{value.low:+.4f}, {value.high:+.4f}]")
