"""A study: planned and run."""

import json
import math
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from threading import Event, Thread

import numpy as np
import psutil
import pytest
from corpora import call, documents, start, write_folder
from filelock import FileLock

from mixdepth import DepthConfig, TrainConfig, count_flops, isoflop, train
from mixdepth.isoflop import Study, runner
from mixdepth.isoflop.plan import ladder, shapes_near
from mixdepth.isoflop.runner import _local, _reason
from mixdepth.isoflop.variants import parse_variant
from mixdepth.run import Run
from mixdepth.tokens import train_bpe
from mixdepth.training import make_model

SMALL = {"context": 32, "batch_size": 4, "validation": 0.1, "test": 0.1, "eval_windows": 8, "save_every": 1000}
CENTRE = 3e4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("corpus") / "texts", documents(60, 3000))


@pytest.fixture(scope="module")
def study(tmp_path_factory, corpus):
    """Planned and run by the command line: two cells."""
    folder = tmp_path_factory.mktemp("study") / "study"
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in {**SMALL, "corpus": corpus}.items()]
    asked = ["--budgets", "3e8", "--variants", "dense,mod", "--seeds", "1", "--sizes", "1", "--centre", str(CENTRE)]
    planned = call("isoflop", "plan", *asked, *settings, "--out", str(folder))
    assert planned.returncode == 0, planned.stderr
    assert re.search(r"2 runs of 5\.\d+e\+08 FLOPs in all, 0 finished", planned.stdout)
    ran = call("isoflop", "run", str(folder), "--workers", "2")
    assert ran.returncode == 0, ran.stderr
    assert "2 of 2 runs are finished" in ran.stdout
    return folder


def plan(folder, corpus, **options):
    asked = {"budgets": [3e8], "variants": ["dense", "mod"], "seeds": 1, "sizes": 1, "centre": CENTRE}
    return isoflop.plan(folder, **{**asked, **SMALL, "corpus": corpus, **options})


def processes_of(folder):
    """Those that run a cell of the study."""
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if {"--cell", str(folder)} <= set(process.info["cmdline"] or ())]


def once_begun(run, act):
    """Act when a run has its first checkpoint, whatever this thread does meanwhile."""

    def wait():
        while not run.folder.is_dir() or not run.checkpoints():
            time.sleep(0.05)
        act()

    Thread(target=wait, daemon=True).start()


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
    monkeypatch.setattr(sys.modules["mixdepth.isoflop.plan"], "seconds_per_step", lambda *_: 3.0)
    dense, mod = plan(tmp_path / "study", corpus).cells
    windows = 8 + 8  # of both held-out texts, by batches of 4 with three passes a step
    assert dense.seconds == pytest.approx(3 * dense.steps + windows / 4)
    assert mod.seconds == pytest.approx(3 * mod.steps + 2 * windows / 4)


def test_the_hypotheses_are_in_the_plan(tmp_path, corpus):
    variants = ["dense", "mod:capacity=0.5", "random:capacity=0.5", "mod:capacity=0.5:every=1", "mod"]
    assert all(claim.kind != "larger" for claim in plan(tmp_path / "one size", corpus, variants=variants).hypotheses)
    found = plan(tmp_path / "study", corpus, variants=variants, sizes=3, centre=3e5, budgets=[3e9])
    claims = {(claim.kind, claim.variant, claim.against): claim for claim in found.hypotheses}
    half, random = "mod:capacity=0.5", "random:capacity=0.5"
    for key in (
        ("differs", half, "dense"),
        ("larger", half, "dense"),
        ("equivalent", half, half),
        ("less", half, random),
        ("less", half, f"{half}:every=1"),
    ):
        assert claims[key].seeds == [0]
        assert claims.pop(key).family == "primary"
    for key in (("differs", "mod", half), ("differs", "mod", "dense")):
        assert claims.pop(key).family == "exploratory"
    assert all(claim.family == "exploratory" and claim.finished_before == 0 for claim in claims.values())
    assert ("less", "mod", random) not in claims  # they differ in more than the scheme


