"""What became of the claims that were written down: each is tested on the seeds that were planned with it."""

import math
from typing import Any

from mixdepth.isoflop.curves import Curve, Pair
from mixdepth.isoflop.estimates import LEVEL, Statistic, estimate, p_value
from mixdepth.isoflop.study import Hypothesis
from mixdepth.text import short


def tested(claims: list[Hypothesis], curves: dict[tuple[float, str], Curve]) -> list[dict[str, Any]]:
    """Each claim with its estimate, interval, p and verdict; the primary ones of a budget corrected by Holm."""
    tests = [_test(claim, curves) for claim in claims]
    for budget in {claim.budget for claim in claims}:
        _correct([test for test in tests if test["budget"] == budget and test["family"] == "primary"])
    return [{**test, "verdict": _verdict(test)} for test in tests]


def _test(claim: Hypothesis, curves: dict[tuple[float, str], Curve]) -> dict[str, Any]:
    """`obstacle` says why there is no p, `notes` what it must be read with."""
    about: dict[str, Any] = {**claim._asdict(), "claim": f"{short(claim.budget)}: {claim.claim}"}
    about |= {"by_seed": {}, "estimate": None, "interval": None, "p": None, "p_corrected": None, "notes": []}
    one, other = (curves.get((claim.budget, name)) for name in (claim.variant, claim.against))
    if one is None or other is None:
        return {**about, "obstacle": "not run"}
    pair = Pair.of(one, other, claim.seeds)
    obstacle = pair.obstacle if claim.kind != "equivalent" else None  # that goes by all sizes, and takes no curve
    if len(pair.seeds) < 2:
        obstacle = obstacle or "too few seeds"
    if obstacle is not None:
        return {**about, "obstacle": obstacle}
    statistic, parts = _statistics(claim, pair)
    found = estimate(statistic, pair.seeds)
    p = max(p_value(part, pair.seeds, edge, side) for part, edge, side in parts)  # all of them must hold
    notes = []
    if claim.kind in ("differs", "less") and not pair.has_ladders:
        notes.append("at equal FLOPs")
    for curve in (one,) if one is other else (one, other):
        if len(curve.points) < curve.num_planned:
            notes.append(f"interim, {len(curve.points)} of {curve.num_planned} sizes of {curve.variant}")
    if len(pair.seeds) < len(claim.seeds):
        notes.append(f"interim, {len(pair.seeds)} of {len(claim.seeds)} seeds")
    return {
        **about,
        **{"by_seed": found.by_seed, "interval": found.t_interval, "notes": notes},
        "estimate": found.value if math.isfinite(found.value) else None,
        "p": p if math.isfinite(p) else None,
        "obstacle": None if math.isfinite(p) else "the seeds do not differ",
    }


def _statistics(claim: Hypothesis, pair: Pair) -> tuple[Statistic, list[tuple[Statistic, float, str]]]:
    """What is told of a claim; and what must all hold for it: a statistic, and on which side of what it lies."""
    match claim.kind:
        case "less":
            return pair.relative_loss, [(pair.relative_loss, 0, "less")]
        case "larger":
            return pair.relative_size, [(pair.relative_size, 0, "greater")]
        case "equivalent":
            gap = pair.one.gap
            return gap, [(gap, -claim.margin, "greater"), (gap, claim.margin, "less")]
        case "crosses":
            return pair.relative_crossing, [(pair.loss_at_smallest, 0, "greater"), (pair.loss_at_largest, 0, "less")]
    return pair.relative_loss, [(pair.relative_loss, 0, "two-sided")]


def _correct(tests: list[dict[str, Any]]) -> None:
    """Holm's correction, for all that were planned."""
    highest = 0.0
    with_p = sorted((test for test in tests if test["p"] is not None), key=lambda test: float(test["p"]))
    for rank, test in enumerate(with_p):
        highest = max(highest, min(1.0, (len(tests) - rank) * test["p"]))
        test["p_corrected"] = highest


def _verdict(test: dict[str, Any]) -> str:
    if test["obstacle"] is not None:
        return str(test["obstacle"])
    is_primary = test["family"] == "primary"
    is_shown = (test["p_corrected"] if is_primary else test["p"]) < LEVEL
    words = ("holds" if is_primary else f"p < {LEVEL}") if is_shown else "not shown"
    if is_shown and test["kind"] == "differs":
        words += ": lower" if test["estimate"] < 0 else ": higher"
        if test["margin"] and test["estimate"] <= -test["margin"]:
            words += f", and by its estimate reaches the goal of {test['margin']:.1%}"
    if not is_primary:
        after = f", thought of after {test['finished_before']} runs" if test["finished_before"] else ""
        words += f" (exploratory{after})"
    return "; ".join([words, *test["notes"]])
