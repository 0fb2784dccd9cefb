"""What a study can show, written down before it is run."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import NamedTuple

from mixdepth.config import LOOKS_AHEAD, DepthConfig
from mixdepth.isoflop.curves import MIN_SIZES
from mixdepth.isoflop.study import OF_CURVES, Cell, Hypothesis, Study
from mixdepth.isoflop.variants import Variant, parse_variant
from mixdepth.text import short

FEWEST_SEEDS = 2
"""That tell how far a seed is off; a claim of fewer could never be tested."""
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


def hypotheses(study: Study, asked: Sequence[str], goal: float) -> list[Hypothesis]:
    """Those that are written down, and what further the study's cells can test, now that the variants `asked` for were
    planned. `goal` is the gain over the dense model that is aimed at.

    A claim is tested on seeds of which nothing is known yet, neither of its variant nor of the other. Where there are
    no two of these it is an afterthought, and exploratory; where there are no two at all it waits for a later plan.
    """
    found = {hypothesis.name: hypothesis for hypothesis in study.hypotheses}
    for budget in dict.fromkeys(cell.budget for cell in study.cells):
        cells: dict[str, list[Cell]] = {}
        for cell in study.cells:
            if cell.budget == budget:
                cells.setdefault(cell.variant, []).append(cell)
        for kind, variant, against, margin, is_primary, words in _claims(list(cells), asked, goal):
            both = (cells[variant], cells[against])
            if kind in OF_CURVES and min(len({cell.shape for cell in some}) for some in both) < MIN_SIZES:
                continue  # no curve, and no optimum
            seeds = set.intersection(*({cell.seed for cell in some} for some in both))
            if len(seeds) < FEWEST_SEEDS:
                continue
            known = {cell.name: cell.seed for some in both for cell in some if study.is_finished(cell)}
            fresh = seeds - set(known.values())
            fresh = fresh if len(fresh) >= FEWEST_SEEDS else set()
            before = 0 if fresh else sum(seed in seeds for seed in known.values())
            family = "primary" if is_primary and fresh else "exploratory"
            name = f"{short(budget)}: {variant} {kind} {against}"
            about = (name, words, kind, budget, variant, against, margin, family)
            found.setdefault(name, Hypothesis(*about, before, sorted(fresh or seeds)))
    return list(found.values())


def _claims(names: Sequence[str], asked: Sequence[str], goal: float) -> Iterator[Claim]:
    """Primary are those about the first learned variant that was asked for against the first dense one, learned against
    random routing, and fewer routed layers against more."""
    dense = [variant.name for variant in map(parse_variant, names) if variant.depth is None][:1]
    routed = [variant for variant in map(parse_variant, names) if variant.depth is not None]
    learned = [variant for variant in routed if variant.depth is not None and variant.depth.scheme != "random"]
    first = next((variant.name for variant in learned if variant.name in asked), None)
    for variant in learned:
        mine, is_first = variant.name, variant.name == first
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
