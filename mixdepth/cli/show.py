"""Verbs that show and measure."""

from typing import Any


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
