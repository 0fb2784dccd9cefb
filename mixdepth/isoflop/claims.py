"""Tests of the claims that were written down: each on the seeds that were planned with it, with a verdict in words."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from mixdepth.isoflop.curves import Curve, Pair
from mixdepth.isoflop.estimates import LEVEL, Statistic, estimate, p_value
from mixdepth.isoflop.results import ClaimResult
from mixdepth.isoflop.study import Hypothesis
from mixdepth.text import short

Curves = Mapping[tuple[float, str], Curve]
"""The curves of a study, by budget and variant."""


class Condition(NamedTuple):
    """A statement about a statistic. A claim holds if all its conditions do."""

    statistic: Statistic
    bound: float
    alternative: str
    """The side of the bound on which the statistic lies: `less`, `greater` or `two-sided`."""


@dataclass(frozen=True, kw_only=True)
class _Test:
    """The test of a claim, before its p value is corrected."""

    by_seed: dict[int, float]
    estimate: float | None
    interval: list[float] | None
    p: float | None
    notes: list[str]
    obstacle: str | None


def tested(claims: list[Hypothesis], curves: Curves) -> list[ClaimResult]:
    """Test each claim. The p values of the primary ones of a budget are corrected by Holm's method."""
    results = [_result(claim, _test(claim, curves)) for claim in claims]
    corrected = _corrected(results)
    return [replace(result, verdict=_verdict(result)) for result in corrected]


def _result(claim: Hypothesis, test: _Test) -> ClaimResult:
    values = asdict(claim) | asdict(test) | {"claim": f"{short(claim.budget)}: {claim.claim}"}
    return ClaimResult(**values, p_corrected=None, verdict="")


def _test(claim: Hypothesis, curves: Curves) -> _Test:
    # 1. Find the two curves, and the seeds that were planned with the claim.
    one = curves.get((claim.budget, claim.variant))
    other = curves.get((claim.budget, claim.against))
    if one is None or other is None:
        return _without_p("not run")
    pair = Pair.of(one, other, claim.seeds)
    obstacle = _obstacle(claim, pair)
    if obstacle is not None:
        return _without_p(obstacle)

    # 2. Estimate the statistic, and test the conditions: all of them must hold, so the largest p counts.
    statistic, conditions = _statistics(claim, pair)
    estimated = estimate(statistic, pair.seeds)
    p_values = []
    for condition in conditions:
        p_values.append(p_value(condition.statistic, pair.seeds, condition.bound, condition.alternative))
    p = max(p_values)

    # 3. A p value that is not a number says that the seeds do not differ.
    has_p = math.isfinite(p)
    return _Test(
        by_seed=estimated.by_seed,
        estimate=estimated.value if math.isfinite(estimated.value) else None,
        interval=estimated.t_interval,
        p=p if has_p else None,
        notes=_notes(claim, pair),
        obstacle=None if has_p else "the seeds do not differ",
    )


def _without_p(obstacle: str) -> _Test:
    return _Test(by_seed={}, estimate=None, interval=None, p=None, notes=[], obstacle=obstacle)


def _obstacle(claim: Hypothesis, pair: Pair) -> str | None:
    """Why a claim cannot be tested. `equivalent` averages over all sizes, and needs no curve."""
    if claim.kind != "equivalent" and pair.obstacle is not None:
        return pair.obstacle
    if len(pair.seeds) < 2:
        return "too few seeds"
    return None


def _notes(claim: Hypothesis, pair: Pair) -> list[str]:
    """List what limits the test."""
    notes = []
    if claim.kind in ("differs", "less") and not pair.has_ladders:
        notes.append("at equal FLOPs")
    curves = [pair.one]
    if pair.other is not pair.one:
        curves.append(pair.other)
    for curve in curves:
        if len(curve.points) < curve.num_planned:
            notes.append(f"interim, {len(curve.points)} of {curve.num_planned} sizes of {curve.variant}")
    if len(pair.seeds) < len(claim.seeds):
        notes.append(f"interim, {len(pair.seeds)} of {len(claim.seeds)} seeds")
    return notes


def _statistics(claim: Hypothesis, pair: Pair) -> tuple[Statistic, list[Condition]]:
    """Choose the statistic that is reported for a claim, and the conditions that must all hold for it."""
    match claim.kind:
        case "less":
            return pair.relative_loss, [Condition(pair.relative_loss, 0, "less")]
        case "larger":
            return pair.relative_size, [Condition(pair.relative_size, 0, "greater")]
        case "equivalent":  # two one-sided tests
            gap = pair.one.gap
            return gap, [Condition(gap, -claim.margin, "greater"), Condition(gap, claim.margin, "less")]
        case "crosses":  # worse at the smallest size, better at the largest
            at_smallest = Condition(pair.loss_at_smallest, 0, "greater")
            at_largest = Condition(pair.loss_at_largest, 0, "less")
            return pair.relative_crossing, [at_smallest, at_largest]
    return pair.relative_loss, [Condition(pair.relative_loss, 0, "two-sided")]


def _corrected(results: list[ClaimResult]) -> list[ClaimResult]:
    """Correct the p values of the primary claims of each budget by Holm's method, for all that were planned."""
    corrected = [*results]
    families: dict[float, list[int]] = {}  # the indices of the primary claims, by budget
    for index, result in enumerate(results):
        if result.family == "primary":
            families.setdefault(result.budget, []).append(index)
    for family in families.values():
        p_values: dict[int, float] = {}
        for index in family:
            p = results[index].p
            if p is not None:
                p_values[index] = p
        # The claim of rank r (from 0) among m planned ones has the corrected value max over s <= r of (m - s) p_s.
        highest = 0.0
        for rank, index in enumerate(sorted(p_values, key=p_values.__getitem__)):
            highest = max(highest, min(1.0, (len(family) - rank) * p_values[index]))
            corrected[index] = replace(results[index], p_corrected=highest)
    return corrected


def _verdict(result: ClaimResult) -> str:
    """Say in words what became of a claim."""
    if result.obstacle is not None:
        return result.obstacle
    is_primary = result.family == "primary"
    p = result.p_corrected if is_primary else result.p
    assert p is not None
    verdict = "not shown"
    if p < LEVEL:
        verdict = "holds" if is_primary else f"p < {LEVEL}"
        if result.kind == "differs":
            verdict += _side(result)
    if not is_primary:
        verdict += " (exploratory"
        if result.finished_before:
            verdict += f", thought of after {result.finished_before} runs"
        verdict += ")"
    return "; ".join([verdict, *result.notes])


def _side(result: ClaimResult) -> str:
    """Say on which side a loss differs, and whether the goal is reached."""
    assert result.estimate is not None
    if result.estimate >= 0:
        return ": higher"
    side = ": lower"
    if result.margin and result.estimate <= -result.margin:
        side += f", and by its estimate reaches the goal of {result.margin:.1%}"
    return side
