"""The command line: verbs to functions; what a verb needs is imported by the verb.

`models` has the verbs that make and use models, `study` those of the comparison at equal FLOPs, `show` those that
show and measure; `flags` makes flags of settings.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from mixdepth.cli import model_verbs as models
from mixdepth.cli import show_verbs as show
from mixdepth.cli import study_verbs as study


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line, with all its verbs."""
    parser = argparse.ArgumentParser(
        prog="mixdepth", description="Mixture-of-Depths transformers on PyTorch and Hugging Face."
    )
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    verbs = parser.add_subparsers(dest="verb", metavar="verb")
    for add in (*show.VERBS, *models.VERBS, study.add_isoflop):
        add(verbs)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser()
    options = vars(parser.parse_args(arguments))
    if options.pop("version"):
        from mixdepth.version import __version__

        print(f"mixdepth {__version__}")
        return 0
    if options.pop("verb") is None:
        parser.print_help()
        return 2
    run = options.pop("run")
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(
        logging.ERROR
    )  # its advice is not for this command's user
    from transformers.utils.logging import disable_progress_bar

    from mixdepth.files import explained

    disable_progress_bar()  # ours is the only one
    try:
        run(**options)
    except (ValueError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"mixdepth: {explained(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mixdepth: stopped; what was finished is kept", file=sys.stderr)
        return 130
    return 0