def test_a_study_grows_and_what_is_planned_stays(study, corpus):
    before = Study.read(study)
    grown = shutil.copytree(study, study.parent / "grown")
    after = plan(grown, corpus, variants=["dense", "random"], seeds=[0, 7])
    assert after.cells[: len(before.cells)] == before.cells
    assert [(cell.variant, cell.seed) for cell in after.cells[2:]] == [("dense", 7), ("random", 0), ("random", 7)]
    assert after.hypotheses[: len(before.hypotheses)] == before.hypotheses
    (late,) = after.hypotheses[len(before.hypotheses) :]
    assert (late.kind, late.variant, late.against) == ("less", "mod", "random")
    assert (late.family, late.finished_before) == ("exploratory", 2)  # an afterthought
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


def test_a_cell_is_one_call_of_train(study, tmp_path):
    for cell in Study.read(study).cells:
        alone = train(tmp_path / cell.variant, TrainConfig.from_dict(cell.settings))
        ran = Run(study / "cells" / cell.name)
        assert ran.result == alone.result
        assert ran.about == alone.about


def test_finished_cells_are_never_done_again(study):
    files = {path: path.stat().st_mtime_ns for path in (study / "cells").rglob("*") if path.is_file()}
    ran = call("isoflop", "run", str(study))
    assert ran.returncode == 0, ran.stderr
    assert {path: path.stat().st_mtime_ns for path in (study / "cells").rglob("*") if path.is_file()} == files


def test_a_failed_cell_says_why_and_the_others_go_on(study, tmp_path, corpus):
    folder = shutil.copytree(study, tmp_path / "study")
    found = plan(folder, corpus, variants=["random", "dense:learning_rate=1e30:max_grad_norm=0"])
    *finished, blocked, diverged = found.cells
    in_the_way = folder / "cells" / blocked.name / "letter.txt"
    in_the_way.parent.mkdir(parents=True)
    in_the_way.write_text("mine")
    ran = call("isoflop", "run", str(folder), "--workers", "1")
    assert ran.returncode == 2
    assert "2 of 4 runs are finished" in ran.stdout
    assert "1 of 4 cells failed; each says why" in ran.stderr.splitlines()[-1]  # the last would diverge again
    assert "holds 'letter.txt' and no run.json" in found.failure(blocked)
    assert "has diverged" in found.failure(diverged)
    assert [found.failure(cell) for cell in finished] == [None, None]
    assert [entry["cell"] for entry in isoflop.fit(folder).left_out] == [blocked.name, diverged.name]
    with pytest.raises(ValueError, match="1 cells are not finished: the test text is opened once"):
        isoflop.fit(folder, split="test")
    assert in_the_way.read_text() == "mine"
    in_the_way.unlink()
    logs = [found.beside(cell, "log").stat().st_size for cell in found.cells]
    isoflop.run(folder)
    assert found.failure(blocked) is None
    grown = [found.beside(cell, "log").stat().st_size > size for cell, size in zip(found.cells, logs, strict=True)]
    assert grown == [False, False, True, False]
    assert [entry["cell"] for entry in isoflop.fit(folder, split="test").left_out] == [diverged.name]


