"""Checks that a model's folder has what its config.json asks for, before anything is built.

A folder may be damaged, or come from a stranger.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from mixdepth.files import is_inside, read_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
NUMBERS_OF_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
"""The names that architectures have for their number of layers."""
KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
"""Settings that may name a repository of the hub: transformers would fetch code from it."""
INTEGER_TYPES = ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64")
COPY_AGAIN = "copy or save the model again"


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What weights files hold, according to their headers."""

    tensors: int
    numbers: int
    has_integers: bool
    """Whether some tensors are integers, as quantised weights are."""


def check_config(name: str, config: Mapping[str, Any], files: Sequence[Path]) -> None:
    """Refuse a config.json that would fetch code, or that does not fit the weights files.

    A name of the hub has no files here yet, and its sizes are not compared.
    """
    _check_kernels(name, config)
    if not files:
        return
    contents = contents_of(files)
    _check_sizes(name, config, contents)
    quantised = config.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
    if method == "bitsandbytes" and not contents.has_integers:
        raise ValueError(
            f"{name!r} is damaged: its config.json says that {method} has quantised the weights, and they are plain "
            "numbers; take quantization_config out of it"
        )


def _check_kernels(name: str, config: Mapping[str, Any]) -> None:
    """Refuse a config.json that names a kernel of the hub."""
    for key, value in _settings(config):
        if key not in KERNELS:
            continue
        for word in _words(value):
            if "/" in word:
                raise ValueError(
                    f"config.json of {name!r} says {key}={word!r}, and no kernel is fetched: take it out of there"
                )


def _check_sizes(name: str, config: Mapping[str, Any], contents: Contents) -> None:
    """Refuse a config.json with more layers or labels than the weights can have."""
    for key, value in _settings(config):
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if key in NUMBERS_OF_LAYERS and value > contents.tensors:
            size = f"{contents.tensors:,} tensors"
        elif key == "num_labels" and value > contents.numbers:
            size = f"{contents.numbers:,} numbers"
        else:
            continue
        raise ValueError(f"{name!r} is damaged: its config.json says {key}={value}, and its weights are {size}")


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors that transformers reads in a folder. An index that leads out of the folder is refused."""
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
    """Return what these files hold. Only their headers are read."""
    tensors = 0
    numbers = 0
    has_integers = False
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (it is not a mapping)
                tensor = file.get_slice(name)
                tensors += 1
                numbers += math.prod(tensor.get_shape())
                has_integers |= tensor.get_dtype() in INTEGER_TYPES
    return Contents(tensors=tensors, numbers=numbers, has_integers=has_integers)


def _settings(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield all settings of a config, and those of its parts."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield key, value
            yield from _settings(value)


def _words(value: Any) -> Iterator[str]:
    """Yield the words in a setting, which may be one word, or one for each part of the model."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _words(part)
