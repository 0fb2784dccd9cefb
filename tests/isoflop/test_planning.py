"""A study is planned."""

import math
import re
import shutil
import sys

import numpy as np
import pytest
from corpora import documents, plan, write_folder

from mixdepth import DepthConfig, TrainConfig, count_flops
from mixdepth.data.tokenizers import train_bpe
from mixdepth.isoflop import Study
from mixdepth.isoflop.ladder import ladder, shapes_near
from mixdepth.isoflop.variants import parse_variant
from mixdepth.models.fresh import make_model


def test_variants_are_named_by_what_they_set():
    assert parse_variant("dense").depth is None
    assert parse_variant("mod").depth.scheme == "expert_choice"
    assert parse_variant("random:capacity=0.5:every=1").depth == DepthConfig(scheme="random", capacity=0.5, every=1)
    assert parse_variant("dense:learning_rate=2e-3").training == {"learning_rate": 2e-3}
    assert parse_variant("mod:aspect=8").aspect == 8
    for text in ("mod", "mod:capacity=0.125", "expert_choice:every=2", "mod:aspect=16"):
        assert parse_variant(text).name == "mod"
    assert parse_variant("mod:gate=tanh:capacity=.50").name == "mod:capacity=0.5:gate=tanh"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("moe", "there is no variant 'moe': give one of dense, mod"),
        ("mod:capacity", "'capacity' in variant 'mod:capacity' is no setting: write name=value"),
        ("dense:capacity=0.5", "variant 'dense:capacity=0.5' cannot have 'capacity'"),
        ("mod:seed=3", "cannot have 'seed'"),
        ("mod:capacity=2", "capacity must be a fraction in (0, 1], not 2"),
        ("dense:learning_rate=-1", "learning_rate must be a positive number, not -1"),
        ("early_exit", "there is no variant 'early_exit'"),
        ("mod:first=3", "variant 'mod:first=3' must begin within its first every=2 layers, not at 3"),
        ("mod:every=1:every=2", "variant 'mod:every=1:every=2' sets 'every' twice"),
        ("mod:aspect=0", "aspect in variant 'mod:aspect=0' must be a positive number, not '0'"),
    ],
)
def test_variants_that_make_no_sense_are_refused(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_variant(text)


def test_a_ladder_is_centred_and_half_an_octave_apart():
    assert ladder(5)[2] == 1
    np.testing.assert_allclose(np.diff(np.log2(ladder(6))), 0.5)


def test_a_ladder_is_found_for_the_budgets_of_the_paper_too():
    common = TrainConfig(steps=1, depth=None)
    for variant in ("dense", "mod"):
        shapes = shapes_near([3e8 * rung for rung in ladder(7)], 3e8, parse_variant(variant), common, 256)
        assert len({layers for layers, _ in shapes}) == 1
        widths = [width for _, width in shapes]
        assert widths == sorted(set(widths))
        assert 1.9 < widths[-1] / widths[0] < 3.1  # three octaves of FLOPs, between their root and their cube root


def test_every_cell_spends_its_budget_at_a_size_near_its_rung(tmp_path, corpus):
    budgets, variants = [3e9, 1e10], ["dense", "mod", "mod:capacity=0.5", "random:capacity=0.5"]
    found = plan(tmp_path / "study", corpus, budgets=budgets, variants=variants, seeds=2, sizes=4, centre=5e5)
    assert len(found.cells) == len({cell.name for cell in found.cells}) == 2 * 4 * 4 * 2
    for cell in found.cells:
        config = TrainConfig.from_dict(cell.settings)
        model = make_model(config, 256)
        step = 3 * config.batch_size * count_flops(model, config.context).total
        assert cell.flops == cell.steps * step
        assert cell.budget - step < cell.flops <= cell.budget
        assert cell.parameters == model.num_parameters()
        assert cell.flops_per_token == count_flops(model, config.context).total / config.context
        assert abs(math.log2(cell.flops_per_token / (5e5 * cell.rung))) < 0.6  # widths go by 16
        assert (config.batch_size, config.context, config.seed) == (4, 32, cell.seed)
        assert config.learning_rate is not None
        assert "random" not in cell.variant or config.depth.seed == cell.seed  # its noise is part of chance
        assert cell.seconds > 0
    for budget in budgets:
        for variant in variants:
            curve = [cell for cell in found.cells if (cell.budget, cell.variant) == (budget, variant)]
            assert {cell.seed for cell in curve} == {0, 1}
            assert len({cell.shape for cell in curve}) == 4
            assert {cell.settings["layers"] for cell in curve} == {
                2 if variant == "dense" else 4
            }  # width alone differs
            assert {cell.settings["width"] // cell.settings["heads"] for cell in curve} == {16}


def test_the_time_of_a_cell_counts_its_evaluation(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(sys.modules["mixdepth.isoflop.planning"], "seconds_per_step", lambda *_: 3.0)
    dense, mod = plan(tmp_path / "study", corpus).cells
    windows = 8 + 8  # of both held-out texts, by batches of 4 with three passes a step
    assert dense.seconds == pytest.approx(3 * dense.steps + windows / 4)
    assert mod.seconds == pytest.approx(3 * mod.steps + 2 * windows / 4)


def test_the_hypotheses_are_in_the_plan(tmp_path, corpus):
    variants = ["dense", "mod:capacity=0.5", "random:capacity=0.5", "mod:capacity=0.5:every=1", "mod"]
    one_size = plan(tmp_path / "one size", corpus, variants=variants, seeds=2).hypotheses
    assert {claim.kind for claim in one_size} == {"differs", "equivalent", "less"}  # the others take curves
    ladders = {"variants": variants, "sizes": 3, "centre": 3e5, "budgets": [3e9]}
    assert plan(tmp_path / "study", corpus, **ladders).hypotheses == []  # of one seed none could be tested, ever
    found = plan(tmp_path / "study", corpus, **ladders, seeds=3)
    claims = {(claim.kind, claim.variant, claim.against): claim for claim in found.hypotheses}
    half, random = "mod:capacity=0.5", "random:capacity=0.5"
    for key in (
        ("differs", half, "dense"),
        ("larger", half, "dense"),
        ("crosses", half, "dense"),
        ("equivalent", half, half),
        ("less", half, random),
        ("less", half, f"{half}:every=1"),
    ):
        assert claims[key].seeds == [0, 1, 2]
        assert claims.pop(key).family == "primary"
    for key in (("differs", "mod", half), ("differs", "mod", "dense")):
        assert claims.pop(key).family == "exploratory"
    assert all(claim.family == "exploratory" and claim.finished_before == 0 for claim in claims.values())
    assert ("less", "mod", random) not in claims  # they differ in more than the scheme


def test_a_study_grows_and_what_is_planned_stays(study, corpus):
    before = Study.read(study)
    grown = shutil.copytree(study, study.parent / "grown")
    after = plan(grown, corpus, variants=["dense", "random"], seeds=[0, 7])
    assert after.hypotheses == []  # of the seeds of mod there is one
    last = plan(grown, corpus, variants=["mod"], seeds=[7])
    assert after.cells[: len(before.cells)] == before.cells
    assert [(cell.variant, cell.seed) for cell in after.cells[2:]] == [("dense", 7), ("random", 0), ("random", 7)]
    late = {claim.kind: claim for claim in last.hypotheses}
    assert (late["less"].variant, late["less"].against) == ("mod", "random")
    for kind, known in (("less", 1), ("differs", 2), ("equivalent", 1)):  # afterthoughts: seed 0 is known
        assert (late[kind].family, late[kind].finished_before, late[kind].seeds) == ("exploratory", known, [0, 7])
    later = plan(grown, corpus, variants=["dense", "mod:capacity=0.5", "random:capacity=0.5"], seeds=[8, 9])
    assert later.hypotheses[: len(last.hypotheses)] == last.hypotheses
    fresh = later.hypotheses[len(last.hypotheses) :]
    assert {(claim.kind, claim.variant, claim.against, claim.family) for claim in fresh} == {
        ("differs", "mod:capacity=0.5", "dense", "primary"),
        ("equivalent", "mod:capacity=0.5", "mod:capacity=0.5", "primary"),
        ("less", "mod:capacity=0.5", "random:capacity=0.5", "primary"),
    }
    assert all(claim.seeds == [8, 9] and claim.finished_before == 0 for claim in fresh)  # nothing is known of these
    with pytest.raises(ValueError, match=r"has context=32, not 64: choose another --out"):
        plan(grown, corpus, context=64)
    with pytest.raises(ValueError, match=r"has eval_windows=8, not 16: choose another --out"):
        plan(grown, corpus, eval_windows=16)
    with pytest.raises(ValueError, match=r"has warmup=0.3, not 0.1: choose another --out"):
        plan(grown, corpus, variants=["mod:every=1"], warmup=0.1)
    with pytest.raises(ValueError, match=r"is planned already with learning_rate=\S+, not 0.5: choose another --out"):
        plan(grown, corpus, learning_rate=0.5)
    with pytest.raises(ValueError, match=r"is planned already with learning_rate=\S+, not 0.5: choose another --out"):
        plan(grown, corpus, seeds=[8], learning_rate=0.5)  # one point has one rate
    with pytest.raises(ValueError, match=r"the curve of 'dense' at 3e8 is planned with 2 layers, not \d+: choose"):
        plan(grown, corpus, centre=7e5)
    other = write_folder(grown.parent / "others", documents(30, 900))
    with pytest.raises(ValueError, match="is on another text than"):
        plan(grown, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"test": 0.0}, r"test=0.0 of corpus '.*' is less than one window of context=32"),
        (
            {"centre": 100.0},
            "variant 'dense' has no 1 shapes of one depth from 100 to 100 FLOPs for each token: raise --centre",
        ),
        ({"capacity_steps": 3}, "a study's runs have no common setting 'capacity_steps'"),
        ({"variants": []}, "a study needs at least one of variants"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_and_leaves_nothing(options, message, tmp_path, corpus):
    with pytest.raises(ValueError, match=message):
        plan(tmp_path / "study", corpus, **options)
    assert not (tmp_path / "study").exists()


def test_a_tokenizer_in_a_folder_is_found_from_every_folder(tmp_path, corpus, monkeypatch):
    train_bpe(documents(5), 300).save_pretrained(tmp_path / "own")
    (tmp_path / "bytes").mkdir()  # a study's, say
    monkeypatch.chdir(tmp_path)
    for given, planned in (("own", str(tmp_path / "own")), ("bytes", "bytes"), ("bpe:300", "bpe:300")):
        found = plan(tmp_path / "studies" / given, corpus, variants=["dense"], tokenizer=given)
        assert found.cells[0].settings["tokenizer"] == planned


def test_what_is_named_twice_is_planned_once(tmp_path, corpus):
    found = plan(tmp_path / "study", corpus, budgets=[3e8, 300_000_000], variants=["dense", " dense"], seeds=[4, 4])
    assert [cell.name for cell in found.cells] == [f"3e8/dense/{found.cells[0].shape}/seed4"]