def test_folders_of_other_runs_and_damaged_files_are_said_and_the_other_cells_go_on(study, tmp_path, corpus):
    folder = shutil.copytree(study, tmp_path / "study")
    found = plan(folder, corpus, seeds=[0, 7])
    dense, mod, half, again = (folder / "cells" / cell.name for cell in found.cells)
    shutil.rmtree(mod)
    shutil.copytree(dense, mod)
    (dense / "result.json").write_text('{"validation_loss": 3.')
    half.mkdir()
    (half / "run.json").write_text("{}")
    found.beside(found.cells[3], "failed.json").write_text("{}")
    assert f"{again}.failed.json' is damaged (it has no 'reason')" in found.failure(found.cells[3])
    before = {path: path.read_bytes() for run in (dense, mod, half) for path in run.rglob("*.*") if path.is_file()}
    ran = call("isoflop", "run", str(folder), "--workers", "2")
    assert ran.returncode == 2
    assert "1 of 4 runs are finished" in ran.stdout
    assert "3 of 4 cells failed; each says why" in ran.stderr.splitlines()[-1]
    written = [json.loads(found.beside(cell, "failed.json").read_text())["reason"] for cell in found.cells[:3]]
    assert f"{dense}/result.json' is damaged" in written[0]
    assert f"{mod}' holds a run of a dense model" in written[1]
    assert f"{half}/run.json' is damaged" in written[2]
    assert {path: path.read_bytes() for path in before} == before
    told = [written[0], "its folder holds a run of other settings", written[2]]
    names = [cell.name for cell in found.cells[:3]]
    assert isoflop.fit(folder).left_out == [
        {"cell": name, "reason": reason} for name, reason in zip(names, told, strict=True)
    ]


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("result.json", "[]", "result.json' is damaged (it has no 'validation_loss')"),
        ("result.json", "{}", "result.json' is damaged (it has no 'validation_loss')"),
        ("result.json", "", "result.json' is damaged (Expecting value"),
        ("run.json", "[]", "run.json' is damaged (it has no 'settings')"),
        ("run.json", None, "is not the folder of a run: it has no run.json"),
        ("run.json", {"seed": 1}, "its folder holds a run of other settings"),
        ("run.json", {"depth": DepthConfig().to_dict()}, "its folder holds a run of other settings"),
        ("run.json", {"layers": "two"}, "layers must be a whole number of at least 1, not 'two'"),
    ],
)
def test_a_result_counts_as_the_cell_s_own_alone(file, content, reason, study, tmp_path):
    folder = shutil.copytree(study, tmp_path / "study")
    found = Study.read(folder)
    path = folder / "cells" / found.cells[0].name / file
    about = json.loads(path.read_text())
    path.unlink()
    if isinstance(content, dict):
        path.write_text(json.dumps({**about, "settings": {**about["settings"], **content}}))
    elif content is not None:
        path.write_text(content)
    assert reason in found.failure(found.cells[0])
    assert (found.is_finished(found.cells[0]), found.is_settled(found.cells[0])) == (False, False)
    assert (found.is_finished(found.cells[1]), found.failure(found.cells[1])) == (True, None)
    (left_out,) = isoflop.fit(folder).left_out
    assert left_out["cell"] == found.cells[0].name
    assert reason in left_out["reason"]


def test_the_cells_of_our_own_study_count():
    found = Study.read(Path(__file__).parents[1] / "studies" / "bytes")
    finished = [cell for cell in found.cells if (found.run_of(cell).folder / "result.json").exists()]
    assert finished
    assert [found.failure(cell) for cell in finished] == [None] * len(finished)


def test_how_a_run_was_computed_is_no_other_setting(study, tmp_path):
    folder = shutil.copytree(study, tmp_path / "study")
    found = Study.read(folder)
    path = folder / "cells" / found.cells[0].name / "run.json"
    about = json.loads(path.read_text())
    about["settings"] |= {"compile": True, "micro_batch_size": 2}
    del about["settings"]["routed_learning_rate"]  # an older version had none
    path.write_text(json.dumps(about))
    assert found.failure(found.cells[0]) is None
    assert found.is_finished(found.cells[0])


