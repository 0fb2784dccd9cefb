"""`mixdepth env` and `mixdepth runs` list what there is, without importing torch."""

import json
import platform
import subprocess
import sys

import pytest
import torch
from corpora import call

import mixdepth
from mixdepth import TrainConfig
from mixdepth.cli.environment import is_installed
from mixdepth.version import commit


def test_env_says_what_a_report_of_a_bug_needs():
    process = call("env")
    assert process.returncode == 0
    lines = process.stdout.splitlines()
    values = dict(line.split(maxsplit=1) for line in lines)
    assert values["mixdepth"].startswith(mixdepth.__version__)
    assert commit() is None or commit() in values["mixdepth"]
    assert values["Python"].startswith(platform.python_version())
    assert values["torch"] == torch.__version__
    assert values["device"].startswith("cuda" if torch.cuda.is_available() else "cpu")
    assert "OMP_NUM_THREADS" in values["threads"]
    assert lines[-1] == "tested on CPU only; CUDA should work and has never been tried"


def test_an_extra_is_installed_with_all_that_it_needs(monkeypatch):
    monkeypatch.setattr("mixdepth.cli.environment.requires", lambda _: ["torch", "no_such_package; extra == 'study'"])
    assert is_installed("plots")
    assert not is_installed("study")


def test_env_imports_no_torch_that_is_built_for_the_cpu():
    code = "import sys; from mixdepth.cli import main; main(['env']); print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    is_for_cpu = torch.__version__.endswith("+cpu")
    assert answer.stdout.splitlines()[-1] == str(not is_for_cpu)


@pytest.fixture
def folder(tmp_path):
    """A folder with a finished run, an unfinished one and two damaged ones."""
    about = {"settings": TrainConfig(steps=400).to_dict(), "steps": 400, "flops": 2e12}
    dense = {**about, "settings": {**about["settings"], "depth": None}}
    result = {"step": 400, "validation_loss": 1.54421, "flops": 2e12}
    write(tmp_path / "a" / "run.json", json.dumps(about))
    write(tmp_path / "a" / "result.json", json.dumps(result))
    write(tmp_path / "b" / "run.json", json.dumps(dense))
    write(tmp_path / "b" / "checkpoint-100" / "complete.json", "{}")
    write(tmp_path / "b" / "checkpoint-200" / "model.safetensors", "half of it")
    write(tmp_path / "c" / "run.json", "{")
    write(tmp_path / "d" / "run.json", json.dumps(about))
    write(tmp_path / "d" / "result.json", "[]")
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_runs_are_listed_with_their_state(folder):
    process = call("runs", str(folder))
    assert process.returncode == 0, process.stderr
    header, *rows = process.stdout.splitlines()
    assert header.split() == ["run", "kind", "step", "held-out", "loss", "FLOPs", "state"]
    assert [row.split() for row in rows] == [
        [f"{folder}/a", "routed", "400", "of", "400", "1.5442", "2e12", "finished"],
        [f"{folder}/b", "dense", "100", "of", "400", "-", "5e11", "unfinished"],
        [f"{folder}/c", "-", "-", "-", "-", "damaged"],
        [f"{folder}/d", "-", "-", "-", "-", "damaged"],
    ]


def test_a_folder_without_runs_is_refused(tmp_path):
    assert "holds no run" in call("runs", str(tmp_path)).stderr
    assert "is not a folder" in call("runs", str(tmp_path / "none")).stderr


def test_runs_are_listed_without_torch(folder):
    code = f"import sys; from mixdepth.cli import main; main(['runs', {str(folder)!r}]); print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines()[-1] == "False"
