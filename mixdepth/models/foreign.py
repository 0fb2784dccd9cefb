"""What a model's folder asks for, held against what it has, before anything is built: a folder may be damaged, or be
somebody else's."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from mixdepth.files import is_inside, read_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
NUMBERS_OF_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
"""What architectures call it."""
KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
"""Settings whose value may be a repository of the hub, from which transformers would fetch code."""
WHOLE_NUMBERS = ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64")
COPY_AGAIN = "copy or save the model again"


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What weights files hold, by their headers."""

    tensors: int
    numbers: int
    has_whole_numbers: bool


def check_config(name: str, config: Mapping[str, Any], files: Sequence[Path]) -> None:
    """Refuse a config.json that the weights files cannot fit, or that would fetch code.

    Without files (of a name of the hub they are not here yet) the sizes are not looked at.
    """
    settings = list(_settings(config))
    for key, value in settings:
        if key in KERNELS:
            for word in _words(value):
                if "/" in word:
                    raise ValueError(
                        f"config.json of {name!r} says {key}={word!r}, and no kernel is fetched: take it out of there"
                    )
    if not files:
        return
    contents = contents_of(files)
    for key, value in settings:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if is_number and key in NUMBERS_OF_LAYERS and value > contents.tensors:
            held = f"{contents.tensors:,} tensors"
        elif is_number and key == "num_labels" and value > contents.numbers:
            held = f"{contents.numbers:,} numbers"
        else:
            continue
        raise ValueError(f"{name!r} is damaged: its config.json says {key}={value}, and its weights are {held}")
    quantised = config.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
    if method == "bitsandbytes" and not contents.has_whole_numbers:
        raise ValueError(
            f"{name!r} is damaged: its config.json says that {method} has quantised the weights, and they are plain "
            "numbers; take quantization_config out of it"
        )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors that transformers reads in a folder; an index that leads out of it is refused."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    index = folder / INDEX
    if not index.is_file():
        return []
    places = read_json(index, ("weight_map",), COPY_AGAIN)["weight_map"]
    if not isinstance(places, dict):
        raise ValueError(f"{str(index)!r} is damaged (its weight_map is {places!r}): {COPY_AGAIN}")
    for place in places.values():
        if not is_inside(place):
            raise ValueError(
                f"{str(index)!r} names the weights file {place!r}, which is not in the folder: {COPY_AGAIN}"
            )
    return [folder / place for place in sorted(set(places.values())) if (folder / place).is_file()]


def contents_of(files: Sequence[Path]) -> Contents:
    """What these files hold. Their headers are read, and none of the numbers."""
    tensors, numbers, has_whole_numbers = 0, 0, False
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (it is no mapping)
                tensor = file.get_slice(name)
                number = 1
                for size in tensor.get_shape():
                    number *= size
                tensors += 1
                numbers += number
                has_whole_numbers |= tensor.get_dtype() in WHOLE_NUMBERS
    return Contents(tensors=tensors, numbers=numbers, has_whole_numbers=has_whole_numbers)


def _settings(config: Any) -> Iterator[tuple[str, Any]]:
    """All settings of a config, those of its parts too."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield key, value
            yield from _settings(value)


def _words(value: Any) -> Iterator[str]:
    """The words in a setting, which may be one or one for each part of the model."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _words(part)
