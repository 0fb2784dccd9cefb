"""The forms of a study's files, and `check`, which compares the content of a file with its form.

A form describes a value of a JSON file. `check` refuses the first value that differs from its form, in one sentence
that names the file, the field, the value and the way out. Code that reads a checked file does not check it again.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mixdepth.config import is_number
from mixdepth.isoflop.variants import parse_variant

LARGEST = 1e30
"""The largest number in a study. A larger one is damage, and would overflow in the fit."""
LARGEST_COUNT = 10**18
"""The largest count, for those that NumPy takes as whole numbers."""
LARGEST_EFFECT = 700
"""The largest difference. Differences may be logarithms, and the exponential of a larger one overflows."""
NUM_SHOWN = 60
"""How many characters of a wrong value an error shows."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """A text, a number, true or false."""

    words: str
    """What the value must be, in the words of an error."""
    holds: Callable[[object], bool]


@dataclass(frozen=True, kw_only=True)
class ListOf:
    """A list."""

    items: "Form"
    min_length: int = 0
    max_length: int | None = None


@dataclass(frozen=True, kw_only=True)
class Object:
    """An object with fixed names."""

    fields: "Mapping[str, Form]"
    optional: "Mapping[str, Form]" = field(default_factory=dict)
    """Names that may be missing."""
    is_closed: bool = False
    """Whether other names are refused; else they are ignored."""


@dataclass(frozen=True, kw_only=True)
class BySeed:
    """An object whose names are seeds, written as texts."""

    values: "Form"


@dataclass(frozen=True, kw_only=True)
class OrNull:
    """Null, or something."""

    form: "Form"


Form = Value | ListOf | Object | BySeed | OrNull


def check(value: object, form: Form, path: Path, way_out: str, place: str = "") -> None:
    """Refuse a value of a file that differs from its form. `place` says where the value stands in the file."""
    match form:
        case Value():
            if not form.holds(value):
                raise _error(value, form.words, path, way_out, place)
        case ListOf():
            _check_list(value, form, path, way_out, place)
        case Object():
            _check_object(value, form, path, way_out, place)
        case BySeed():
            if not isinstance(value, dict):
                raise _error(value, "an object", path, way_out, place)
            for name, item in value.items():
                if not name.isdecimal():
                    raise _error(name, "a seed", path, way_out, f"a name in {place}")
                check(item, form.values, path, way_out, f"{place}.{name}")
        case OrNull():
            if value is not None:
                check(value, form.form, path, way_out, place)


def damaged(path: Path, problem: str, way_out: str) -> ValueError:
    """Make the error about a file whose content is not what was written."""
    return ValueError(f"{str(path)!r} is damaged ({problem}): {way_out}")


def _check_list(value: object, form: ListOf, path: Path, way_out: str, place: str) -> None:
    if not isinstance(value, list):
        raise _error(value, "a list", path, way_out, place)
    if len(value) < form.min_length:
        raise _error(value, f"a list of at least {form.min_length}", path, way_out, place)
    if form.max_length is not None and len(value) > form.max_length:
        raise _error(value, f"a list of at most {form.max_length}", path, way_out, place)
    for index, item in enumerate(value):
        check(item, form.items, path, way_out, f"{place}[{index}]")


def _check_object(value: object, form: Object, path: Path, way_out: str, place: str) -> None:
    if not isinstance(value, dict):
        raise _error(value, "an object", path, way_out, place)
    forms = {**form.fields, **form.optional}
    for name in form.fields:
        if name not in value:
            raise damaged(path, f"{place or 'it'} has no {name!r}", way_out)
    for name, item in value.items():
        inner = f"{place}.{name}" if place else name
        if name in forms:
            check(item, forms[name], path, way_out, inner)
        elif form.is_closed:
            raise damaged(path, f"{inner} is unknown", way_out)


def _error(value: object, words: str, path: Path, way_out: str, place: str) -> ValueError:
    shown = json.dumps(value)
    if len(shown) > NUM_SHOWN:
        shown = f"{shown[:NUM_SHOWN]}..."
    return damaged(path, f"{place or 'it'} is {shown}, not {words}", way_out)


# Values


def _is_within(low: float, high: float) -> Callable[[object], bool]:
    def is_within(value: object) -> bool:
        return is_number(value) and low <= value <= high  # type: ignore[operator]

    return is_within


def _is_whole(low: int, high: int) -> Callable[[object], bool]:
    def is_whole(value: object) -> bool:
        if not isinstance(value, int) or isinstance(value, bool):
            return False
        return low <= value <= high

    return is_whole


def _is_one_of(*words: str) -> Value:
    return Value(words=f"one of {', '.join(words)}", holds=lambda value: isinstance(value, str) and value in words)


def _is_positive(value: object) -> bool:
    return is_number(value) and 0 < value <= LARGEST  # type: ignore[operator]


LOWEST_LOSS, HIGHEST_LOSS = 1e-6, 1e6
"""Nats per token beyond which a loss can only be damage: a uniform guess among 1e9 tokens has 21."""


def _is_loss(value: object) -> bool:
    """Return whether this can be a loss. That of a run that diverged is not a number, or infinite."""
    has_diverged = isinstance(value, float) and (math.isnan(value) or value == math.inf)
    return has_diverged or (_is_positive(value) and LOWEST_LOSS <= value <= HIGHEST_LOSS)  # type: ignore[operator]


def _is_cell_name(value: object) -> bool:
    if not isinstance(value, str) or not value.isprintable() or "\\" in value:
        return False
    return all(part not in ("", ".", "..") for part in value.split("/"))


def _is_variant(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(parse_variant(value))
    except (TypeError, ValueError):
        return False


TEXT = Value(words="a text", holds=lambda value: isinstance(value, str))
TRUTH = Value(words="true or false", holds=lambda value: isinstance(value, bool))
NUMBER = Value(words="a number from -1e30 to 1e30", holds=_is_within(-LARGEST, LARGEST))
POSITIVE = Value(words="a positive number up to 1e30", holds=_is_positive)
NOT_NEGATIVE = Value(words="a number from 0 to 1e30", holds=_is_within(0, LARGEST))
SHARE = Value(words="a number from 0 to 1", holds=_is_within(0, 1))
EFFECT = Value(words="a number from -700 to 700", holds=_is_within(-LARGEST_EFFECT, LARGEST_EFFECT))
COUNT = Value(words="a whole number from 1 to 10**18", holds=_is_whole(1, LARGEST_COUNT))
COUNT_OR_ZERO = Value(words="a whole number from 0 to 10**18", holds=_is_whole(0, LARGEST_COUNT))
FLOPS = Value(words="a whole number from 1 to 1e30", holds=_is_whole(1, int(LARGEST)))
LOSS = Value(words=f"a number from {LOWEST_LOSS:g} to {HIGHEST_LOSS:g}", holds=_is_loss)
CELL_NAME = Value(words="a path within the study", holds=_is_cell_name)
VARIANT = Value(words="the name of a variant", holds=_is_variant)
KIND = _is_one_of("less", "differs", "larger", "crosses", "equivalent")
FAMILY = _is_one_of("primary", "exploratory")
CAPACITIES = ListOf(items=SHARE)
INTERVAL = OrNull(form=ListOf(items=NUMBER, min_length=2, max_length=2))
INTERVAL_OF_EFFECT = OrNull(form=ListOf(items=EFFECT, min_length=2, max_length=2))

# study.json

SETTINGS = Object(
    fields={
        "layers": COUNT,
        "width": COUNT,
        "context": COUNT,
        "learning_rate": POSITIVE,
        "eval_windows": OrNull(form=COUNT),
        "depth": OrNull(form=Object(fields={})),
    },
    optional={"corpus": TEXT, "tokenizer": TEXT, "report_to": ListOf(items=TEXT)},
)
"""The settings that every cell has. An older version may not have had the others."""
CELL = Object(
    fields={
        "name": CELL_NAME,
        "budget": POSITIVE,
        "variant": VARIANT,
        "seed": COUNT_OR_ZERO,
        "rung": POSITIVE,
        "settings": SETTINGS,
        "parameters": COUNT,
        "flops_per_token": POSITIVE,
        "steps": COUNT,
        "flops": FLOPS,
        "epochs": NOT_NEGATIVE,
        "seconds": NOT_NEGATIVE,
    },
    is_closed=True,
)
HYPOTHESIS = Object(
    fields={
        "name": TEXT,
        "claim": TEXT,
        "kind": KIND,
        "budget": POSITIVE,
        "variant": TEXT,
        "against": TEXT,
        "margin": SHARE,
        "family": FAMILY,
        "finished_before": COUNT_OR_ZERO,
        "seeds": ListOf(items=COUNT_OR_ZERO),
    },
    is_closed=True,
)
STUDY = Object(
    fields={
        "corpus_digest": TEXT,
        "plans": ListOf(items=Object(fields={})),
        "cells": ListOf(items=CELL),
        "hypotheses": ListOf(items=HYPOTHESIS),
    }
)

# The files of a cell

RESULT = Object(
    fields={"validation_loss": LOSS},
    optional={"validation_lookahead_loss": LOSS, "validation_capacities": CAPACITIES},
)
"""result.json. A dense model has no loss with look-ahead, and an older version wrote no capacities."""
SEALED = Object(fields={"loss": POSITIVE, "lookahead_loss": POSITIVE}, optional={"capacities": CAPACITIES})
"""test.json."""
FAILURE = Object(fields={"kind": _is_one_of("diverged", "error"), "message": TEXT})
"""failed.json."""
OLD_FAILURE = Object(fields={"reason": TEXT})
"""failed.json of version 0.1."""
ABOUT = Object(fields={"settings": Object(fields={}), "corpus_digest": TEXT})
"""The part of run.json that a study reads."""

# fit.json and fit-test.json

SEEDS = ListOf(items=COUNT_OR_ZERO)
NUMBER_OR_NULL = OrNull(form=NUMBER)
POINT = Object(
    fields={
        "shape": TEXT,
        "parameters": POSITIVE,
        "flops_per_token": POSITIVE,
        "losses": BySeed(values=POSITIVE),
        "lookahead_losses": BySeed(values=POSITIVE),
        "capacities": BySeed(values=OrNull(form=CAPACITIES)),
        "loss": POSITIVE,
    },
    is_closed=True,
)
BEST = Object(
    fields={
        "shape": TEXT,
        "parameters": POSITIVE,
        "flops_per_token": POSITIVE,
        "loss": POSITIVE,
        "std": OrNull(form=NOT_NEGATIVE),
        "lookahead_loss": POSITIVE,
        "capacities": CAPACITIES,
    },
    is_closed=True,
)
OPTIMUM = Object(
    fields={
        "parameters": POSITIVE,
        "loss": NUMBER,
        "is_bracketed": TRUTH,
        "parameters_interval": INTERVAL,
        "loss_interval": INTERVAL,
        "parameters_bootstrap": INTERVAL,
        "loss_bootstrap": INTERVAL,
    },
    is_closed=True,
)
CURVE = Object(
    fields={
        "budget": POSITIVE,
        "variant": VARIANT,
        "seeds": SEEDS,
        "points": ListOf(items=POINT, min_length=1),
        "best": BEST,
        "optimum": OPTIMUM,
        "parabola": OrNull(form=ListOf(items=NUMBER, min_length=3, max_length=3)),
    },
    is_closed=True,
)
CURVES = Object(fields={"curves": ListOf(items=CURVE, min_length=1)})
"""The part of either file that a picture shows."""
COMPARISON = Object(
    fields={
        "budget": POSITIVE,
        "variant": TEXT,
        "against": TEXT,
        "seeds": SEEDS,
        "loss": NUMBER_OR_NULL,
        "t_interval": INTERVAL,
        "bootstrap_interval": INTERVAL,
        "pooled_interval": INTERVAL,
        "noise": OrNull(form=NOT_NEGATIVE),
        "p_of_seeds": OrNull(form=SHARE),
        "best_sizes": NUMBER_OR_NULL,
        "is_bracketed": TRUTH,
        "optimum_ratio": OrNull(form=POSITIVE),
        "optimum_ratio_interval": INTERVAL,
        "crossings": ListOf(items=POSITIVE),
        "crossing_ratio": OrNull(form=POSITIVE),
        "crossing_ratio_interval": INTERVAL,
        "is_lower_above": OrNull(form=TRUTH),
    },
    is_closed=True,
)
CLAIM = Object(
    fields={
        **HYPOTHESIS.fields,
        "by_seed": BySeed(values=EFFECT),
        "estimate": OrNull(form=EFFECT),
        "interval": INTERVAL_OF_EFFECT,
        "p": OrNull(form=SHARE),
        "p_corrected": OrNull(form=SHARE),
        "notes": ListOf(items=TEXT),
        "obstacle": OrNull(form=TEXT),
        "verdict": TEXT,
    },
    is_closed=True,
)
LEFT_OUT = Object(fields={"cell": TEXT, "reason": TEXT}, is_closed=True)
FIT = Object(
    fields={
        "split": TEXT,
        "finished": COUNT_OR_ZERO,
        "planned": COUNT_OR_ZERO,
        "curves": ListOf(items=CURVE),
        "comparisons": ListOf(items=COMPARISON),
        "tests": ListOf(items=CLAIM),
        "left_out": ListOf(items=LEFT_OUT),
    }
)
"""The whole of either file."""
