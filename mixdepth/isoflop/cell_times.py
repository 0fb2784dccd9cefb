"""The time that a cell of a study is expected to take."""

import statistics
import time

import torch

from mixdepth.data.corpus import Corpus
from mixdepth.hf.model import RoutedCausalLM
from mixdepth.isoflop.study import Cell
from mixdepth.machine import one_thread
from mixdepth.models.fresh import make_model
from mixdepth.modes import update_routers
from mixdepth.runs.settings import TrainConfig

NUM_WARMUP_STEPS = 2
"""The first steps, which are slower and are not counted."""


def seconds_per_step(config: TrainConfig, vocab_size: int, repeats: int = 5) -> float:
    """Time a training step on one core, or on the accelerator, without compilation: the median of a few."""
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator() or device
    model = make_model(config, vocab_size).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.randint(vocab_size, (config.batch_size, config.context), device=device)  # (B, T)
    times = []
    with one_thread():
        for _ in range(repeats + NUM_WARMUP_STEPS):
            start = time.perf_counter()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            # Thresholds move after each step of a routed model.
            if isinstance(model, RoutedCausalLM):
                update_routers(model)
            loss.item()  # waits for the device
            times.append(time.perf_counter() - start)
    return statistics.median(times[NUM_WARMUP_STEPS:])


def steps_of_evaluation(cell: Cell, corpus: Corpus) -> float:
    """Express the cost of the evaluation at the end in training steps.

    It is a forward pass over both held-out texts. A routed model is evaluated with look-ahead too.
    """
    num_windows = 0
    for side in (corpus.validation, corpus.test):
        windows = side.windows(cell.settings["context"]).spread(cell.settings["eval_windows"])
        num_windows += len(windows)
    num_passes = 1 if cell.settings["depth"] is None else 2
    batch_size: int = cell.settings["batch_size"]
    return num_windows * num_passes / (3 * batch_size)  # a training step costs three passes of its batch
