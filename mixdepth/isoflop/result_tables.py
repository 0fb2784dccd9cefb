"""The results of a study as text: a table of curves, one of pairs, and one of claims."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mixdepth.isoflop.study import KINDS_OF_CURVES
from mixdepth.text import columns, short

if TYPE_CHECKING:
    from mixdepth.isoflop.results import ClaimResult, CurveResult, Fit, PairResult

CURVE_HEADER = [
    "budget",
    "variant",
    "sizes x seeds",
    "best",
    "loss",
    "look-ahead",
    "realised capacity",
    "optimum (parameters)",
    "loss there",
]
PAIR_HEADER = [
    "budget",
    "variant",
    "against",
    "loss",
    "interval",
    "bootstrap",
    "by runs",
    "best sizes",
    "optimum",
    "curves cross at",
]
CLAIM_HEADER = ["claim", "found", "interval", "p", "corrected", ""]


def as_tables(fit: "Fit") -> str:
    """Write the results as tables, with a line above them and the cells that were left out below."""
    num_used = sum(len(curve.points) * len(curve.seeds) for curve in fit.curves)
    first_line = (
        f"{fit.finished} of {fit.planned} runs, {num_used} used; losses on the {fit.split} text with causal routing; "
        "± is the spread of seeds, [] 95 % by t and the jackknife over seeds"
    )
    tables = [_curve_table(fit.curves), _pair_table(fit.comparisons), _claim_table(fit.tests)]
    tables_with_rows = [table for table in tables if table]
    left_out = [f"left out: {entry.cell}, {entry.reason}" for entry in fit.left_out]
    return "\n".join([first_line, "\n\n".join(tables_with_rows), *left_out])


def _curve_table(curves: "Sequence[CurveResult]") -> str:
    rows = [CURVE_HEADER]
    for curve in curves:
        rows.append(_curve_row(curve))
    return columns(rows, left=(1,))


def _curve_row(curve: "CurveResult") -> list[str]:
    best, optimum = curve.best, curve.optimum
    loss = f"{best.loss:.4f}"
    if best.std is not None:
        loss += f" ± {best.std:.4f}"
    size_at_optimum, loss_at_optimum = "not bracketed", ""
    if optimum.is_bracketed:
        size_at_optimum = f"{optimum.parameters:,.0f} {_interval(optimum.parameters_interval, ',.0f')}"
        loss_at_optimum = f"{optimum.loss:.4f} {_interval(optimum.loss_interval, '.4f')}"
    return [
        short(curve.budget),
        curve.variant,
        f"{len(curve.points)} x {len(curve.seeds)}",
        best.shape,
        loss,
        f"{best.lookahead_loss:.4f}",
        " ".join(f"{capacity:.1%}" for capacity in best.capacities),
        size_at_optimum,
        loss_at_optimum,
    ]


def _pair_table(pairs: "Sequence[PairResult]") -> str:
    if not pairs:
        return ""
    rows = [PAIR_HEADER]
    for pair in pairs:
        rows.append(_pair_row(pair))
    return columns(rows, left=(1, 2, 9))


def _pair_row(pair: "PairResult") -> list[str]:
    by_runs = _interval(pair.pooled_interval, "+.2%")
    if pair.p_of_seeds is not None:
        by_runs += f" (p of seeds {pair.p_of_seeds:.2g})"
    return [
        short(pair.budget),
        pair.variant,
        pair.against,
        _number(pair.loss, "+.2%"),
        _interval(pair.t_interval, "+.2%"),
        _interval(pair.bootstrap_interval, "+.2%"),
        by_runs,
        _number(pair.best_sizes, "+.2%"),
        _ratio_of_optima(pair),
        _crossings(pair),
    ]


def _ratio_of_optima(pair: "PairResult") -> str:
    if pair.best_sizes is not None and not pair.is_bracketed:
        return "not bracketed"
    ratio = ""
    if pair.optimum_ratio is not None:
        ratio = f"x {pair.optimum_ratio:.2f}"
    return f"{ratio} {_interval(pair.optimum_ratio_interval, '.2f')}"


def _crossings(pair: "PairResult") -> str:
    sizes = ", ".join(f"{size:,.0f}" for size in pair.crossings)
    if pair.crossing_ratio is None:
        return sizes
    ratio = f"x {pair.crossing_ratio:.2f} {_interval(pair.crossing_ratio_interval, '.2f')}".rstrip()
    lower = pair.variant if pair.is_lower_above else pair.against
    return f"{sizes}, {ratio}; {lower} is lower above"


def _claim_table(claims: "Sequence[ClaimResult]") -> str:
    if not claims:
        return ""
    rows = [CLAIM_HEADER]
    for claim in claims:
        rows.append(_claim_row(claim))
    return columns(rows, left=(0, 5))


def _claim_row(claim: "ClaimResult") -> list[str]:
    style, estimate, interval = "+.2%", claim.estimate, claim.interval
    if claim.kind in KINDS_OF_CURVES:  # the estimate is the logarithm of a ratio
        style = ".2f"
        if estimate is not None:
            estimate = math.exp(estimate)
        if interval is not None:
            interval = [math.exp(bound) for bound in interval]
    return [
        claim.claim,
        _number(estimate, style),
        _interval(interval, style),
        _number(claim.p, ".2g"),
        _number(claim.p_corrected, ".2g"),
        claim.verdict,
    ]


def _number(value: float | None, style: str) -> str:
    """Write a number, or nothing where there is none."""
    if value is None:
        return ""
    return f"{value:{style}}"


def _interval(interval: Sequence[float] | None, style: str) -> str:
    if interval is None:
        return ""
    low, high = interval
    return f"[{low:{style}}, {high:{style}}]"
