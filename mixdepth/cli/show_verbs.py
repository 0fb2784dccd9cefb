"""Verbs that show and measure."""

from typing import Any

from mixdepth.cli.flags import ROUTING_FLAGS, add_settings, add_shape, routing_settings, split
from mixdepth.config import DepthConfig
from mixdepth.text import parse_value


def _add_plot(verbs: Any) -> None:
    plot = verbs.add_parser(
        "plot",
        help="draw training curves and routing of runs, or loss against speed",
        description="Draws runs from what they have logged, finished or not, as PNG and SVG: loss against steps, FLOPs "
        "and time, side by side, and for each routed run what its layers do. Of a JSON file, a list of rows with "
        "name, loss, tokens_per_second and perhaps low, high (of the speed) and group, it draws loss against speed.",
        epilog="example: mixdepth plot runs/mod runs/dense --out plots",
    )
    plot.add_argument("names", nargs="+", metavar="RUN", help="folders of runs, or one JSON file")
    plot.add_argument("--out", required=True, help="the folder for the files")
    plot.add_argument(
        "--reference", help="of a JSON file, the row for lines at 3 %% more loss and 1.25 times the speed"
    )
    plot.set_defaults(run=_plot)


def _plot(**options: Any) -> None:
    from mixdepth.report.plots import plot

    for path in plot(**options):
        print(path)


def _add_demo(verbs: Any) -> None:
    demo = verbs.add_parser(
        "demo",
        help="train dense and routed models with the same FLOPs and compare them",
        description="Trains a routed model, the same model unrouted, and a dense one that costs as much for each "
        "token, on the Python standard library's source with the same FLOPs (nothing is downloaded); evaluates them "
        "causally, times a training step and decoding, weighs the caches, and writes report.html. It takes about five "
        "minutes on two cores. What is done is kept: the same command goes on.",
    )
    demo.add_argument("--out", default="demo", help="the folder of all that it makes (default: %(default)s)")
    demo.add_argument("--flops", type=float, default=2.5e12, help="training FLOPs of each model (default: %(default)g)")
    demo.add_argument(
        "--capacity", type=float, default=0.125, help="share of tokens per routed layer (default: %(default)s)"
    )
    demo.add_argument("--every", type=int, default=2, help="route every n-th layer (default: %(default)s)")
    demo.add_argument("--seed", type=int, default=0, help="of weights and data (default: %(default)s)")
    demo.set_defaults(run=_demo)


def _demo(**options: Any) -> None:
    from mixdepth.demo import steps as demo

    demo.run(**options)


def _add_page(verbs: Any) -> None:
    page = verbs.add_parser(
        "page",
        help="show where each token of a text goes, on one HTML page",
        description="Routes a text and writes one HTML file that needs no server and no network: the text, every token "
        "shaded by the routed layers that it went through; the map of layers and tokens; scores, gates and surprise of "
        "each token; causal routing, look-ahead, and where the two differ.",
        epilog='example: mixdepth page runs/mod --text "def fibonacci(n):" --out page.html',
    )
    page.add_argument("model", help="a run, a checkpoint, a folder, or a name of the hub; it must be routed")
    page.add_argument("--text", help="the text (default: some that the run has held out)")
    page.add_argument("--file", help="or a file with the text")
    page.add_argument("--context", type=int, help="tokens in a window (default: as in training)")
    page.add_argument("--out", default="page.html", help="the page (default: %(default)s)")
    page.set_defaults(run=_page)


def _page(model: str, text: str | None, file: str | None, context: int | None, out: str) -> None:
    from pathlib import Path

    from mixdepth.evaluation.tracing import trace
    from mixdepth.report.page import check_path, write_page
    from mixdepth.text import tell

    if text is not None and file is not None:
        raise ValueError(f"give --text or --file, not both: leave out --file {file}")
    if file is not None:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file!r} is not text in UTF-8 ({error.reason}): give another --file") from error
    check_path(out)
    traced = trace(model, text, context=context)
    if traced.note:
        tell(traced.note)
    print(write_page(traced, out))


def _add_bench(verbs: Any) -> None:
    bench = verbs.add_parser(
        "bench",
        help="time a routed model against a dense one on this machine",
        description="Times training, prefill and decoding of a routed model against the same model unrouted, counts "
        "the bytes of their caches, and prints beside each speed-up what FLOPs and bytes allow. A routed model is "
        "unrouted for it, a plain one is routed by the settings below and calibrated. Without a model: a Llama of "
        "the given shape over random tokens.",
        epilog="example: mixdepth bench --layers 8 --width 512 --capacity 0.125",
    )
    bench.add_argument("model", nargs="?", help="a run, a checkpoint, a folder, a name of the hub, or smollm2")
    bench.add_argument("--corpus", help="the text of prompts (default: the run's own, or stdlib)")
    for name, default, about in (
        ("batch-sizes", "1,8", "rows in prefill and decoding (default: 1,8)"),
        ("prompts", None, "their lengths (default: 16,1000, or as long as the model takes)"),
    ):
        bench.add_argument(f"--{name}", type=parse_value, default=default, help=about)
    bench.add_argument("--new-tokens", type=int, default=64, help="after each prompt (default: %(default)s)")
    bench.add_argument(
        "--train-batch-size", type=int, default=4, help="windows in a training step; 0 is none (default: %(default)s)"
    )
    bench.add_argument("--train-context", type=int, help="tokens in a window (default: 512, or what the model takes)")
    bench.add_argument("--repeats", type=int, default=5, help="of which the median is taken (default: %(default)s)")
    bench.add_argument("--json", metavar="FILE", help="write the numbers to this file too; - prints them instead")
    add_shape(bench.add_argument_group("shape, in place of a model"))
    add_settings(bench.add_argument_group("routing"), DepthConfig, ROUTING_FLAGS, prefix="depth_")
    bench.set_defaults(run=_bench)


def _bench(model: str | None, corpus: str | None, json: str | None, **options: Any) -> None:
    from mixdepth.bench import fresh_pair, measure_speed, pair_of
    from mixdepth.cli.output import check_file, tell_numbers

    check_file(json)
    routing = routing_settings(split(options, "depth_"))
    shape = {name: value for name, value in split(options, "shape_").items() if value is not None}
    for name in ("batch_sizes", "prompts"):
        if not isinstance(options[name], tuple | None):
            options[name] = (options[name],)
    if model is None:
        if corpus is not None:
            raise ValueError(f"--corpus {corpus} has no meaning without a model: a fresh one runs on random tokens")
        pair = fresh_pair(shape, routing)
    elif shape:
        raise ValueError(f"{next(iter(shape))} has no meaning beside a model, which has its own shape: leave it out")
    else:
        pair = pair_of(model, routing, corpus)
    found = measure_speed(pair.dense, pair.routed, pair.text, notes=pair.notes, **options)
    tell_numbers(str(found), found.to_dict(), json)


VERBS = (_add_demo, _add_page, _add_bench, _add_plot)
