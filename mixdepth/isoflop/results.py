"""The results of a study, as `fit` returns them and as fit.json and fit-test.json hold them.

The order of the fields is the order in the files. Intervals are of 95 %.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mixdepth.files import read_json, write_json, writing
from mixdepth.isoflop import forms
from mixdepth.isoflop.result_tables import as_tables


@dataclass(frozen=True, kw_only=True)
class PointResult:
    """A variant at one size and budget."""

    shape: str
    parameters: int
    flops_per_token: float
    losses: dict[int, float]
    """The causal loss of each seed."""
    lookahead_losses: dict[int, float]
    capacities: dict[int, list[float] | None]
    """The realised capacity of each routed layer, by seed; None where an old version wrote none."""
    loss: float
    """The mean of the causal losses over the seeds of the curve."""


@dataclass(frozen=True, kw_only=True)
class BestResult:
    """The best size of a curve that was tried."""

    shape: str
    parameters: int
    flops_per_token: float
    loss: float
    std: float | None
    """The standard deviation of the loss over seeds; None for one seed."""
    lookahead_loss: float
    capacities: list[float]
    """The realised capacity of each routed layer, over the seeds that have one."""


@dataclass(frozen=True, kw_only=True)
class OptimumResult:
    """The lowest point of a curve."""

    parameters: float
    loss: float
    is_bracketed: bool
    """Whether the optimum lies within the sizes that were tried, with all seeds and without any one of them."""
    parameters_interval: list[float] | None
    loss_interval: list[float] | None
    parameters_bootstrap: list[float] | None
    loss_bootstrap: list[float] | None


@dataclass(frozen=True, kw_only=True)
class CurveResult:
    """A variant at one budget, over its sizes."""

    budget: float
    variant: str
    seeds: list[int]
    points: list[PointResult]
    best: BestResult
    optimum: OptimumResult
    parabola: list[float] | None
    """The coefficients of the loss in the logarithm of the parameters, the square first."""

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "CurveResult":
        parts = {
            "points": [_point(point) for point in content["points"]],
            "best": BestResult(**content["best"]),
            "optimum": OptimumResult(**content["optimum"]),
        }
        values = content | parts
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class PairResult:
    """A routed curve compared with the dense one of its budget. A value is None where it could not be estimated."""

    budget: float
    variant: str
    against: str
    seeds: list[int]
    loss: float | None = None
    """The loss at the optimum relative to that of `against`, minus 1."""
    t_interval: list[float] | None = None
    bootstrap_interval: list[float] | None = None
    pooled_interval: list[float] | None = None
    """The interval by the scatter of runs, see `mixdepth.isoflop.pooled`."""
    noise: float | None = None
    p_of_seeds: float | None = None
    best_sizes: float | None = None
    """The same difference between the best sizes that were tried."""
    is_bracketed: bool
    optimum_ratio: float | None = None
    """The parameters at the optimum relative to those of `against`."""
    optimum_ratio_interval: list[float] | None = None
    crossings: list[float] = field(default_factory=list)
    """The parameters at which the two curves meet."""
    crossing_ratio: float | None = None
    """The parameters where the curves meet, relative to the optimum of `against`; None unless they meet once."""
    crossing_ratio_interval: list[float] | None = None
    is_lower_above: bool | None = None
    """Whether `variant` has the lower loss at the largest size that both have."""


@dataclass(frozen=True, kw_only=True)
class ClaimResult:
    """A hypothesis of the plan, its test and the verdict."""

    name: str
    claim: str
    kind: str
    budget: float
    variant: str
    against: str
    margin: float
    family: str
    finished_before: int
    seeds: list[int]
    by_seed: dict[int, float]
    """The estimate from each seed alone."""
    estimate: float | None
    interval: list[float] | None
    p: float | None
    p_corrected: float | None
    """The p value after Holm's correction; None for exploratory hypotheses."""
    notes: list[str]
    """What limits the test, such as seeds that are missing."""
    obstacle: str | None
    """Why there is no p value; None if there is one."""
    verdict: str


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A cell that does not count, and why."""

    cell: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The results of a study. As text, it is a few tables."""

    split: str
    finished: int
    planned: int
    curves: list[CurveResult]
    comparisons: list[PairResult]
    tests: list[ClaimResult]
    left_out: list[LeftOut]

    def __str__(self) -> str:
        return as_tables(self)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "Fit":
        """Make the results from the content of a file whose form was checked."""
        return cls(
            split=content["split"],
            finished=content["finished"],
            planned=content["planned"],
            curves=[CurveResult.from_dict(curve) for curve in content["curves"]],
            comparisons=[PairResult(**pair) for pair in content["comparisons"]],
            tests=[_claim(claim) for claim in content["tests"]],
            left_out=[LeftOut(**entry) for entry in content["left_out"]],
        )

    def write(self, path: Path) -> None:
        with writing(path.parent):
            write_json(path, self.to_dict())

    @classmethod
    def read(cls, path: Path, way_out: str) -> "Fit":
        names = [part.name for part in dataclasses.fields(cls)]
        content = read_json(path, names, way_out)
        forms.check(content, forms.FIT, path, way_out)
        return cls.from_dict(content)


def read_curves(path: Path, way_out: str) -> list[CurveResult]:
    """Read the curves of fit.json or fit-test.json."""
    content = read_json(path, ("curves",), way_out)
    forms.check(content, forms.CURVES, path, way_out)
    return [CurveResult.from_dict(curve) for curve in content["curves"]]


def _point(content: dict[str, Any]) -> PointResult:
    by_seed = ("losses", "lookahead_losses", "capacities")
    values = content | {name: _with_seeds(content[name]) for name in by_seed}
    return PointResult(**values)


def _claim(content: dict[str, Any]) -> ClaimResult:
    values = content | {"by_seed": _with_seeds(content["by_seed"])}
    return ClaimResult(**values)


def _with_seeds(content: dict[str, Any]) -> dict[int, Any]:
    """Make seeds of the names of an object: JSON has texts only."""
    return {int(seed): value for seed, value in content.items()}