def test_why_a_cell_failed_is_written_for_a_scheduler_too(tmp_path, corpus, monkeypatch):
    folder = tmp_path / "study"
    found = plan(folder, corpus, variants=["dense"])
    (cell,) = found.cells
    in_the_way = folder / "cells" / cell.name / "letter.txt"
    in_the_way.parent.mkdir(parents=True)
    in_the_way.write_text("mine")
    with pytest.raises(ValueError, match=r"holds 'letter.txt' and no run.json") as raised:
        isoflop.run(folder, cell=cell.name)
    failed = found.beside(cell, "failed.json")
    assert json.loads(failed.read_text()) == {"reason": str(raised.value), "code": None, "diverged": False}
    in_the_way.unlink()

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "train", stop)
    with pytest.raises(KeyboardInterrupt):
        isoflop.run(folder, cell=cell.name)
    assert not failed.exists()  # to be stopped is no failure

    def overtake(*given):
        failed.write_text('{"reason": "another process is training"}')  # a second one came, and found this one
        return train(*given)

    monkeypatch.setattr(runner, "train", overtake)
    isoflop.run(folder, cell=cell.name)
    assert found.is_finished(cell)
    assert not failed.exists()


def test_a_process_that_was_killed_is_named(tmp_path):
    log = tmp_path / "log"
    log.write_text("step 1\nmixdepth: the disk is full\n\n")
    assert _reason(log, -9) == "its process was ended by SIGKILL"
    assert _reason(log, 2) == "the disk is full"
    log.write_text("")
    assert _reason(log, 3) == "its process ended with code 3"


def test_a_study_that_was_stopped_stops_its_cells_and_goes_on(tmp_path, corpus):
    folder = tmp_path / "study"
    found = plan(folder, corpus, budgets=[1.5e9], variants=["mod"], save_every=20)
    run = Run(folder / "cells" / found.cells[0].name)
    process = start("isoflop", "run", str(folder), log=tmp_path / "log", is_background=True)
    while not run.folder.is_dir() or not run.checkpoints():
        assert process.is_alive()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # nobody is left
    assert run.result is None
    ran = call("isoflop", "run", str(folder))
    assert ran.returncode == 0, ran.stderr
    assert "going on from checkpoint" in (run.folder.parent / "seed0.log").read_text()
    assert run.result is not None


def test_a_cell_that_somebody_ends_has_failed(tmp_path, corpus, capsys):
    folder = tmp_path / "study"
    found = plan(folder, corpus, budgets=[1e10], variants=["dense"], save_every=20)
    (cell,) = found.cells
    once_begun(found.run_of(cell), lambda: [process.terminate() for process in processes_of(folder)])
    isoflop.run(folder)
    assert found.failure(cell) == "its process was ended by SIGTERM"
    assert not found.is_finished(cell)
    said = capsys.readouterr().err
    assert "failed: its process was ended by SIGTERM" in said
    assert "1 of 1 runs, 1 failed" in said
    assert "study: 100%" not in said


def test_a_cell_that_is_just_beginning_is_stopped_too(tmp_path, corpus):
    found = plan(tmp_path / "study", corpus, budgets=[1e10], variants=["dense"])
    with _local(found, 1) as (_, begin, _):
        begin(found.cells[0])
    assert not found.is_finished(found.cells[0])
    assert found.failure(found.cells[0]) is None
    assert processes_of(found.folder) == []


def test_a_cell_that_is_ended_just_before_its_study_is_stopped_has_not_failed(tmp_path, corpus):
    found = plan(tmp_path / "study", corpus, variants=["dense"])
    (cell,) = found.cells
    stopping = Event()
    thread = Thread(target=runner.attempt, args=(str(found.folder), cell.name, stopping))
    thread.start()
    while not processes_of(found.folder):
        time.sleep(0.02)
    processes_of(found.folder)[0].terminate()  # as `kill` of a group does, or a machine that goes down
    while processes_of(found.folder):
        time.sleep(0.02)
    time.sleep(0.2)
    stopping.set()
    thread.join()
    assert found.failure(cell) is None


@pytest.fixture(scope="module")
def cluster():
    import ray

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell's background
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    signal.signal(signal.SIGINT, before)
    yield
    ray.shutdown()


