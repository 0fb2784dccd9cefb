"""The seed of a run: it draws the weights, and the order in which training sees its windows."""

import pytest
import torch
from corpora import TINY

import mixdepth
from mixdepth.training.trainer import DepthTrainer


@pytest.fixture
def windows_of(corpus, tmp_path, monkeypatch):
    """A function from a seed to the windows that a run with it saw, in order."""
    seen = []
    step = DepthTrainer.training_step

    def watch(trainer, model, inputs, *args, **kwargs):
        seen.append(inputs["input_ids"].clone())
        return step(trainer, model, inputs, *args, **kwargs)

    monkeypatch.setattr(DepthTrainer, "training_step", watch)

    def run(seed):
        seen.clear()
        folder = tmp_path / f"{seed}-{len(list(tmp_path.iterdir()))}"
        mixdepth.train(folder, **TINY, corpus=corpus, steps=5, seed=seed, depth=None)
        return torch.cat(seen)  # (steps * batch_size, T)

    return run


def test_another_seed_shows_a_run_its_windows_in_another_order(windows_of):
    assert not torch.equal(windows_of(1), windows_of(2))


def test_the_same_seed_shows_a_run_its_windows_in_the_same_order(windows_of):
    assert torch.equal(windows_of(1), windows_of(1))
