"""Checkpoints: how they are named, what one holds, how it is written and read, and when it is whole.

```
checkpoint-100/
    state/               weights and optimizer state: safetensors, written by torch's distributed checkpoints
    config.json          the model's config, from which the model is built again
    scheduler.pt         the state of the learning-rate schedule
    rng_state.pth        random states, one file for each process
    trainer_state.json   the step, and what else transformers' Trainer counts
    complete.json        the digests of the files above, and how long the run's logs were; written last
```
"""

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from mixdepth.files import read_json, write_json, writing
from mixdepth.runs.digests import difference, digests_of
from mixdepth.runs.layout import CHECKPOINT_PREFIX, COMPLETE, LOGS

STATE_FOLDER = "state"
SCHEDULER = "scheduler.pt"
TRAINER_STATE = "trainer_state.json"
"""The name that transformers' Trainer gives this file."""
NUM_KEPT = 2
"""How many checkpoints are kept: the newest, and one to fall back to."""
NUM_SHOWN = 100
"""How many characters of another library's error are shown."""


# Names


def checkpoint_at(folder: Path, step: int) -> Path:
    """Return the folder of a run's checkpoint at this step."""
    return folder / f"{CHECKPOINT_PREFIX}{step}"


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix(CHECKPOINT_PREFIX))


def is_complete(checkpoint: Path) -> bool:
    """Say whether a checkpoint was written to its end."""
    return (checkpoint / COMPLETE).is_file()


def complete_checkpoints(folder: Path) -> list[Path]:
    """List the complete checkpoints in a run's folder, oldest first."""
    return [checkpoint for checkpoint in _all_checkpoints(folder) if is_complete(checkpoint)]


def _all_checkpoints(folder: Path) -> list[Path]:
    """List all checkpoints in a run's folder, oldest first. Folders with other names are left alone."""
    checkpoints = []
    for path in folder.glob(f"{CHECKPOINT_PREFIX}*"):
        if path.name.removeprefix(CHECKPOINT_PREFIX).isdecimal():
            checkpoints.append(path)
    return sorted(checkpoints, key=step_of)


# Validity


def damage(checkpoint: Path) -> str | None:
    """Say what is wrong with the files of a checkpoint; None if they are as they were written."""
    try:
        marker = read_json(checkpoint / COMPLETE, keys=("files", *LOGS))
        for name in LOGS:
            if (checkpoint.parent / name).stat().st_size < marker[name]:
                return f"{name} is shorter than it was"
    except (OSError, ValueError, TypeError) as error:
        return str(error)
    problem = difference(checkpoint, marker["files"])
    if problem is not None:
        return problem
    for file in sorted((checkpoint / STATE_FOLDER).glob("*")):
        name = file.relative_to(checkpoint).as_posix()
        if name not in marker["files"]:
            return f"{name} was added"
    return None


def newest_checkpoint(folder: Path) -> tuple[Path | None, list[str]]:
    """Find the newest checkpoint that is whole, and write a sentence for each newer one that is damaged."""
    sentences: list[str] = []
    for checkpoint in reversed(complete_checkpoints(folder)):
        problem = damage(checkpoint)
        if problem is None:
            return checkpoint, sentences
        sentences.append(f"{checkpoint.name} is damaged ({problem})")
    return None, sentences


def check_step(checkpoint: Path, num_steps: int) -> None:
    """Refuse to resume from a checkpoint that does not belong to a run of this many steps."""
    # transformers' trainer modules are slow to import, and only training comes here
    from transformers.trainer_callback import TrainerState

    step = step_of(checkpoint)
    if step > num_steps:
        raise ValueError(
            f"{checkpoint.name!r} is beyond the {num_steps} steps of this run: delete it, and give the same command "
            "again"
        )
    with reading(checkpoint / TRAINER_STATE) as path:
        recorded_step = TrainerState.load_from_json(str(path)).global_step
        if recorded_step != step:
            raise ValueError(f"it says step {recorded_step!r}")


@contextmanager
def reading(path: Path) -> Iterator[Path]:
    """Turn whatever goes wrong in reading a file of a checkpoint into one sentence."""
    try:
        yield path
    except Exception as error:  # each reader raises its own kinds
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"{str(path)!r} cannot be read ({lines[0][:NUM_SHOWN]}): delete {path.parent.name!r} and give the same "
            "command again, which resumes from the checkpoint before it"
        ) from error


# Writing and removing


@contextmanager
def writing_checkpoint(checkpoint: Path) -> Iterator[None]:
    """Turn an error in writing a checkpoint into one sentence, and remove what was written of it."""
    try:
        with writing(checkpoint):
            yield
    except OSError:
        if not is_complete(checkpoint):
            shutil.rmtree(checkpoint, ignore_errors=True)  # a full disk needs the room
        raise


