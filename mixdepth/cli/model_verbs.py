"""Verbs that use models: eval, generate, serve, flops."""

import argparse
import sys
from typing import Any

from mixdepth.cli.flags import (
    ROUTING_FLAGS,
    add_routing_settings,
    add_settings,
    add_shape,
    add_verb,
    flag_of,
    routing_settings,
    split,
)
from mixdepth.sampling.server_limits import Limits

A_MODEL = "Run, checkpoint, folder or hub name."
A_MODEL_OR_SMOLLM2 = "Run, checkpoint, folder or hub name, or smollm2."


def add_verbs(verbs: Any, *, shows_all: bool) -> None:
    _add_eval(verbs)
    _add_generate(verbs)
    _add_serve(verbs)
    _add_flops(verbs, shows_all)


def _add_eval(verbs: Any) -> None:
    evaluation = add_verb(
        verbs,
        "eval",
        summary="compare models on held-out text",
        usage="mixdepth eval MODEL [MODEL ...] [options]",
        description="Evaluate models on the same held-out text, with causal routing and with look-ahead, and print "
        "them next to each other. Differences have 95 % intervals over windows.",
        example="mixdepth eval runs/mod runs/dense",
    )
    evaluation.add_argument("names", nargs="+", metavar="MODEL", help=A_MODEL)
    evaluation.add_argument(
        "--corpus", metavar="TEXT", help="Another text than the one of the runs; its held-out part is used."
    )
    evaluation.add_argument(
        "--text-field", default="text", metavar="TEXT", help="Field of the text in JSONL, parquet and datasets."
    )
    evaluation.add_argument("--context", type=int, metavar="N", help="Tokens in a window. (default: as in training)")
    evaluation.add_argument("--windows", type=int, metavar="N", help="Number of windows, evenly spaced. (default: all)")
    evaluation.add_argument(
        "--split",
        default="validation",
        metavar="{validation,test}",
        help="Held-out part: `test` is what a run with --test has set aside. (default: %(default)s)",
    )
    evaluation.add_argument(
        "--batch-size", type=int, default=16, metavar="N", help="Windows in one forward pass. (default: %(default)s)"
    )
    evaluation.add_argument(
        "--tasks", nargs="+", metavar="TASK", help="Evaluate on these tasks of lm_eval instead: YAML files or names."
    )
    evaluation.add_argument("--limit", type=int, metavar="N", help="Examples of each task. (default: all)")
    evaluation.add_argument("--json", metavar="FILE", help="Write the numbers to this file; `-` prints them instead.")
    evaluation.set_defaults(run=_eval)


def _eval(names: list[str], json: str | None, tasks: list[str] | None, limit: int | None, **options: Any) -> None:
    from mixdepth.cli.output import check_file, print_numbers

    # A file that cannot be written is refused before anything is computed.
    check_file(json)

    # Tasks of lm_eval bring their own text.
    if tasks:
        from mixdepth.evaluation.tasks import evaluate_tasks, table

        for name in ("corpus", "context", "windows"):
            if options[name] is not None:
                raise ValueError(f"tasks bring their own text: leave out --tasks or --{name} {options[name]}")
        results = evaluate_tasks(names, tasks, limit=limit, batch_size=options["batch_size"])
        print_numbers(table(results), results, json)
        return

    # Without tasks, models are compared on held-out text.
    from mixdepth.evaluation.comparison import evaluate_runs

    if limit is not None:
        raise ValueError("--limit is for --tasks: give --windows for a text")
    comparison = evaluate_runs(names, **options)
    print_numbers(str(comparison), comparison.to_dict(), json)


def _add_generate(verbs: Any) -> None:
    generate = add_verb(
        verbs,
        "generate",
        summary="continue a text",
        usage="mixdepth generate MODEL PROMPT [PROMPT ...] [options]",
        description="Continue one text, printed as it is sampled, or several texts in one batch. Routing is causal. "
        "The sampling options are those of transformers' generate().",
        example='mixdepth generate runs/mod "def fibonacci(n):" --temperature 0.8',
    )
    generate.add_argument("model", metavar="MODEL", help=A_MODEL)
    generate.add_argument("prompts", nargs="+", metavar="PROMPT", help="Text to continue.")
    generate.add_argument(
        "--max-new-tokens", type=int, default=200, metavar="N", help="Most tokens to sample. (default: %(default)s)"
    )
    generate.add_argument("--greedy", action="store_true", help="Take the most likely token in place of sampling.")
    # Options of transformers' generate(), which are left out unless they are given.
    sampling_options: tuple[tuple[str, type, str], ...] = (
        ("temperature", float, "Below 1 favours likely tokens. (default: the model's setting)"),
        ("top-k", int, "Sample from the k most likely tokens."),
        ("top-p", float, "Sample from the most likely tokens that make up this share."),
        ("min-p", float, "Leave out tokens below this share of the most likely one."),
        ("repetition-penalty", float, "Above 1 discourages repetition."),
        ("num-beams", int, "Number of beams in a beam search."),
    )
    for name, kind, description in sampling_options:
        metavar = "N" if kind is int else "X"
        generate.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS, metavar=metavar, help=description)
    generate.add_argument(
        "--seed", type=int, default=0, metavar="N", help="Random seed of the samples. (default: %(default)s)"
    )
    generate.add_argument(
        "--show-routes", action="store_true", help="Colour each token by the number of routed layers that processed it."
    )
    generate.add_argument("--page", metavar="FILE", help="Write the routing page of the first text.")
    generate.set_defaults(run=_generate)


