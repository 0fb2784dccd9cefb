"""The claims that a study can test, written down before it is run."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mixdepth import schemes
from mixdepth.isoflop.curves import MIN_SIZES
from mixdepth.isoflop.study import KINDS_OF_CURVES, Cell, Hypothesis, Study
from mixdepth.isoflop.variants import Variant, parse_variant
from mixdepth.text import short

MIN_SEEDS = 2
"""The number of seeds that a claim needs. With fewer there is no estimate of the error, and no test."""
EQUAL = 0.003
"""The difference that counts as equal, as a share of the loss."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A hypothesis that can be made at any budget."""

    kind: str
    variant: str
    against: str
    margin: float = 0.0
    is_primary: bool
    words: str


def hypotheses(study: Study, asked: Sequence[str], goal: float) -> list[Hypothesis]:
    """List the hypotheses of a study: those that are written down, and those that its new cells make possible.

    `asked` are the variants that were planned just now. `goal` is the intended gain over the dense model, as a share
    of the loss. A claim is tested on seeds of which nothing is known yet for either of its variants. If there are fewer
    than two of these, the claim is exploratory. If the variants share fewer than two seeds, it waits for a later plan.
    """
    by_name = {hypothesis.name: hypothesis for hypothesis in study.hypotheses}
    by_budget: dict[float, dict[str, list[Cell]]] = {}
    for cell in study.cells:
        by_variant = by_budget.setdefault(cell.budget, {})
        by_variant.setdefault(cell.variant, []).append(cell)
    for budget, cells in by_budget.items():
        for claim in _claims(list(cells), asked, goal):
            hypothesis = _hypothesis(study, claim, budget, cells[claim.variant], cells[claim.against])
            if hypothesis is not None:
                by_name.setdefault(hypothesis.name, hypothesis)
    return list(by_name.values())


def _hypothesis(
    study: Study, claim: Claim, budget: float, cells: list[Cell], cells_against: list[Cell]
) -> Hypothesis | None:
    """Make a claim at a budget; None if the cells of its two variants cannot test it."""
    # 1. Claims about optima need a curve on both sides, and every claim needs two seeds.
    num_sizes = min(len({cell.shape for cell in cells}), len({cell.shape for cell in cells_against}))
    if claim.kind in KINDS_OF_CURVES and num_sizes < MIN_SIZES:
        return None
    seeds = {cell.seed for cell in cells} & {cell.seed for cell in cells_against}
    if len(seeds) < MIN_SEEDS:
        return None

    # 2. A seed is fresh if no cell of either variant has finished with it.
    finished = {cell.name: cell.seed for cell in [*cells, *cells_against] if study.is_finished(cell)}
    fresh = seeds - set(finished.values())
    is_prediction = len(fresh) >= MIN_SEEDS

    # 3. A claim that has no fresh seeds is an afterthought, and says after how many runs it was made.
    num_finished = sum(seed in seeds for seed in finished.values())
    return Hypothesis(
        name=f"{short(budget)}: {claim.variant} {claim.kind} {claim.against}",
        claim=claim.words,
        kind=claim.kind,
        budget=budget,
        variant=claim.variant,
        against=claim.against,
        margin=claim.margin,
        family="primary" if claim.is_primary and is_prediction else "exploratory",
        finished_before=0 if is_prediction else num_finished,
        seeds=sorted(fresh if is_prediction else seeds),
    )


def _claims(names: Sequence[str], asked: Sequence[str], goal: float) -> Iterator[Claim]:
    """List the claims about these variants.

    Primary are those about the first learned variant that was asked for against the first dense one, those about
    learned against random routing, and those about fewer routed layers against more.
    """
    dense: list[Variant] = []
    routed: list[Variant] = []
    for variant in map(parse_variant, names):
        if variant.depth is None:
            dense.append(variant)
        else:
            routed.append(variant)
    learned = [variant for variant in routed if not _is_random(variant)]
    learned_and_asked = [variant.name for variant in learned if variant.name in asked]
    for variant in learned:
        is_first = variant.name in learned_and_asked[:1]
        if dense:
            yield from _claims_against_dense(variant.name, dense[0].name, goal, is_first)
        if variant.depth is not None and schemes.looks_ahead(variant.depth.scheme):
            yield Claim(
                kind="equivalent",
                variant=variant.name,
                against=variant.name,
                margin=EQUAL,
                is_primary=is_first,
                words=f"causal routing costs {variant.name} less than {EQUAL:.1%} of its loss, or gains less",
            )
    # Claims have a direction, so both orders of a pair are looked at.
    for one, other in itertools.permutations(routed, 2):
        is_later = routed.index(one) > routed.index(other)
        yield from _claims_among_routed(one, other, is_later)


def _claims_against_dense(name: str, dense: str, goal: float, is_primary: bool) -> Iterator[Claim]:
    yield Claim(
        kind="differs",
        variant=name,
        against=dense,
        margin=goal,
        is_primary=is_primary,
        words=f"the best {name} has another loss than the best {dense} model; goal: {goal:.1%} below",
    )
    yield Claim(
        kind="larger",
        variant=name,
        against=dense,
        is_primary=is_primary,
        words=f"the best {name} has more parameters than the best {dense} model",
    )
    yield Claim(
        kind="crosses",
        variant=name,
        against=dense,
        is_primary=is_primary,
        words=f"the curves of {name} and {dense} cross: at equal size it is worse if small, better if large",
    )


def _claims_among_routed(one: Variant, other: Variant, is_later: bool) -> Iterator[Claim]:
    """List the claims about two routed variants that differ in one setting. Only the later of two differs from it."""
    setting = _differing_setting(one, other)
    if setting is None:
        return
    if setting == "scheme":
        if _is_random(other):
            words = f"learned routing ({one.name}) has a lower loss than random routing ({other.name})"
            yield Claim(kind="less", variant=one.name, against=other.name, is_primary=True, words=words)
    elif setting == "every":
        if one.every > other.every:
            words = f"routing every {one.every} layers ({one.name}) has a lower loss than every {other.every}"
            yield Claim(kind="less", variant=one.name, against=other.name, is_primary=True, words=words)
    elif is_later:
        words = f"{one.name} has another loss than {other.name}"
        yield Claim(kind="differs", variant=one.name, against=other.name, is_primary=False, words=words)


def _is_random(variant: Variant) -> bool:
    return variant.depth is not None and not schemes.is_learned(variant.depth.scheme)


def _differing_setting(one: Variant, other: Variant) -> str | None:
    """Name the one routing setting in which two variants differ; None if there is not exactly one."""
    if one.depth is None or other.depth is None:
        return None
    if (one.training, one.aspect) != (other.training, other.aspect):
        return None
    differing = []
    others = other.depth.to_flat()
    for name, value in one.depth.to_flat().items():
        if value != others[name]:
            differing.append(name)
    if set(differing) == {"scheme", "causal"}:  # random routing needs no causal rule
        return "scheme"
    if len(differing) != 1:
        return None
    return differing[0]
