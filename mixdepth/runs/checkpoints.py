"""Checkpoints: what one holds, how it is read, and when it is whole."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState

from mixdepth.runs.run import step_of

STATE_FOLDER = "state"


def check_checkpoint(checkpoint: Path, num_steps: int) -> None:
    """Refuse to go on from a checkpoint that does not belong to a run of so many steps."""
    step = step_of(checkpoint)
    if step > num_steps:
        raise ValueError(
            f"{checkpoint.name!r} is beyond the {num_steps} steps of this run: delete it, and the same command goes on"
        )
    with reading(checkpoint / TRAINER_STATE_NAME) as path:
        said = TrainerState.load_from_json(str(path)).global_step
        if said != step:
            raise ValueError(f"it says step {said!r}")


@contextmanager
def reading(path: Path) -> Iterator[Path]:
    """Whatever goes wrong in reading a file of a checkpoint, in one sentence."""
    try:
        yield path
    except Exception as error:  # each reader raises its own kinds
        lines = str(error).strip().splitlines() or [type(error).__name__]
        way_out = f"delete {path.parent.name!r}, and the same command goes on"
        raise ValueError(f"{str(path)!r} cannot be read ({lines[0][:100]}): {way_out}") from error


def model_tensors(model: Any, weights: dict[str, Any]) -> dict[str, Any]:
    own = own_names(model)
    return {f"model.{name}": tensor for name, tensor in weights.items() if name in own}


def own_names(model: Any) -> set[str]:
    """The names of all weights and buffers, of tied ones the first alone."""
    return {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}


def load_state(checkpoint: str | Path, tensors: dict[str, Any]) -> None:
    """Fill the tensors, whole or sharded, from a checkpoint that any number of processes has written."""
    reader = HuggingFaceStorageReader(str(Path(checkpoint) / STATE_FOLDER))
    with warnings.catch_warnings(action="ignore"):
        load(tensors, storage_reader=reader)
