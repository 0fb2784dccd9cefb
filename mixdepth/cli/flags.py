"""Flags of the command line that are made from the fields of a settings dataclass.

One field becomes one flag, and the docstring of the field is its help.
`--help` shows the common settings with the first sentence; `--help-all` shows all settings with the whole docstring.
"""

import argparse
import ast
import functools
import inspect
import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

from mixdepth.config import EXPERT_KEYWORDS, DepthConfig, ExpertConfig
from mixdepth.runs.settings import TrainConfig
from mixdepth.text import parse_value

ROUTING_FLAGS = {"layers": "--routed-layers", "seed": "--routing-seed"}
"""Routing settings whose flags have other names, because `--layers` and `--seed` are settings of the run."""

RUN_GROUPS: dict[str, tuple[str, ...]] = {
    "model": (
        "layers",
        "width",
        "heads",
        "shape",
        "num_experts",
        "experts_per_token",
        "method",
        "lora_rank",
        "distill",
    ),
    "data": ("corpus", "text_field", "tokenizer", "context", "validation", "test"),
    "budget": ("flops", "tokens", "steps", "batch_size", "micro_batch_size"),
    "optimiser": (
        "learning_rate",
        "warmup",
        "weight_decay",
        "beta2",
        "max_grad_norm",
        "router_learning_rate",
        "predictor_learning_rate",
        "routed_learning_rate",
    ),
    "routing": ("capacity_steps", "calibrate"),
    "run": (
        "seed",
        "bf16",
        "compile",
        "gradient_checkpointing",
        "engine",
        "log_every",
        "save_every",
        "eval_every",
        "eval_windows",
        "report_to",
    ),
}
"""The settings of a run in the groups in which `--help` shows them."""

COMMON_RUN_SETTINGS = frozenset(
    {
        "layers",
        "width",
        "method",
        "corpus",
        "tokenizer",
        "context",
        "flops",
        "tokens",
        "steps",
        "batch_size",
        "learning_rate",
        "seed",
        "bf16",
    }
)
"""The settings of a run that `--help` shows."""

COMMON_ROUTING_SETTINGS = frozenset({"scheme", "capacity", "every", "gate", "causal"})
"""The routing settings that `--help` shows."""

SHAPE_SETTINGS = ("layers", "width", "vocab_size", "num_experts", "experts_per_token")
SHAPE_HELP = {
    "layers": "Number of decoder layers. (default: 8)",
    "width": "Width of the model, a multiple of 16. (default: 256)",
    "vocab_size": "Number of tokens in the vocabulary. (default: 256, one for each byte)",
    "num_experts": "Number of experts of a Mixtral; 0 makes a Llama. (default: 0)",
    "experts_per_token": "Number of experts that process one token. (default: 2)",
}
"""Help for the shape of a fresh model in `mixdepth flops` and `mixdepth bench`."""

FIRST_SENTENCE = re.compile(r".+?(?<!\bEq)(?<!\bFig)\.(?=\s|$)", flags=re.DOTALL)


class HelpFormatter(argparse.HelpFormatter):
    """Formats help for the width of the terminal, with room for the names of our flags."""

    def __init__(self, prog: str) -> None:
        columns = shutil.get_terminal_size().columns
        super().__init__(prog, max_help_position=24, width=min(columns, 120) - 2)


def add_verb(
    verbs: Any,
    name: str,
    *,
    summary: str,
    description: str,
    example: str | None = None,
    usage: str | None = None,
    has_help_all: bool = False,
) -> argparse.ArgumentParser:
    """Add the parser of one verb.

    With `has_help_all` the verb has a flag `--help-all`, for settings that `--help` leaves out.
    """
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=summary,
        description=description,
        epilog=None if example is None else f"example: {example}",
        usage=usage,
        formatter_class=HelpFormatter,
    )
    if has_help_all:
        parser.add_argument("--help-all", action="help", help="show all settings, with full descriptions")
    return parser


def add_settings(
    group: Any,
    settings: type,
    *,
    names: Sequence[str] | None = None,
    common: frozenset[str] | None = None,
    flags: Mapping[str, str] = MappingProxyType({}),
    defaults: Mapping[str, Any] = MappingProxyType({}),
    prefix: str = "",
    keywords: Mapping[str, str] = MappingProxyType({}),
    shows_all: bool = False,
) -> None:
    """Add one flag for each field of a settings dataclass. Flags that are not given leave no trace in the options.

    Args:
        group: the parser or the group of flags that receives the flags.
        settings: the dataclass.
        names: the fields to add. None adds all of them.
        common: the fields that `--help` shows. None shows all of them.
        flags: the names of flags that differ from the name of their setting.
        defaults: defaults of this verb that differ from those of the dataclass. They are shown, not applied.
        prefix: a prefix for the names in the options, by which `split` finds them again.
        keywords: the names of settings that differ from the name of their field.
        shows_all: whether this is the parser for `--help-all`.
    """
    descriptions = field_descriptions(settings)
    for field in fields(settings):
        # 1. Skip fields that this verb does not have.
        if names is not None and field.name not in names:
            continue
        setting = keywords.get(field.name, field.name)
        # 2. Find out how argparse reads the value. An option that is not given stays out of the result.
        options: dict[str, Any] = {"dest": prefix + setting, "default": argparse.SUPPRESS}
        if field.type is bool:
            options["action"] = "store_true"
        else:
            is_text = field.type in (str, str | None)
            options["type"] = str if is_text else parse_value
            options["metavar"] = metavar_of(field.type)
        # 3. Describe the flag, or hide it from this help.
        is_shown = shows_all or common is None or field.name in common
        if is_shown:
            description = descriptions[field.name]
            options["help"] = _help_text(description, field, defaults, is_whole=shows_all or common is None)
        else:
            options["help"] = argparse.SUPPRESS
        group.add_argument(flag_of(setting, flags), **options)


