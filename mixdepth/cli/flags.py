"""Flags of settings: one for each field of a dataclass, with its docstring for help."""

import argparse
import ast
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from types import MappingProxyType
from typing import Any

from mixdepth.text import parse_value

ROUTING_FLAGS = {"layers": "--routed-layers", "seed": "--routing-seed"}
"""Routing settings whose flags have other names: `--layers` is how many there are, `--seed` is the run's."""

SHAPE = {
    "layers": "how many (default: 8)",
    "width": "a multiple of 16 (default: 256)",
    "vocab_size": "(default: 256, bytes)",
    "num_experts": "of a Mixtral; 0 is a Llama (default: 0)",
    "experts_per_token": "(default: 2)",
}
"""Of a fresh model."""


def routing_settings(options: dict[str, Any]) -> dict[str, Any]:
    """Routing settings as given by flags: a single layer, or none, is a list too."""
    layers = options.get("layers")
    if "layers" in options and not isinstance(layers, tuple):
        options["layers"] = () if layers is None else (layers,)
    return options


def split(options: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Take the options whose names begin with the prefix."""
    return {name.removeprefix(prefix): options.pop(name) for name in [*options] if name.startswith(prefix)}


def flag_of(name: str, flags: Mapping[str, str]) -> str:
    """The flag of a setting: its own name, unless `flags` has another."""
    return flags.get(name, f"--{name.replace('_', '-')}")


def add_settings(
    group: Any,
    settings: type,
    flags: Mapping[str, str] = MappingProxyType({}),
    without: Sequence[str] = (),
    prefix: str = "",
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """One flag for each field of a dataclass, with its docstring for help; flags not given are left out."""
    source = ast.parse(textwrap.dedent(inspect.getsource(settings))).body[0]
    assert isinstance(source, ast.ClassDef)
    about = {}
    for line, after in zip(source.body, source.body[1:], strict=False):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and isinstance(after, ast.Expr):
            about[line.target.id] = ast.literal_eval(after.value)
    for field in fields(settings):
        if field.name in without:
            continue
        text = " ".join(about[field.name].split()).replace("%", "%%")
        options: dict[str, Any] = {"dest": prefix + field.name, "default": argparse.SUPPRESS, "help": text}
        if field.type is bool:
            options["action"] = "store_true"
        else:
            options["type"] = str if field.type in (str, str | None) else parse_value
            options["metavar"] = field.name.upper()
            default = defaults.get(field.name, field.default)
            if default not in (None, MISSING, ()):
                options["help"] += f" (default: {default})"
        group.add_argument(flag_of(field.name, flags), **options)


def add_shape(group: Any) -> None:
    """Flags for the shape of a fresh model."""
    for name, about in SHAPE.items():
        group.add_argument(f"--{name.replace('_', '-')}", dest=f"shape_{name}", type=int, help=about)
