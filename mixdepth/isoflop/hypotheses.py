"""What a study can show, written down before it is run."""

import itertools
from collections.abc import Iterator
from dataclasses import fields
from typing import NamedTuple

from mixdepth.config import LOOKS_AHEAD, DepthConfig
from mixdepth.isoflop.curves import MIN_SIZES
from mixdepth.isoflop.study import OF_CURVES, Hypothesis, Study
from mixdepth.isoflop.variants import Variant, parse_variant
from mixdepth.table import short

EQUAL = 0.003
"""What we call equal, as a share of the loss."""


class Claim(NamedTuple):
    """A hypothesis that can be made at any budget."""

    kind: str
    variant: str
    against: str
    margin: float
    is_primary: bool
    words: str


def hypotheses(study: Study, goal: float) -> list[Hypothesis]:
    """Those that are written down, and what further the study's cells can test. What is thought of when cells of the
    budget are finished is exploratory. `goal` is the gain over the dense model that is aimed at."""
    found = {hypothesis.name: hypothesis for hypothesis in study.hypotheses}
    for budget in dict.fromkeys(cell.budget for cell in study.cells):
        cells = [cell for cell in study.cells if cell.budget == budget]
        finished, seeds = sum(study.is_finished(cell) for cell in cells), sorted({cell.seed for cell in cells})
        variants = list(dict.fromkeys(cell.variant for cell in cells))
        shapes = {variant: {cell.shape for cell in cells if cell.variant == variant} for variant in variants}
        for kind, variant, against, margin, is_primary, words in _claims(variants, goal):
            if kind in OF_CURVES and min(len(shapes[variant]), len(shapes[against])) < MIN_SIZES:
                continue  # no curve, and no optimum
            name = f"{short(budget)}: {variant} {kind} {against}"
            family = "primary" if is_primary and not finished else "exploratory"
            claim = Hypothesis(name, words, kind, budget, variant, against, margin, family, finished, seeds)
            found.setdefault(name, claim)
    return list(found.values())


def _claims(names: list[str], goal: float) -> Iterator[Claim]:
    """Primary are those about the first learned variant against the first dense one, learned against random routing,
    and fewer routed layers against more."""
    dense = [variant.name for variant in map(parse_variant, names) if variant.depth is None][:1]
    routed = [variant for variant in map(parse_variant, names) if variant.depth is not None]
    learned = [variant for variant in routed if variant.depth is not None and variant.depth.scheme != "random"]
    for variant in learned:
        mine, is_first = variant.name, variant is learned[0]
        for baseline in dense:
            words = f"the best {mine} has another loss than the best {baseline} model; goal: {goal:.1%} below"
            yield Claim("differs", mine, baseline, goal, is_first, words)
            words = f"the best {mine} has more parameters than the best {baseline} model"
            yield Claim("larger", mine, baseline, 0.0, is_first, words)
            words = f"the curves of {mine} and {baseline} cross: at equal size it is worse if small, better if large"
            yield Claim("crosses", mine, baseline, 0.0, is_first, words)
        if variant.depth is not None and variant.depth.scheme in LOOKS_AHEAD:
            words = f"causal routing costs {mine} less than {EQUAL:.1%} of its loss, or gains less"
            yield Claim("equivalent", mine, mine, EQUAL, is_first, words)
    for one, other in itertools.permutations(routed, 2):
        setting = _differing(one, other)
        if setting == "scheme" and other.depth is not None and other.depth.scheme == "random":
            words = f"learned routing ({one.name}) has a lower loss than random routing ({other.name})"
            yield Claim("less", one.name, other.name, 0.0, True, words)
        elif setting == "every" and one.every > other.every:
            words = f"routing every {one.every} layers ({one.name}) has a lower loss than every {other.every}"
            yield Claim("less", one.name, other.name, 0.0, True, words)
        elif setting not in (None, "scheme", "every") and routed.index(one) > routed.index(other):
            yield Claim("differs", one.name, other.name, 0.0, False, f"{one.name} has another loss than {other.name}")


def _differing(one: Variant, other: Variant) -> str | None:
    """The one setting of the routing in which two variants differ; None if there is not exactly one."""
    if one.depth is None or other.depth is None or (one.training, one.aspect) != (other.training, other.aspect):
        return None
    names = [f.name for f in fields(DepthConfig) if getattr(one.depth, f.name) != getattr(other.depth, f.name)]
    if set(names) == {"scheme", "causal"}:  # random routing needs no causal rule
        return "scheme"
    return names[0] if len(names) == 1 else None
