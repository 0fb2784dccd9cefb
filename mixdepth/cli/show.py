"""Verbs that show and measure."""

from typing import Any


def add_plot(verbs: Any) -> None:
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


def add_demo(verbs: Any) -> None:
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
