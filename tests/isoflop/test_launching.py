"""A study is run, and its test text is opened."""

import json
import os
import shutil
import signal
import time
from pathlib import Path
from threading import Event, Thread

import psutil
import pytest
from corpora import call, plan, start, without_records
from filelock import FileLock

from mixdepth import DepthConfig, TrainConfig, isoflop, train
from mixdepth.isoflop import Study
from mixdepth.isoflop import launching as runner
from mixdepth.isoflop.launching import LocalEngine, _reason
from mixdepth.isoflop.results import LeftOut
from mixdepth.runs.checkpoints import complete_checkpoints
from mixdepth.runs.run import Run
from mixdepth.training.job import train_on


def processes_of(folder):
    """Those that run a cell of the study."""
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if {"--cell", str(folder)} <= set(process.info["cmdline"] or ())]


def once_begun(run, act):
    """Act when a run has its first checkpoint, whatever this thread does meanwhile."""

    def wait():
        while not run.folder.is_dir() or not complete_checkpoints(run.folder):
            time.sleep(0.05)
        act()

    Thread(target=wait, daemon=True).start()


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
    assert "holds 'letter.txt' and no run.json" in found.failure(blocked).message
    assert found.failure(diverged).kind == "diverged"
    assert [found.failure(cell) for cell in finished] == [None, None]
    assert [entry.cell for entry in isoflop.fit(folder).left_out] == [blocked.name, diverged.name]
    with pytest.raises(ValueError, match="1 cells are not finished: the test text is opened once"):
        isoflop.fit(folder, split="test")
    assert in_the_way.read_text() == "mine"
    in_the_way.unlink()
    logs = [found.next_to(cell, "log").stat().st_size for cell in found.cells]
    isoflop.run(folder)
    assert found.failure(blocked) is None
    grown = [found.next_to(cell, "log").stat().st_size > size for cell, size in zip(found.cells, logs, strict=True)]
    assert grown == [False, False, True, False]
    assert [entry.cell for entry in isoflop.fit(folder, split="test").left_out] == [diverged.name]


def test_folders_of_other_runs_and_damaged_files_are_said_and_the_other_cells_go_on(study, tmp_path, corpus):
    folder = without_records(study, tmp_path / "study")
    found = plan(folder, corpus, seeds=[0, 7])
    dense, mod, half, again = (folder / "cells" / cell.name for cell in found.cells)
    shutil.rmtree(mod)
    shutil.copytree(dense, mod)
    (dense / "result.json").write_text('{"validation_loss": 3.')
    half.mkdir()
    (half / "run.json").write_text("{}")
    found.next_to(found.cells[3], "failed.json").write_text("{}")
    assert f"{again}.failed.json' is damaged (it has no 'kind')" in found.failure(found.cells[3]).message
    before = {path: path.read_bytes() for run in (dense, mod, half) for path in run.rglob("*.*") if path.is_file()}
    ran = call("isoflop", "run", str(folder), "--workers", "2")
    assert ran.returncode == 2
    assert "1 of 4 runs are finished" in ran.stdout
    assert "3 of 4 cells failed; each says why" in ran.stderr.splitlines()[-1]
    written = [json.loads(found.next_to(cell, "failed.json").read_text())["message"] for cell in found.cells[:3]]
    assert f"{dense}/result.json' is damaged" in written[0]
    assert f"{mod}' holds a run of a dense model" in written[1]
    assert f"{half}/run.json' is damaged" in written[2]
    assert {path: path.read_bytes() for path in before} == before
    told = [written[0], "its result is that of a run with other settings", written[2]]
    names = [cell.name for cell in found.cells[:3]]
    assert isoflop.fit(folder).left_out == [
        LeftOut(cell=name, reason=reason) for name, reason in zip(names, told, strict=True)
    ]


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("result.json", "[]", "result.json' is damaged (it is [], not an object)"),
        ("result.json", "{}", "result.json' is damaged (it has no 'validation_loss')"),
        ("result.json", "", "result.json' is damaged (Expecting value"),
        ("run.json", "[]", "run.json' is damaged (it is [], not an object)"),
        ("run.json", None, "is not the folder of a run: it has no run.json"),
        ("run.json", {"seed": 1}, "its result is that of a run with other settings"),
        ("run.json", {"depth": DepthConfig().to_dict()}, "its result is that of a run with other settings"),
        ("run.json", {"layers": "two"}, "layers must be a whole number of at least 1, not 'two'"),
    ],
)
def test_a_result_counts_as_the_cell_s_own_alone(file, content, reason, study, tmp_path):
    folder = without_records(study, tmp_path / "study")
    found = Study.read(folder)
    path = folder / "cells" / found.cells[0].name / file
    about = json.loads(path.read_text())
    path.unlink()
    if isinstance(content, dict):
        path.write_text(json.dumps({**about, "settings": {**about["settings"], **content}}))
    elif content is not None:
        path.write_text(content)
    assert reason in found.failure(found.cells[0]).message
    assert (found.is_finished(found.cells[0]), found.is_settled(found.cells[0])) == (False, False)
    assert (found.is_finished(found.cells[1]), found.failure(found.cells[1])) == (True, None)
    (left_out,) = isoflop.fit(folder).left_out
    assert left_out.cell == found.cells[0].name
    assert reason in left_out.reason


