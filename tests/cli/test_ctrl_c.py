"""Ctrl-C ends a command at any moment with one sentence and exit code 130."""

import signal
import subprocess
import sys
import time

import pytest

SENTENCE = "mixdepth: stopped; finished work is kept\n"


def start_process(*arguments):
    """Start the command line in a process of its own, which hears Ctrl-C even if this one does not."""
    return subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "mixdepth", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def read_until(process, module):
    """Read what the process says about its imports, until it has imported this module."""
    for line in process.stderr:
        if line.startswith("import time:") and line.split("|")[-1].strip() == module:
            return
    raise AssertionError(f"{module} was not imported")


@pytest.mark.parametrize("module", ["argparse", "torch._C", "torch.nn.modules.linear", "transformers.utils.logging"])
def test_ctrl_c_during_imports_ends_with_one_sentence(tmp_path, module):
    process = start_process("train", "--steps", "9", "--out", str(tmp_path / "run"))
    read_until(process, module)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    sentences = [line for line in said.splitlines(keepends=True) if not line.startswith("import time:")]
    assert sentences == [SENTENCE]
    assert process.returncode == 130


def test_a_second_ctrl_c_changes_nothing(tmp_path):
    process = start_process("train", "--steps", "9", "--out", str(tmp_path / "run"))
    read_until(process, "torch._C")
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    _, said = process.communicate(timeout=60)
    assert "Traceback" not in said
    assert process.returncode == 130