def _generate(
    model: str, prompts: list[str], greedy: bool, show_routes: bool, page: str | None, **options: Any
) -> None:
    from mixdepth import generate, load
    from mixdepth.sampling.generation import legend

    # 1. Load the model, and refuse a page that could not be written.
    loaded = load(model)
    if loaded.note:
        print(f"mixdepth: {loaded.note}", file=sys.stderr)
    if page is not None:
        from mixdepth.evaluation.tracing import check_routed, trace_tokens
        from mixdepth.report.page import check_path, write_page

        check_path(page)
        check_routed(loaded.model, model)

    # 2. Sample. The first text is streamed, unless it is coloured afterwards or searched for with beams.
    has_beams = options.get("num_beams", 1) != 1
    is_streamed = not show_routes and not has_beams
    texts = generate(
        loaded.model,
        prompts,
        tokenizer=loaded.tokenizer,
        show_routes=show_routes,
        do_sample=not greedy,
        stream=_print_piece if is_streamed else None,
        **options,
    )

    # 3. Print the texts that have not been streamed.
    if show_routes:
        print(legend(texts[0].num_routed))
    texts_to_print = texts[1:] if is_streamed else texts
    for text in texts_to_print:
        if len(texts) > 1:
            print("---")
        print(text.colour() if show_routes else text.prompt + text.completion)

    # 4. Write the routing page of the first text, as one window.
    if page is not None:
        first = texts[0]
        trace = trace_tokens(
            loaded.model,
            first.tokens,
            loaded.tokenizer,
            context=len(first.tokens),
            num_given=first.num_given,
            name=model,
            note=loaded.note,
        )
        print(write_page(trace, page))


def _print_piece(text: str) -> None:
    print(text, end="", flush=True)


def _add_serve(verbs: Any) -> None:
    serve = add_verb(
        verbs,
        "serve",
        summary="serve a model to clients of OpenAI's interface",
        usage="mixdepth serve MODEL [options]",
        description="Serve a model, routed or plain, with transformers' own server: /v1/completions, "
        "/v1/chat/completions, /v1/responses, and streams. Requests are answered one after the other.",
        example="mixdepth serve models/smollm2-mod-tuned --port 8000",
    )
    serve.add_argument("model", metavar="MODEL", help=A_MODEL_OR_SMOLLM2)
    serve.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="TEXT",
        help="Address to listen on. (default: %(default)s, this machine only)",
    )
    serve.add_argument("--port", type=int, default=8000, metavar="N", help="(default: %(default)s)")
    serve.add_argument(
        "--continuous-batching",
        action="store_true",
        help="Answer several requests in one batch. Plain models only: routed models cannot.",
    )
    serve.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="Another name or address by which clients may call this server, for example behind a proxy. It may be "
        "given several times; `*` allows all. (default: this machine, and --host)",
    )
    limits = serve.add_argument_group("limits for one client")
    add_settings(limits, Limits, prefix="limits_")
    serve.set_defaults(run=_serve)


def _serve(model: str, **options: Any) -> None:
    limits = Limits(**split(options, "limits_"))  # a wrong limit is refused before anything heavy is imported
    from mixdepth.sampling.server import serve

    serve(model, limits=limits, **options)


def _add_flops(verbs: Any, shows_all: bool) -> None:
    flops = add_verb(
        verbs,
        "flops",
        summary="count the FLOPs of a forward pass, layer by layer",
        usage="mixdepth flops [FOLDER] [settings]",
        description="Count the FLOPs of a forward pass over one sequence, layer by layer, and compare them with the "
        "dense model's. The model is a folder's, of which only config.json is read, or a Llama of the given shape. "
        "A model that is not routed is routed with the settings below.",
        example="mixdepth flops --layers 8 --width 256 --tokens 2048 --capacity 0.125",
        has_help_all=True,
    )
    flops.add_argument("folder", nargs="?", metavar="FOLDER", help="Folder of a model, dense or routed.")
    flops.add_argument(
        "--tokens", type=int, default=2048, metavar="N", help="Length of the sequence. (default: %(default)s)"
    )
    add_shape(flops.add_argument_group("shape, in place of a folder"))
    routing = flops.add_argument_group("routing (without any of these the model is left as it is)")
    add_routing_settings(routing, shows_all=shows_all)
    flops.set_defaults(run=_flops)


def _flops(tokens: int, folder: str | None, **options: Any) -> None:
    from mixdepth.models.flops import flops_report

    shape = split(options, "shape_")
    settings = routing_settings(options)
    flags = [flag_of(name, ROUTING_FLAGS) for name in settings]
    print(flops_report(tokens, folder, shape, settings, flags))
