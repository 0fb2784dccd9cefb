"""Verbs that show and measure: page, plot, bench, demo."""

from pathlib import Path
from typing import Any

from mixdepth.cli.flags import add_routing_settings, add_shape, add_verb, routing_settings, split
from mixdepth.text import parse_value, tell


def add_verbs(verbs: Any, *, shows_all: bool) -> None:
    _add_page(verbs)
    _add_plot(verbs)
    _add_bench(verbs, shows_all)
    _add_demo(verbs)


def _add_page(verbs: Any) -> None:
    page = add_verb(
        verbs,
        "page",
        summary="show which layers process each token of a text, on one HTML page",
        description="Route a text and write one HTML file that needs no server and no network. It shows the text, with "
        "each token shaded by the number of routed layers that processed it; the map of layers and tokens; the scores, "
        "gates and surprise of each token; causal routing, look-ahead, and where the two differ.",
        example='mixdepth page runs/mod --text "def fibonacci(n):" --out page.html',
    )
    page.add_argument("model", metavar="MODEL", help="Run, checkpoint, folder or hub name of a routed model.")
    page.add_argument("--text", metavar="TEXT", help="Text to route. (default: held-out text of the run)")
    page.add_argument("--file", metavar="FILE", help="File with the text, in place of --text.")
    page.add_argument("--context", type=int, metavar="N", help="Tokens in a window. (default: as in training)")
    page.add_argument("--out", default="page.html", metavar="FILE", help="File to write. (default: %(default)s)")
    page.set_defaults(run=_page)


def _page(model: str, text: str | None, file: str | None, context: int | None, out: str) -> None:
    from mixdepth.evaluation.tracing import trace
    from mixdepth.report.page import check_path, write_page

    if text is not None and file is not None:
        raise ValueError(f"give --text or --file, not both: leave out --file {file}")
    if file is not None:
        text = _read_text(file)
    check_path(out)
    traced = trace(model, text, context=context)
    if traced.note:
        tell(traced.note)
    print(write_page(traced, out))


def _read_text(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file!r} is not text in UTF-8 ({error.reason}): give another --file") from error


def _add_plot(verbs: Any) -> None:
    plot = add_verb(
        verbs,
        "plot",
        summary="draw training curves and routing of runs, or loss against speed",
        description="Draw runs from their logs, finished or not, as PNG and SVG: loss against steps, FLOPs and time, "
        "and for each routed run what its layers do. A JSON file is drawn as loss against speed. It is a list of rows "
        "with name, loss, tokens_per_second, and optionally low and high (of the speed) and group.",
        example="mixdepth plot runs/mod runs/dense --out plots",
    )
    plot.add_argument("names", nargs="+", metavar="RUN", help="Folders of runs, or one JSON file.")
    plot.add_argument("--out", required=True, metavar="FOLDER", help="Folder for the pictures.")
    plot.add_argument(
        "--reference",
        metavar="NAME",
        help="Row of a JSON file from which lines at 3 %% more loss and 1.25 times the speed are drawn.",
    )
    plot.set_defaults(run=_plot)


def _plot(**options: Any) -> None:
    from mixdepth.report.plots import plot

    for path in plot(**options):
        print(path)


