"""The command line: verbs to functions; what a verb needs is imported by the verb."""

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="mixdepth", description="Mixture-of-Depths transformers on PyTorch and Hugging Face."
    )
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    verbs = parser.add_subparsers(dest="verb", metavar="verb")
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
    options = vars(parser.parse_args(arguments))
    if options.pop("version"):
        from mixdepth import __version__

        print(f"mixdepth {__version__}")
        return 0
    verb = options.pop("verb")
    if verb is None:
        parser.print_help()
        return 2
    try:
        from mixdepth import demo as demo_verb

        demo_verb.run(**options)
    except ValueError as error:
        print(f"mixdepth: {error}", file=sys.stderr)
        return 2
    return 0
