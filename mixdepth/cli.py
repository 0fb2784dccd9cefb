"""The command line: verbs to functions; what a verb needs is imported by the verb."""

import argparse
import ast
import inspect
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

from mixdepth.config import DepthConfig

FLAGS = {"layers": "--routed-layers"}
"""Flags that are not called after their setting: `--layers` is how many there are."""
SHAPE = {
    "layers": "how many (default: 8)",
    "width": "a multiple of 32 (default: 256)",
    "vocab_size": "(default: 256, bytes)",
    "num_experts": "of a Mixtral; 0 is a Llama (default: 0)",
    "experts_per_token": "(default: 2)",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="mixdepth", description="Mixture-of-Depths transformers on PyTorch and Hugging Face."
    )
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    verbs = parser.add_subparsers(dest="verb", metavar="verb")
    _add_demo(verbs)
    _add_flops(verbs)
    options = vars(parser.parse_args(arguments))
    if options.pop("version"):
        from mixdepth import __version__

        print(f"mixdepth {__version__}")
        return 0
    if options.pop("verb") is None:
        parser.print_help()
        return 2
    run = options.pop("run")
    try:
        run(**options)
    except (ValueError, OSError) as error:
        print(f"mixdepth: {error}", file=sys.stderr)
        return 2
    return 0


def _add_demo(verbs: Any) -> None:
    demo = verbs.add_parser(
        "demo",
        help="train a small routed model for a minute and sample from it",
        description="Routes a small Llama, trains it on the Python standard library's source (nothing is "
        "downloaded), and prints its held-out loss, the realised capacity and a sample.",
    )
    demo.add_argument("--steps", type=int, default=800, help="how long to train (default: %(default)s, about a minute)")
    demo.add_argument(
        "--capacity", type=float, default=0.125, help="share of tokens per routed layer (default: %(default)s)"
    )
    demo.add_argument("--every", type=int, default=2, help="route every n-th layer (default: %(default)s)")
    demo.add_argument("--seed", type=int, default=0, help="of weights, data and sample (default: %(default)s)")
    demo.set_defaults(run=_demo)


def _demo(**options: Any) -> None:
    from mixdepth import demo

    demo.run(**options)


def _add_flops(verbs: Any) -> None:
    flops = verbs.add_parser(
        "flops",
        help="count the FLOPs of a forward pass, layer by layer",
        description="Counts the FLOPs of a forward pass over one sequence, layer by layer, and compares with the "
        "dense model. The model is a folder's, of which only config.json is read, or a Llama of the given "
        "shape. A folder that is not routed, and a shape, are routed by the settings below.",
        epilog="example: mixdepth flops --layers 8 --width 256 --tokens 2048 --capacity 0.125",
    )
    flops.add_argument("folder", nargs="?", help="a model's folder, dense or routed")
    flops.add_argument("--tokens", type=int, default=2048, help="length of the sequence (default: %(default)s)")
    shape = flops.add_argument_group("shape, in place of a folder")
    for name, about in SHAPE.items():
        shape.add_argument(f"--{name.replace('_', '-')}", dest=f"shape_{name}", type=int, help=about)
    _add_settings(flops.add_argument_group("routing (any of these; without one the model is left as it is)"))
    flops.set_defaults(run=_flops)


def _flops(tokens: int, folder: str | None, **options: Any) -> None:
    from mixdepth import flops

    shape = {name: options.pop(f"shape_{name}") for name in SHAPE}
    layers = options.get("layers")
    if "layers" in options and not isinstance(layers, tuple):
        options["layers"] = () if layers is None else (layers,)
    flops.report(tokens, folder, shape, settings=options)


def _add_settings(group: Any) -> None:
    """One flag for each field of DepthConfig, with its docstring for help; flags not given are left out."""
    source = ast.parse(textwrap.dedent(inspect.getsource(DepthConfig))).body[0]
    assert isinstance(source, ast.ClassDef)
    about = {}
    for line, after in zip(source.body, source.body[1:], strict=False):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and isinstance(after, ast.Expr):
            about[line.target.id] = ast.literal_eval(after.value)
    for field in fields(DepthConfig):
        default = "" if field.default in (None, MISSING) else f" (default: {field.default})"
        text = " ".join(about[field.name].split()).replace("%", "%%") + default
        flag = FLAGS.get(field.name, f"--{field.name.replace('_', '-')}")
        group.add_argument(flag, dest=field.name, type=_value, default=argparse.SUPPRESS, help=text)


def _value(text: str) -> object:
    """A number, a word, a list as in 0.5,0.25, or `none`. DepthConfig says what is wrong with it."""
    if "," in text:
        return tuple(_value(part) for part in text.split(",") if part)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return None if text == "none" else text
