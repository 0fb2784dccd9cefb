"""Files that mixdepth 0.1.0 wrote are read, and a run that it began is resumed.

`written_by_0.1.0.tar.gz` holds a text, a finished run of 4 steps on it with its checkpoint after 2, and a conversion.
It was written at commit a5d9746.
"""

import json
import tarfile
from pathlib import Path

import pytest
from corpora import refusal

import mixdepth
from mixdepth.conversion.converting import Conversion
from mixdepth.runs.run import Run
from mixdepth.version import commit, how_to_install

ARCHIVE = Path(__file__).with_name("written_by_0.1.0.tar.gz")


@pytest.fixture
def old(tmp_path):
    """The old files in a folder, with the place of the text set right in the run's settings."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    edit(tmp_path / "run", corpus=str(tmp_path / "text.txt"))
    return tmp_path


def edit(run, **settings):
    about = json.loads((run / "run.json").read_text())
    about["settings"] |= settings
    (run / "run.json").write_text(json.dumps(about))


def test_an_old_run_says_what_it_was(old):
    run = Run(old / "run")
    assert run.about["versions"]["mixdepth"] == "0.1.0"
    assert run.settings.depth.capacity == 0.25
    assert run.result["validation_loss"] == run.metrics[-1]["validation_loss"]


def test_the_text_of_an_old_run_is_the_one_that_it_was_trained_on(old):
    assert len(Run(old / "run").corpus().validation.tokens) > 16


def test_an_old_finished_run_is_not_trained_again(old):
    run = Run(old / "run")
    before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    mixdepth.train(run.folder, run.settings)
    assert {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()} == before


def test_the_model_of_an_old_run_has_the_loss_that_was_recorded(old):
    (entry,) = mixdepth.evaluate_runs([str(old / "run")], windows=4).entries
    assert entry.note == ""
    assert entry.evaluation.loss == pytest.approx(Run(old / "run").result["validation_loss"], rel=1e-6)


def test_an_old_checkpoint_is_resumed_and_ends_where_it_ended(old):
    run = Run(old / "run")
    expected_lines = run.metrics
    expected_result = run.result
    (run.folder / "result.json").unlink()
    mixdepth.train(run.folder, run.settings)
    for line, expected in zip(run.metrics, expected_lines, strict=True):
        assert line.keys() == expected.keys()
    *before_checkpoint, last, _ = run.metrics
    assert before_checkpoint == expected_lines[:2]
    assert last["loss"] == pytest.approx(expected_lines[2]["loss"], rel=1e-5)
    assert run.result.keys() == expected_result.keys()
    assert run.result["validation_loss"] == pytest.approx(expected_result["validation_loss"], rel=1e-5)


def test_an_old_conversion_is_tuned(old):
    assert Conversion.read(old / "converted").depth.capacity == 0.5
    settings = {"corpus": str(old / "text.txt"), "steps": 2, "context": 16, "batch_size": 2, "eval_windows": 4}
    run = mixdepth.tune(old / "converted", old / "tuned", **settings, calibrate=0)
    assert mixdepth.load(str(run.folder)).model.depth_config.capacity == 0.5


def test_a_run_of_other_defaults_is_refused_with_the_version_to_install(old):
    about = json.loads((old / "run" / "run.json").read_text())
    (old / "run" / "run.json").write_text(json.dumps(about | {"heads": 4}))
    settings = ["--layers", "2", "--width", "16", "--context", "16", "--batch-size", "2", "--steps", "4"]
    settings += ["--log-every", "2", "--save-every", "2", "--eval-windows", "4", "--learning-rate", "4e-3"]
    corpus = str(old / "text.txt")
    message = refusal("train", *settings, "--capacity", "0.25", "--corpus", corpus, "--out", str(old / "run"))
    assert "holds a run of mixdepth 0.1.0, in which heads was 4, not 1" in message
    assert "install that version (pip install mixdepth==0.1.0), or choose another --out" in message


def test_a_run_that_has_recorded_its_commit_names_it():
    versions = {"mixdepth": "0.2.0", "commit": "4bdb977"}
    assert "git checkout 4bdb977" in how_to_install(versions)


def test_a_new_run_records_the_version_and_the_commit(finished):
    versions = Run(finished / "mod").about["versions"]
    assert versions["mixdepth"] == mixdepth.__version__
    assert versions.get("commit") == commit()


def test_a_conversion_records_the_version_and_the_commit(finished, tmp_path):
    mixdepth.convert(finished / "dense", tmp_path / "mod", mixdepth.DepthConfig(capacity=0.5, gate="unit"))
    versions = json.loads((tmp_path / "mod" / "conversion.json").read_text())["versions"]
    assert versions["mixdepth"] == mixdepth.__version__
    assert versions.get("commit") == commit()
