"""Studies with made-up results: fitted, tested, plotted; and what makes no sense is said."""

import json
import math
import shutil
import xml.dom.minidom
from dataclasses import asdict, replace

import numpy as np
import pytest
from made_up import SIZES, claim, write_study

from mixdepth import isoflop
from mixdepth.isoflop import Study
from mixdepth.isoflop.curves import lowest
from mixdepth.isoflop.results import Fit, LeftOut


def test_the_lowest_point_of_a_parabola():
    sizes = list(SIZES.values())
    found = lowest(sizes, [1.5 + 0.1 * math.log(size / 3e5) ** 2 for size in sizes])
    assert found.is_bracketed
    assert found.parameters == pytest.approx(3e5)
    assert found.loss == pytest.approx(1.5)
    for losses in ([4.0, 3.0, 2.5, 2.2], [1.0, 2.0, 3.0, 3.5], [1.0, 2.0, 2.0, 1.1]):  # falls, rises, is a hill
        found = lowest(sizes, losses)
        assert not found.is_bracketed
        assert found.loss == min(losses)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A fit of two curves without noise: the optima are at 2e5 and 4e5 parameters, and seeds shift all losses."""
    curves = {(1e13, "dense"): (2e5, 1.40, 0.1), (1e13, "mod"): (4e5, 1.386, 0.1)}
    hypotheses = [claim("differs", margin=0.015), claim("larger"), claim("less"), claim("equivalent", against="mod")]
    folder = tmp_path_factory.mktemp("fitted") / "study"
    fit = isoflop.fit(write_study(folder, curves, hypotheses))
    assert json.loads((folder / "fit.json").read_text())["curves"][0]["optimum"] == asdict(fit.curves[0].optimum)
    return fit


def test_a_fit_finds_the_optima(fitted):
    dense, mod = fitted.curves
    assert dense.optimum.parameters == pytest.approx(2e5)
    assert mod.optimum.parameters == pytest.approx(4e5)
    assert dense.optimum.loss == pytest.approx(1.41)  # the mean over seeds


def test_intervals_of_an_optimum_are_those_of_t_and_of_draws(fitted):
    optimum = fitted.curves[0].optimum
    half_width = 4.30265 * 0.01 / math.sqrt(3)  # of t with two degrees of freedom
    assert optimum.loss_interval == pytest.approx([1.41 - half_width, 1.41 + half_width])
    assert optimum.loss_bootstrap == pytest.approx([1.40, 1.42])


def test_the_best_size_has_its_spread_and_its_capacities(fitted):
    dense, mod = fitted.curves
    assert dense.best.std == pytest.approx(0.01)
    assert dense.best.capacities == []
    assert mod.best.capacities == pytest.approx([0.13, 0.25, 0.25])
    assert "13.0% 25.0% 25.0%" in str(fitted)


def test_a_pair_is_compared_at_its_optima(fitted):
    (pair,) = fitted.comparisons
    assert pair.loss == pytest.approx(1.396 / 1.41 - 1)
    assert pair.best_sizes == pytest.approx(1.396 / 1.41 - 1)  # the ladder has the optima themselves
    assert pair.t_interval[0] < pair.loss < pair.t_interval[1] < 0
    assert pair.optimum_ratio == pytest.approx(2)
    assert pair.optimum_ratio_interval == pytest.approx([2, 2])
    assert "[2.00, 2.00]" in str(fitted)


def test_the_crossing_of_two_curves_is_found(fitted):
    (pair,) = fitted.comparisons
    crossing = math.exp((math.log(2e5) + math.log(4e5)) / 2 - 0.014 / 0.2 / math.log(2))
    assert pair.crossings == pytest.approx([crossing])
    assert pair.crossing_ratio == pytest.approx(crossing / 2e5)
    assert pair.crossing_ratio_interval == pytest.approx([crossing / 2e5, crossing / 2e5])
    assert pair.is_lower_above
    assert "x 1.28 [1.28, 1.28]; mod is lower above" in str(fitted)


def test_each_kind_of_claim_has_its_estimate_and_its_verdict(fitted):
    tests = {test.kind: test for test in fitted.tests}
    assert tests["larger"].estimate == pytest.approx(math.log(2))
    assert tests["equivalent"].estimate == pytest.approx(0.0011, rel=0.01)
    assert tests["differs"].verdict == "holds: lower"
    assert tests["less"].verdict == tests["equivalent"].verdict == "holds"
    assert tests["larger"].verdict == "the seeds do not differ"
    assert "holds" in str(fitted)


def test_a_fit_that_is_read_again_is_the_same(fitted):
    content = json.loads(json.dumps(fitted.to_dict()))
    assert Fit.from_dict(content) == fitted


def relative_losses_at_ends(curves, seeds):
    """The loss of `mod` relative to `dense`, by parabolas of single seeds: at the smallest and the largest size."""
    points = {curve.variant: curve.points for curve in curves}
    logs = np.log([point.parameters for point in points["dense"]])
    ends = {"dense": [], "mod": []}
    for variant, losses in ends.items():
        for seed in seeds:
            parabola = np.polyfit(logs, [point.losses[seed] for point in points[variant]], 2)
            losses.append(np.polyval(parabola, logs[[0, -1]]))
    ratios = np.array(ends["mod"]) / np.array(ends["dense"])  # (seeds, 2)
    return np.transpose(ratios - 1)


def test_curves_cross_if_they_do_at_both_ends(tmp_path):
    from scipy import stats

    curves = {(1e13, "dense"): (2e5, 1.40, 0.1), (1e13, "mod"): (4e5, 1.42, 0.1)}
    fitted = isoflop.fit(write_study(tmp_path / "study", curves, [claim("crosses")], noise=1e-3))
    (test,) = fitted.tests
    assert test.verdict == "holds"
    assert math.exp(test.estimate) == pytest.approx(fitted.comparisons[0].crossing_ratio)
    assert test.interval[0] < test.estimate < test.interval[1]
    smallest, largest = relative_losses_at_ends(fitted.curves, seeds=(0, 1, 2))
    p_smallest = stats.ttest_1samp(smallest, 0, alternative="greater").pvalue
    p_largest = stats.ttest_1samp(largest, 0, alternative="less").pvalue
    assert test.p == pytest.approx(max(p_smallest, p_largest), rel=0.1)


def test_curves_do_not_cross_if_one_is_lower_everywhere(tmp_path):
    curves = {(1e13, "dense"): (2e5, 1.40, 0.1), (1e13, "mod"): (2.2e5, 1.35, 0.1)}
    fitted = isoflop.fit(write_study(tmp_path / "study", curves, [claim("crosses")], noise=1e-3))
    (test,) = fitted.tests
    assert (test.estimate, test.interval, test.by_seed) == (None, None, {})
    assert test.verdict == "not shown"
    assert fitted.comparisons[0].crossing_ratio is None
    assert "NaN" not in (tmp_path / "study" / "fit.json").read_text()
    assert "is lower above" not in str(fitted)


def test_p_values_are_scipys_and_corrected_by_holm(tmp_path):
    from scipy import stats

    curves = {(1e13, name): (3e5, loss, 0.1) for name, loss in (("dense", 1.4), ("mod", 1.395), ("random", 1.401))}
    hypotheses = [
        claim("differs"),
        claim("less", against="random"),
        claim("equivalent", against="mod"),
        claim("differs", variant="random", family="exploratory"),
        claim("differs", variant="unknown"),
    ]
    found = isoflop.fit(write_study(tmp_path / "study", curves, hypotheses, noise=0.003))
    differs, less, equivalent, exploratory, unknown = found.tests
    gaps = list(equivalent.by_seed.values())
    above = stats.ttest_1samp(gaps, -0.003, alternative="greater").pvalue
    below = stats.ttest_1samp(gaps, 0.003, alternative="less").pvalue
    assert equivalent.p == pytest.approx(max(above, below))  # of a mean the jackknife is the t test
    for test, alternative in ((differs, "two-sided"), (less, "less")):  # of a ratio nearly
        values = list(test.by_seed.values())
        assert test.p == pytest.approx(stats.ttest_1samp(values, 0, alternative=alternative).pvalue, rel=0.1)
    primary = sorted([differs, less, equivalent], key=lambda test: test.p)
    raw = [test.p for test in primary]
    expected = np.maximum.accumulate([4 * raw[0], 3 * raw[1], 2 * raw[2]]).clip(max=1)  # one more was planned
    assert [test.p_corrected for test in primary] == pytest.approx(list(expected))
    assert exploratory.p_corrected is None
    assert exploratory.verdict.endswith("(exploratory)")
    assert unknown.verdict == "not run"


def test_a_difference_beyond_the_margin_is_not_equal(tmp_path):
    curves = {(1e13, "mod"): (3e5, 1.4, 0.1)}
    found = isoflop.fit(write_study(tmp_path / "study", curves, [claim("equivalent", against="mod", margin=0.001)]))
    assert found.tests[0].verdict == "not shown"


def test_a_single_size_is_compared_at_its_own_flops(tmp_path):
    folder = write_study(tmp_path / "study", {(1e13, "dense"): (2e5, 1.4, 0.1), (1e13, "mod"): (2e5, 1.3, 0.1)})
    found = Study.read(folder)
    kept = [cell for cell in found.cells if cell.variant == "dense" or cell.shape == "4x16"]
    replace(found, cells=kept, hypotheses=[claim("less")]).write()
    fitted = isoflop.fit(folder)
    losses = {curve.variant: {p.shape: p.loss for p in curve.points} for curve in fitted.curves}
    expected = losses["mod"]["4x16"] / losses["dense"]["4x16"] - 1
    assert fitted.comparisons[0].loss == pytest.approx(expected)
    assert fitted.tests[0].estimate == pytest.approx(expected)
    assert fitted.tests[0].verdict == "holds; at equal FLOPs"


def test_a_difference_is_told_with_its_side_and_the_goal(tmp_path):
    goal = "holds: lower, and by its estimate reaches the goal of 1.5%"
    for loss, verdict in ((1.45, "holds: higher"), (1.35, goal)):
        curves = {(1e13, "dense"): (2e5, 1.40, 0.1), (1e13, "mod"): (4e5, loss, 0.1)}
        folder = write_study(tmp_path / str(loss), curves, [claim("differs", margin=0.015)], noise=1e-4)
        assert isoflop.fit(folder).tests[0].verdict == verdict


def test_an_optimum_outside_of_the_sizes_is_said(tmp_path):
    curves = {(1e13, "dense"): (2e6, 1.40, 0.1), (1e13, "mod"): (4e5, 1.35, 0.1)}
    claims = [claim("differs"), claim("larger"), claim("equivalent", "dense")]
    fitted = isoflop.fit(write_study(tmp_path / "study", curves, claims, noise=1e-4))
    differs, larger, equivalent = fitted.tests
    assert equivalent.verdict == "holds"  # at all sizes
    assert differs.verdict == larger.verdict == "an optimum is not bracketed"
    (pair,) = fitted.comparisons
    assert pair.optimum_ratio is None
    dense, mod = (curve.best.loss for curve in fitted.curves)
    assert pair.best_sizes == pytest.approx(mod / dense - 1)
    assert (pair.loss, pair.t_interval) == (None, None)  # no lowest point of one against a size of the other
    (line,) = (line for line in str(fitted).splitlines() if line.split()[1:3] == ["mod", "dense"])
    assert line.endswith("not bracketed")


def test_sizes_without_a_seed_in_common_are_left_out_and_not_the_seeds(tmp_path):
    curves = {(1e13, "dense"): (3e5, 1.4, 0.1), (1e13, "mod"): (4e5, 1.3, 0.1)}
    folder = write_study(tmp_path / "study", curves, [claim("differs")], noise=1e-4)
    for name in ("1x16/seed0", "1x16/seed1", "2x16/seed2"):
        (folder / "cells" / "10000000000000.0" / "dense" / name / "result.json").unlink()
    fitted = isoflop.fit(folder)
    assert fitted.curves[0].seeds == [0, 1]
    assert [point.shape for point in fitted.curves[0].points] == ["2x16", "3x16", "4x16"]
    assert fitted.comparisons[0].seeds == [0, 1]
    left_out = {"/".join(entry.cell.split("/")[-2:]): entry.reason for entry in fitted.left_out}
    assert left_out == {
        "1x16/seed2": "its size has too few seeds",
        "3x16/seed2": "other sizes lack its seed",
        "4x16/seed2": "other sizes lack its seed",
    }
    assert fitted.tests[0].verdict.endswith("; interim, 3 of 4 sizes of dense; interim, 2 of 3 seeds")
    assert (fitted.finished, fitted.planned) == (21, 24)
    assert str(fitted).startswith("21 of 24 runs, 18 used")


def test_a_claim_is_tested_on_the_seeds_that_were_planned_with_it(tmp_path):
    curves = {(1e13, "dense"): (2e5, 1.4, 0.1), (1e13, "mod"): (4e5, 1.39, 0.1)}
    folder = write_study(tmp_path / "study", curves, [claim("differs", seeds=[0, 1, 9])], noise=1e-4)
    test = isoflop.fit(folder).tests[0]
    assert list(test.by_seed) == [0, 1]  # 2 was added later
    assert test.verdict.endswith("; interim, 2 of 3 seeds")


def test_a_ladder_is_not_compared_before_it_is_one(tmp_path):
    curves = {(1e13, "dense"): (2e5, 1.4, 0.1), (1e13, "mod"): (4e5, 1.39, 0.1)}
    folder = write_study(tmp_path / "study", curves, [claim("differs")])
    for shape in ("1x16", "2x16"):
        shutil.rmtree(folder / "cells" / "10000000000000.0" / "mod" / shape)
    fitted = isoflop.fit(folder)
    assert fitted.comparisons[0].loss is None
    assert fitted.tests[0].verdict == "too few sizes are finished"


def test_each_budget_is_corrected_by_itself(tmp_path):
    curves = {(1e13, "dense"): (2e5, 1.4, 0.1), (1e13, "mod"): (4e5, 1.39, 0.1)}
    claims = [claim("differs"), claim("larger"), *(replace(claim("less"), budget=b, name=f"{b}") for b in (3e13, 1e14))]
    found = isoflop.fit(write_study(tmp_path / "study", curves, claims, noise=1e-3)).tests
    assert found[0].p_corrected <= 2 * found[0].p  # not 4


def test_sizes_of_other_flops_are_not_compared(tmp_path):
    folder = write_study(tmp_path / "study", {(1e13, "dense"): (2e5, 1.4, 0.1), (1e13, "mod"): (2e5, 1.3, 0.1)})
    found = Study.read(folder)
    kept = [c for c in found.cells if c.shape == {"dense": "1x16", "mod": "4x16"}[c.variant]]
    replace(found, cells=kept, hypotheses=[claim("less")]).write()
    fitted = isoflop.fit(folder)
    assert fitted.comparisons[0].loss is None
    assert fitted.tests[0].verdict == "they have no size in common"


def test_seeds_that_do_not_differ_test_nothing_and_spoil_nothing(tmp_path):
    curves = {(1e13, name): (3e5, 1.4, 0.1) for name in ("dense", "mod")}
    hypotheses = [claim("differs"), claim("equivalent", against="mod")]
    fitted = isoflop.fit(write_study(tmp_path / "study", curves, hypotheses))
    same, equivalent = fitted.tests
    assert same.by_seed == {0: 0, 1: 0, 2: 0}
    assert (same.p, same.verdict) == (None, "the seeds do not differ")
    assert equivalent.p_corrected == 2 * equivalent.p  # two were planned
    assert "NaN" not in (tmp_path / "study" / "fit.json").read_text()


def test_cells_of_before_capacities_were_written_still_count(tmp_path):
    folder = write_study(tmp_path / "study", {(1e13, "mod"): (2e5, 1.4, 0.1)})
    for path in (folder / "cells").rglob("seed0/result.json"):
        result = json.loads(path.read_text())
        del result["validation_capacities"]
        path.write_text(json.dumps(result))
    (mod,) = isoflop.fit(folder).curves
    assert mod.seeds == [0, 1, 2]
    assert mod.best.capacities == pytest.approx([0.135, 0.25])  # of those that say


def test_what_diverged_is_left_out_and_said(tmp_path):
    folder = write_study(tmp_path / "study", {(1e13, "dense"): (2e5, 1.4, 0.1)})
    cell = Study.read(folder).cells[0]
    (folder / "cells" / cell.name / "result.json").write_text('{"validation_loss": NaN}')
    fitted = isoflop.fit(folder)
    assert fitted.left_out[0] == LeftOut(cell=cell.name, reason="it diverged: its loss is not a number")
    assert [entry.reason for entry in fitted.left_out[1:]] == ["other sizes lack its seed"] * 3
    assert fitted.curves[0].seeds == [1, 2]
    assert f"left out: {cell.name}" in str(fitted)


def test_plots_are_drawn_from_the_fit(tmp_path):
    from matplotlib.image import imread

    curves = {
        (budget, name): (size, loss, 0.1)
        for budget, size, loss in ((1e13, 2e5, 1.4), (3e13, 3e5, 1.3))
        for name in ("dense", "mod")
    }
    folder = write_study(tmp_path / "study", curves, noise=0.002)
    isoflop.fit(folder)
    shutil.rmtree(folder / "cells")
    paths = isoflop.plot(folder)
    assert [path.name for path in paths] == ["variants.png", "variants.svg", "budgets.png", "budgets.svg"]
    assert sorted(path.name for path in folder.glob("[!.]*")) == sorted(
        ["study.json", "cells.jsonl", "fit.json", *(p.name for p in paths)]
    )
    for path in paths:
        if path.suffix == ".png":
            assert imread(path).std() > 0.05
        else:
            assert xml.dom.minidom.parse(str(path)).documentElement.tagName == "svg"
            for words in ("mod", "parameters", "validation loss, causal (nats per token)"):
                assert words in path.read_text()
    first = paths[1].read_bytes()
    assert isoflop.plot(folder)[1].read_bytes() == first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["plan", "--budgets", "0", "--variants", "dense", "--out", "x"],
            "a budget must be a positive number of FLOPs, not 0",
        ),
        (["plan", "--budgets", "1e9", "--variants", "moe", "--out", "x"], "there is no variant 'moe'"),
        (
            ["plan", "--budgets", "1e9", "--variants", "dense", "--sizes", "0", "--out", "x"],
            "sizes must be a whole number of at least 1",
        ),
        (["plan", "--budgets", "1e9", "--variants", "dense", "--seeds", "0", "--out", "x"], "seeds must be"),
        (
            ["plan", "--budgets", "1e9", "--variants", "dense", "--centre", "-1", "--out", "x"],
            "centre must be a positive number",
        ),
        (["plan", "--budgets", "1e9", "--variants", "dense", "--seeds", "2.5", "--out", "x"], "seeds must be"),
        (["run", "nowhere"], "'nowhere' is not a study: it has no study.json"),
        (["fit", "STUDY", "--split", "train"], "split must be one of validation, test, not 'train'"),
        (["run", "STUDY", "--engine", "slurm"], "engine must be one of local, ray, not 'slurm'"),
        (["run", "STUDY", "--workers", "0"], "workers must be a whole number of at least 1, not 0"),
        (["run", "STUDY", "--cell", "none"], "has no cell 'none'"),
        (["plot", "EMPTY"], "has no fit.json"),
        (["fit", "EMPTY"], "no cell of the study in"),
    ],
)
def test_what_makes_no_sense_is_said_in_one_sentence(arguments, message, tmp_path, capsys, monkeypatch):
    from mixdepth.cli import main

    monkeypatch.chdir(tmp_path)
    write_study(tmp_path / "STUDY", {(1e13, "dense"): (2e5, 1.4, 0.1)})
    write_study(tmp_path / "EMPTY", {})
    assert main(["isoflop", *arguments]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert message in said[0]


def test_a_damaged_plan_is_named(tmp_path):
    folder = write_study(tmp_path / "study", {(1e13, "dense"): (2e5, 1.4, 0.1)})
    content = json.loads((folder / "study.json").read_text())
    for damage, message in (
        ({"format": 9}, "has the format 9"),
        ({"cells": [{"name": "x"}]}, r"is damaged \(cells\[0\] has no 'budget'\): restore it, or plan again"),
        ({"cells": 3}, r"is damaged \(cells is 3, not a list\)"),
        (
            {"cells": [{**content["cells"][0], "settings": {"width": 16}}]},
            r"is damaged \(cells\[0\].settings has no 'layers'\)",
        ),
        (
            {"cells": [{**content["cells"][0], "settings": []}]},
            r"is damaged \(cells\[0\].settings is \[\], not an object\): restore it, or plan",
        ),
    ):
        (folder / "study.json").write_text(json.dumps({**content, **damage}))
        with pytest.raises(ValueError, match=message):
            Study.read(folder)
    (folder / "study.json").write_text("[]")
    with pytest.raises(ValueError, match=r"study.json' is damaged \(it has no 'format'\): restore it, or plan again"):
        Study.read(folder)


def without(fitted, part, *keys):
    """A fit of which one part of the first curve lacks something."""
    (curve,) = fitted["curves"]
    inner = {name: value for name, value in (curve[part] if keys else curve).items() if name not in (*keys, part)}
    return {"curves": [{**curve, part: inner} if keys else inner]}


@pytest.mark.parametrize(
    "damage",
    [
        lambda fitted: [],
        lambda fitted: {},
        lambda fitted: {"curves": []},
        lambda fitted: {"curves": 3},
        lambda fitted: {"curves": [3]},
        lambda fitted: without(fitted, "budget"),
        lambda fitted: without(fitted, "parabola"),
        lambda fitted: without(fitted, "best", "shape"),
        lambda fitted: without(fitted, "optimum", "loss"),
        lambda fitted: {"curves": [{**fitted["curves"][0], "points": [{}]}]},
    ],
)
def test_a_damaged_fit_is_named(damage, tmp_path):
    folder = write_study(tmp_path / "study", {(1e13, "dense"): (2e5, 1.4, 0.1)}, seeds=(0,))
    isoflop.fit(folder)
    path = folder / "fit.json"
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    with pytest.raises(ValueError, match=r"fit.json' is damaged .*: mixdepth isoflop fit .*study makes it again"):
        isoflop.plot(folder)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"fit.json' is damaged .*: mixdepth isoflop fit .*study makes it again"):
        isoflop.plot(folder)
    with pytest.raises(ValueError, match=r"has no fit-test.json: mixdepth isoflop fit .*study --split test makes it"):
        isoflop.plot(folder, split="test")
    path.rename(folder / "fit-test.json").write_text('{"curves": []}')
    for opened_again in (isoflop.fit, isoflop.plot):
        with pytest.raises(ValueError, match=r"fit-test.json' is damaged .*: restore it: the test text is opened once"):
            opened_again(folder, split="test")
