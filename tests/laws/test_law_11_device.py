"""Law 11: a training step mixes no devices and reads nothing on the host; evaluation reads once for each choice."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import routed, token_ids
from torch.overrides import TorchFunctionMode
from variants import ALL_VARIANTS, VARIANTS

import mixdepth

TESTS = Path(__file__).parents[1]
PACKAGE = str(Path(mixdepth.__file__).parent)
READS = ("item", "tolist", "nonzero", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
"""Methods of a tensor that wait for its values."""


@pytest.fixture(scope="module")
def problems():
    """What goes wrong in a training step of each variant on a pretend accelerator; None where nothing does."""
    command = [sys.executable, str(TESTS / "accelerator.py"), *ALL_VARIANTS]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("variant", ALL_VARIANTS)
def test_a_training_step_stays_on_the_device(variant, problems):
    assert problems[variant] is None


class HostReads(TorchFunctionMode):
    """Notes which methods of tensors the package itself calls to read them on the host."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        caller = sys._getframe(1)
        name = getattr(function, "__name__", "")
        if name in READS and caller.f_code.co_filename.startswith(PACKAGE):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("variant", VARIANTS)
def test_evaluation_reads_once_for_each_layer_that_decides(variant):
    model = routed(dtype=torch.float32, **VARIANTS[variant])
    ids = token_ids()
    cache = model(ids[:, :10], use_cache=True).past_key_values
    with HostReads() as reads:
        model(ids[:, 10:], past_key_values=cache)
    assert reads.names == ["tolist"] * len(model.deciding_layers)