def add_run_settings(
    parser: argparse.ArgumentParser,
    *,
    without: Sequence[str],
    defaults: Mapping[str, Any] = MappingProxyType({}),
    shows_all: bool,
) -> dict[str, Any]:
    """Add the settings of a training run in groups, and return the groups by title."""
    groups = {}
    for title, members in RUN_GROUPS.items():
        groups[title] = parser.add_argument_group(title)
        names = [name for name in members if name not in without]
        add_settings(
            groups[title],
            TrainConfig,
            names=names,
            common=COMMON_RUN_SETTINGS,
            defaults=defaults,
            shows_all=shows_all,
        )
    return groups


def add_routing_settings(
    group: Any,
    *,
    without: Sequence[str] = (),
    defaults: Mapping[str, Any] = MappingProxyType({}),
    shows_all: bool,
) -> None:
    """Add the settings of DepthConfig and its ExpertConfig. Their names in the options begin with `depth_`."""
    names = [field.name for field in fields(DepthConfig) if field.name not in (*without, "experts")]
    add_settings(
        group,
        DepthConfig,
        names=names,
        common=COMMON_ROUTING_SETTINGS,
        flags=ROUTING_FLAGS,
        defaults=defaults,
        prefix="depth_",
        shows_all=shows_all,
    )
    keyword_of = {name: keyword for keyword, name in EXPERT_KEYWORDS.items()}
    add_settings(
        group,
        ExpertConfig,
        common=COMMON_ROUTING_SETTINGS - {"scheme", "capacity"},
        prefix="depth_",
        keywords=keyword_of,
        shows_all=shows_all,
    )


def add_shape(group: Any) -> None:
    """Add flags for the shape of a fresh model. Their names in the options begin with `shape_`."""
    for name in SHAPE_SETTINGS:
        flag = flag_of(name, {})
        group.add_argument(flag, dest=f"shape_{name}", type=int, metavar="N", help=SHAPE_HELP[name])


@functools.cache
def field_descriptions(settings: type) -> Mapping[str, str]:
    """Read the docstring under each field of a dataclass from its source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(settings)))
    definition = tree.body[0]
    assert isinstance(definition, ast.ClassDef)
    descriptions = {}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        is_field = isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        if is_field and isinstance(following, ast.Expr):
            assert isinstance(statement, ast.AnnAssign)
            assert isinstance(statement.target, ast.Name)
            docstring = ast.literal_eval(following.value)
            descriptions[statement.target.id] = " ".join(docstring.split())
    return descriptions


def first_sentence(description: str) -> str:
    """Return the first sentence of a description.

    >>> first_sentence("Follows Eq. 1 of the paper. The default is raw.")
    'Follows Eq. 1 of the paper.'
    """
    match = FIRST_SENTENCE.match(description)
    return description if match is None else match.group()


def metavar_of(kind: Any) -> str:
    """Return what `--help` shows for the value of a flag: its choices, or a letter for the kind of value.

    >>> metavar_of(Literal["raw", "tanh"]), metavar_of(int | None), metavar_of(tuple[int, ...])
    ('{raw,tanh}', 'N', 'N,N,...')
    """
    # 1. A Literal, or a union with a Literal in it, has choices.
    members = (kind,) if get_origin(kind) in (Literal, tuple) else get_args(kind) or (kind,)
    for member in members:
        if get_origin(member) is Literal:
            return "{" + ",".join(get_args(member)) + "}"
    # 2. Everything else is named by its kind; a list repeats the name of its items.
    letters = {int: "N", float: "X", str: "TEXT"}
    for member in members:
        if member in letters:
            return letters[member]
        if get_origin(member) is tuple:
            letter = letters[get_args(member)[0]]
            return f"{letter},{letter},..."
    return "VALUE"


def flag_of(name: str, flags: Mapping[str, str]) -> str:
    """Return the flag of a setting: the one in `flags`, or the setting's own name with hyphens."""
    own_flag = "--" + name.replace("_", "-")
    return flags.get(name, own_flag)


def _help_text(description: str, field: Field[Any], defaults: Mapping[str, Any], *, is_whole: bool) -> str:
    """Return the help of one flag, with its default where there is one to show."""
    text = description if is_whole else first_sentence(description)
    text = text.replace("%", "%%")  # argparse fills in percent signs
    default = defaults.get(field.name, field.default)
    if field.type is bool or default in (None, MISSING, ()):
        return text
    return f"{text} (default: {default})"


def split(options: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Take the options whose names begin with this prefix out of the others, and return them without it."""
    names = [name for name in options if name.startswith(prefix)]
    return {name.removeprefix(prefix): options.pop(name) for name in names}


def routing_settings(options: dict[str, Any]) -> dict[str, Any]:
    """Take the routing settings out of the options. A single layer, or `none`, becomes a list of layers."""
    settings = split(options, "depth_")
    if "layers" not in settings:
        return settings
    layers = settings["layers"]
    if layers is None:
        settings["layers"] = ()
    elif not isinstance(layers, tuple):
        settings["layers"] = (layers,)
    return settings