@pytest.mark.parametrize("name", ["bytes", "tuned"])
def test_the_cells_of_our_own_studies_count(name):
    found = Study.read(Path(__file__).parents[2] / "studies" / name)
    assert len(found.records) == len(found.cells) == 72
    assert [found.failure(cell) for cell in found.cells] == [None] * 72


def test_how_a_run_was_computed_is_no_other_setting(study, tmp_path):
    folder = without_records(study, tmp_path / "study")
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
    failed = found.next_to(cell, "failed.json")
    assert json.loads(failed.read_text()) == {"kind": "error", "message": str(raised.value)}
    in_the_way.unlink()

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "train_on", stop)
    with pytest.raises(KeyboardInterrupt):
        isoflop.run(folder, cell=cell.name)
    assert not failed.exists()  # to be stopped is no failure

    def overtake(*given):
        failed.write_text('{"reason": "another process is training"}')  # a second one came, and found this one
        return train_on(*given)

    monkeypatch.setattr(runner, "train_on", overtake)
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
    while not run.folder.is_dir() or not complete_checkpoints(run.folder):
        assert process.is_alive()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # no process is left
    assert run.result is None
    ran = call("isoflop", "run", str(folder))
    assert ran.returncode == 0, ran.stderr
    assert "resuming from checkpoint" in (run.folder.parent / "seed0.log").read_text()
    assert run.result is not None


def test_a_cell_whose_process_is_ended_has_failed(tmp_path, corpus, capsys):
    folder = tmp_path / "study"
    found = plan(folder, corpus, budgets=[1e10], variants=["dense"], save_every=20)
    (cell,) = found.cells
    once_begun(found.run_of(cell), lambda: [process.terminate() for process in processes_of(folder)])
    isoflop.run(folder)
    assert found.failure(cell) == ("error", "its process was ended by SIGTERM")
    assert not found.is_finished(cell)
    said = capsys.readouterr().err
    assert "failed: its process was ended by SIGTERM" in said
    assert "1 of 1 runs, 1 failed" in said
    assert "study: 100%" not in said


def test_a_cell_that_is_just_beginning_is_stopped_too(tmp_path, corpus):
    found = plan(tmp_path / "study", corpus, budgets=[1e10], variants=["dense"])
    with LocalEngine(found, 1) as engine:
        engine.start(found.cells[0])
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