def mark_complete(checkpoint: Path) -> None:
    """Write the marker of a checkpoint once its files are all there, and remove old checkpoints."""
    # 1. Digests of the files, and the lengths of the logs, once both are on the disk.
    paths = [path for path in checkpoint.rglob("*") if path.is_file()]
    marker: dict[str, Any] = {"files": digests_of(checkpoint, paths)}
    for name in LOGS:
        with open(checkpoint.parent / name, "rb") as file:
            os.fsync(file.fileno())
            marker[name] = file.seek(0, os.SEEK_END)
    write_json(checkpoint / COMPLETE, marker)

    # 2. Old checkpoints lose their marker first: a folder that is half deleted must not count.
    for old in complete_checkpoints(checkpoint.parent)[:-NUM_KEPT]:
        (old / COMPLETE).unlink()
        shutil.rmtree(old)


def go_back_to(folder: Path, checkpoint: Path | None) -> None:
    """Remove what a run wrote after the checkpoint, or after its start if there is none.

    The logs are cut, and unfinished checkpoints are deleted. Later checkpoints are set aside as `damaged-checkpoint-N`.
    """
    # 1. Cut the logs to the lengths that they had.
    marker = {}
    if checkpoint is not None:
        marker = read_json(checkpoint / COMPLETE)
    for name in LOGS:
        path = folder / name
        path.touch()
        os.truncate(path, marker.get(name, 0))

    # 2. Clear away checkpoints that are not finished, or are later than this one.
    for path in _all_checkpoints(folder):
        if not is_complete(path):
            shutil.rmtree(path)
        elif checkpoint is None or step_of(path) > step_of(checkpoint):
            aside = folder / f"damaged-{path.name}"
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


# Weights and optimizer state


def write_training_state(checkpoint: Path, model: Any, optimizer: Any) -> None:
    """Write weights and optimizer state, whole or sharded; all processes call it together."""
    tensors, _ = _training_tensors(model, optimizer)
    writer = HuggingFaceStorageWriter(str(checkpoint / STATE_FOLDER), save_distributed=True)
    with warnings.catch_warnings(action="ignore"):  # it warns if there is one process only
        save(tensors, storage_writer=writer)


def read_training_state(checkpoint: Path, model: Any, optimizer: Any) -> None:
    """Fill a model and its optimizer from a checkpoint that any number of processes has written."""
    # 1. Fill tensors of the right shapes.
    tensors, optimizer_state = _training_tensors(model, optimizer)
    _read_tensors(checkpoint, tensors)

    # 2. Give them to the optimizer's state and to the model.
    for name, states in optimizer_state["state"].items():
        for key in states:
            states[key] = tensors[f"optimizer.{name}.{key}"]
    weights = {}
    for name, tensor in tensors.items():
        if name.startswith("model."):
            weights[name.removeprefix("model.")] = tensor
    options = StateDictOptions(strict=False)  # a weight that is tied to another is stored once
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=optimizer_state, options=options)


def read_weights(checkpoint: Path, model: Any) -> None:
    """Fill a model with the weights of a checkpoint, without the optimizer's state."""
    _read_tensors(checkpoint, _model_tensors(model, get_model_state_dict(model)))


def write_schedule(checkpoint: Path, scheduler: Any) -> None:
    """Write the state of the learning-rate schedule."""
    torch.save(scheduler.state_dict(), checkpoint / SCHEDULER)


def read_schedule(checkpoint: Path, scheduler: Any) -> None:
    """Set a learning-rate schedule to the state that a checkpoint holds."""
    with reading(checkpoint / SCHEDULER) as path:
        scheduler.load_state_dict(torch.load(path, weights_only=True))


def own_names(model: Any) -> set[str]:
    """Return the names of all parameters and buffers; of tied ones only the first."""
    names = {name for name, _ in model.named_parameters()}
    return names | {name for name, _ in model.named_buffers()}


def _model_tensors(model: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """Return the weights under the names that they have in a checkpoint."""
    names = own_names(model)
    return {f"model.{name}": tensor for name, tensor in weights.items() if name in names}


def _training_tensors(model: Any, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return all tensors of model and optimizer under flat names, and the optimizer's state that holds the latter."""
    weights, optimizer_state = get_state_dict(model, optimizer)
    tensors = _model_tensors(model, weights)
    states: Any = optimizer_state["state"]
    for name, state in states.items():
        for key, value in state.items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors, optimizer_state


def _read_tensors(checkpoint: Path, tensors: dict[str, Any]) -> None:
    """Fill these tensors in place from a checkpoint's state."""
    reader = HuggingFaceStorageReader(str(checkpoint / STATE_FOLDER))
    with warnings.catch_warnings(action="ignore"):
        load(tensors, storage_reader=reader)