def test_cells_run_on_ray_and_one_that_fails_says_why(study, tmp_path, corpus, cluster, monkeypatch):
    folder = shutil.copytree(study, tmp_path / "study")
    found = plan(folder, corpus, variants=["random", "mod:capacity=0.5"])
    *_, lost, last = found.cells
    real = runner.attempt

    def attempt(where, name):  # the first is on a machine that does not see the folder
        real("nowhere" if name == lost.name else where, name)

    monkeypatch.setattr(runner, "attempt", attempt)
    isoflop.run(folder, engine="ray")
    assert "'nowhere' is not a study: it has no study.json" in found.failure(lost)
    assert found.is_finished(last)


def test_a_study_on_ray_that_is_stopped_stops_its_cells(tmp_path, corpus, cluster):
    folder = tmp_path / "study"
    found = plan(folder, corpus, budgets=[1e10], variants=["dense"], save_every=20)
    (cell,) = found.cells
    once_begun(found.run_of(cell), lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        isoflop.run(folder, engine="ray")
    psutil.wait_procs(processes_of(folder), timeout=5)
    assert processes_of(folder) == []
    assert not found.is_finished(cell)
    assert found.failure(cell) is None


def test_the_test_text_is_opened_once_when_all_is_finished(study, corpus, tmp_path):
    def copied(name, *without):
        return shutil.copytree(study, tmp_path / name, ignore=shutil.ignore_patterns(*without))

    opened = copied("opened")
    fitted = isoflop.fit(opened, split="test")
    assert fitted.split == "test"
    validation = isoflop.fit(opened)
    assert fitted.curves[0]["best"]["loss"] != validation.curves[0]["best"]["loss"]
    first = Study.read(study).cells[0]
    (opened / "cells" / first.name / "test.json").write_text("{}")
    assert str(isoflop.fit(opened, split="test")) == str(fitted)  # as it was written down
    with pytest.raises(ValueError, match=r"the test text of the study in '.*opened' has been opened: choose another"):
        plan(opened, corpus, seeds=2)

    assert isoflop.fit(copied("sealed", "*.safetensors"), split="test") == fitted  # what cells have sealed is enough
    assert isoflop.fit(copied("unsealed", "test.json"), split="test") == fitted  # and without it their weights are
    gone = copied("gone", "*.safetensors")
    (gone / "cells" / first.name / "test.json").unlink()
    assert isoflop.fit(gone, split="test").left_out == [
        {"cell": first.name, "reason": "it has no loss on the test text, and its weights are gone"}
    ]
    killed = copied("killed", "test.json")  # before it was written
    isoflop.run(killed)
    assert (killed / "cells" / first.name / "test.json").exists()
    damaged = copied("damaged")
    (damaged / "cells" / first.name / "test.json").write_text("{}")
    assert isoflop.fit(damaged, split="test") == fitted  # its weights are there
    lost = copied("lost", "*.safetensors")
    (lost / "cells" / first.name / "test.json").write_text("[]")
    assert [entry["cell"] for entry in isoflop.fit(lost, split="test").left_out] == [first.name]
    plan(killed, corpus, seeds=2)
    with pytest.raises(ValueError, match="2 cells are not finished: the test text is opened once"):
        isoflop.fit(killed, split="test")


def test_a_run_on_another_text_does_not_count(study, tmp_path):
    copy = shutil.copytree(study, tmp_path / "copy")
    cell = Study.read(copy).cells[0]
    path = copy / "cells" / cell.name / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "corpus_digest": "other"}))
    assert isoflop.fit(copy).left_out == [
        {"cell": cell.name, "reason": "it was trained on another text than the study's"}
    ]


def test_a_study_is_run_by_one_process_at_a_time(study):
    with FileLock(study / ".running.lock"), pytest.raises(ValueError, match="another process is running the study in"):
        isoflop.run(study)