def test_a_cell_that_dies_of_anything_says_why(tmp_path, corpus, monkeypatch):
    def run_out_of_memory(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(runner, "train_on", run_out_of_memory)
    found = plan(tmp_path / "study", corpus, variants=["dense"])
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        isoflop.run(found.folder, cell=found.cells[0].name)
    assert found.failure(found.cells[0]) == ("error", "DefaultCPUAllocator: can't allocate memory")


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
    assert "'nowhere' is not a study: it has no study.json" in found.failure(lost).message
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


@pytest.fixture
def copied(study, tmp_path):
    """A function that copies the folders of the study without some files."""

    def copy(name, *without):
        return without_records(study, tmp_path / name, *without)

    return copy


@pytest.fixture
def opened(copied):
    """The study with its test text opened, and the fit."""
    folder = copied("opened")
    return folder, isoflop.fit(folder, split="test")


def sealed_file(folder):
    """The test.json of the first cell."""
    return folder / "cells" / Study.read(folder).cells[0].name / "test.json"


def test_the_test_text_gives_other_losses(opened):
    folder, fitted = opened
    validation = isoflop.fit(folder)
    assert fitted.split == "test"
    for dense, mod in (fitted.curves, validation.curves):
        assert (len(dense.best.capacities), len(mod.best.capacities)) == (0, 2)
    assert fitted.curves[0].best.loss != validation.curves[0].best.loss


def test_the_test_text_is_opened_once(opened):
    folder, fitted = opened
    sealed_file(folder).write_text("{}")
    again = isoflop.fit(folder, split="test")  # as it was written down
    assert again == fitted
    assert str(again) == str(fitted)


def test_a_study_whose_test_text_was_opened_takes_no_cells(opened, corpus):
    folder, _ = opened
    with pytest.raises(ValueError, match=r"the test text of the study in '.*opened' has been opened: choose another"):
        plan(folder, corpus, seeds=2)


def test_the_test_text_is_not_opened_before_all_cells_are_finished(copied, corpus):
    folder = copied("unfinished")
    plan(folder, corpus, seeds=2)
    with pytest.raises(ValueError, match="2 cells are not finished: the test text is opened once"):
        isoflop.fit(folder, split="test")


def test_sealed_losses_are_enough_without_weights(opened, copied):
    assert isoflop.fit(copied("sealed", "*.safetensors"), split="test") == opened[1]


def test_weights_are_enough_without_sealed_losses(opened, copied):
    assert isoflop.fit(copied("unsealed", "test.json"), split="test") == opened[1]


def test_damaged_sealed_losses_are_measured_again_while_the_weights_are_there(opened, copied):
    folder = copied("damaged")
    sealed_file(folder).write_text("{}")
    assert isoflop.fit(folder, split="test") == opened[1]


@pytest.mark.parametrize("content", [None, "[]"])
def test_a_cell_without_sealed_losses_and_weights_is_left_out(content, copied):
    folder = copied("gone", "*.safetensors")
    sealed_file(folder).unlink()
    if content is not None:
        sealed_file(folder).write_text(content)
    reason = "it has no loss on the test text, and its weights are gone"
    first = Study.read(folder).cells[0]
    assert isoflop.fit(folder, split="test").left_out == [LeftOut(cell=first.name, reason=reason)]


def test_a_run_that_was_killed_before_it_was_sealed_is_sealed_later(copied):
    folder = copied("killed", "test.json")
    isoflop.run(folder)
    assert sealed_file(folder).exists()


def test_a_run_on_another_text_does_not_count(study, tmp_path):
    copy = without_records(study, tmp_path / "copy")
    cell = Study.read(copy).cells[0]
    path = copy / "cells" / cell.name / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "corpus_digest": "other"}))
    assert isoflop.fit(copy).left_out == [
        LeftOut(cell=cell.name, reason="it was trained on another text than the study's")
    ]


def test_a_study_is_run_by_one_process_at_a_time(study):
    with FileLock(study / ".running.lock"), pytest.raises(ValueError, match="another process is running the study in"):
        isoflop.run(study)
