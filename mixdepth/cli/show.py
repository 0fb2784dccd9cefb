"""Verbs that show and measure."""

from typing import Any


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
        help="train a dense and a routed model with the same FLOPs and compare them",
        description="Trains a dense and a routed model on the Python standard library's source with the same FLOPs "
        "(nothing is downloaded), evaluates both causally, times a training step and decoding, weighs the caches, and "
        "writes report.html. It takes about five minutes on two cores. What is done is kept: the same command goes on.",
    )
    demo.add_argument("--out", default="demo", help="the folder of all that it makes (default: %(default)s)")
    demo.add_argument("--flops", type=float, default=3e12, help="training FLOPs of each model (default: %(default)g)")
    demo.add_argument(
        "--capacity", type=float, default=0.125, help="share of tokens per routed layer (default: %(default)s)"
    )
    demo.add_argument("--every", type=int, default=2, help="route every n-th layer (default: %(default)s)")
    demo.add_argument("--seed", type=int, default=0, help="of weights and data (default: %(default)s)")
    demo.set_defaults(run=_demo)


def _demo(**options: Any) -> None:
    from mixdepth import demo

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

    from mixdepth.report.page import write_page
    from mixdepth.trace import trace

    if text is not None and file is not None:
        raise ValueError(f"give --text or --file, not both: leave out --file {file}")
    if file is not None:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file!r} is not text in UTF-8 ({error.reason}): give another --file") from error
    print(write_page(trace(model, text, context=context), out))


VERBS = (_add_demo, _add_page, _add_plot)