def _add_bench(verbs: Any, shows_all: bool) -> None:
    bench = add_verb(
        verbs,
        "bench",
        summary="time a routed model against a dense one on this machine",
        usage="mixdepth bench [MODEL] [settings]",
        description="Time training, prefill and decoding of a routed model against the same model unrouted, count the "
        "bytes of their caches, and print each speed-up next to what FLOPs and bytes allow. A plain model is routed "
        "with the settings below and calibrated. Without a model, a Llama of the given shape runs on random tokens.",
        example="mixdepth bench --layers 8 --width 512 --capacity 0.125",
        has_help_all=True,
    )
    bench.add_argument("model", nargs="?", metavar="MODEL", help="Run, checkpoint, folder or hub name, or smollm2.")
    bench.add_argument("--corpus", metavar="TEXT", help="Text of the prompts. (default: the run's own, or stdlib)")
    bench.add_argument(
        "--batch-sizes",
        type=parse_value,
        default="1,8",
        metavar="N,N,...",
        help="Rows in prefill and decoding. (default: 1,8)",
    )
    bench.add_argument(
        "--prompts",
        type=parse_value,
        metavar="N,N,...",
        help="Lengths of the prompts. (default: 16,1000, or up to the model's longest)",
    )
    bench.add_argument(
        "--new-tokens", type=int, default=64, metavar="N", help="Tokens after each prompt. (default: %(default)s)"
    )
    bench.add_argument(
        "--train-batch-size",
        type=int,
        default=4,
        metavar="N",
        help="Windows in a training step; 0 leaves training out. (default: %(default)s)",
    )
    bench.add_argument(
        "--train-context",
        type=int,
        metavar="N",
        help="Tokens in a training window. (default: 512, or the model's longest)",
    )
    bench.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="Repeats of each timing. (default: %(default)s)"
    )
    bench.add_argument("--json", metavar="FILE", help="Write the numbers to this file; `-` prints them instead.")
    add_shape(bench.add_argument_group("shape, in place of a model"))
    add_routing_settings(bench.add_argument_group("routing"), shows_all=shows_all)
    bench.set_defaults(run=_bench)


def _bench(model: str | None, corpus: str | None, json: str | None, **options: Any) -> None:
    from mixdepth.bench import fresh_pair, measure_speed, pair_of
    from mixdepth.cli.output import check_file, print_numbers

    # 1. Turn the options into settings of the shape, of the routing and of the measurement.
    check_file(json)
    routing = routing_settings(options)
    shape_options = split(options, "shape_")
    shape = {name: value for name, value in shape_options.items() if value is not None}
    for name in ("batch_sizes", "prompts"):
        if not isinstance(options[name], tuple | None):
            options[name] = (options[name],)

    # 2. Make the pair of models to compare.
    if model is None and corpus is not None:
        raise ValueError(f"--corpus {corpus} has no meaning without a model: a fresh one runs on random tokens")
    if model is not None and shape:
        name = next(iter(shape))
        raise ValueError(f"{name} has no meaning next to a model, which has its own shape: leave it out")
    if model is None:
        pair = fresh_pair(shape, routing)
    else:
        pair = pair_of(model, routing, corpus)

    # 3. Measure, print and write.
    speeds = measure_speed(pair.dense, pair.routed, pair.text, notes=pair.notes, **options)
    print_numbers(str(speeds), speeds.to_dict(), json)


def _add_demo(verbs: Any) -> None:
    demo = add_verb(
        verbs,
        "demo",
        summary="train dense and routed models with the same FLOPs and compare them",
        description="Train three models with the same FLOPs on the source of the Python standard library: a routed "
        "model, the same model unrouted, and a dense one that costs as much for each token. Evaluate them causally, "
        "time a training step and decoding, measure the caches, and write report.html. Nothing is downloaded. This "
        "takes about five minutes on two cores. The same command resumes a stopped demo.",
    )
    demo.add_argument("--out", default="demo", metavar="FOLDER", help="Folder for all files. (default: %(default)s)")
    demo.add_argument(
        "--flops", type=float, default=2.5e12, metavar="X", help="Training FLOPs of each model. (default: %(default)g)"
    )
    demo.add_argument(
        "--capacity",
        type=float,
        default=0.125,
        metavar="X",
        help="Share of the tokens that a routed layer processes. (default: %(default)s)",
    )
    demo.add_argument(
        "--every", type=int, default=2, metavar="N", help="Route every n-th layer. (default: %(default)s)"
    )
    demo.add_argument(
        "--seed", type=int, default=0, metavar="N", help="Random seed of weights and data. (default: %(default)s)"
    )
    demo.set_defaults(run=_demo)


def _demo(**options: Any) -> None:
    from mixdepth.demo import steps

    steps.run(**options)
