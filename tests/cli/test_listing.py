"""`mixdepth env` lists what there is, without importing torch."""

import platform
import subprocess
import sys

import torch
from corpora import call

import mixdepth
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
