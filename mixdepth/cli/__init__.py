"""The command line. Each verb is parsed here and runs a function, which imports what it needs.

Parsing imports settings and nothing else, so that `--help` answers in a tenth of a second.
"""

import logging
import os
import sys
from collections.abc import Sequence

from mixdepth.cli import listing_verbs, model_verbs, show_verbs, study_verbs, training_verbs
from mixdepth.cli.flags import HelpFormatter
from mixdepth.cli.parser import Parser, with_hint
from mixdepth.models.missing import missing_run

BADLY_USED = 2
"""Exit code of a command that was given something it cannot work with."""
INTERRUPTED = 130
"""Exit code of a command that was stopped with Ctrl-C, as shells have it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if arguments is None:
        arguments = sys.argv[1:]

    # 1. Parse. Nothing heavy has been imported so far.
    parser = make_parser(shows_all="--help-all" in arguments)
    options = vars(parser.parse_args(arguments))
    if options.pop("version"):
        from mixdepth.version import __version__

        print(f"mixdepth {__version__}")
        return 0
    if options.pop("verb") is None:
        parser.print_help()
        return BADLY_USED

    # 2. Refuse a model that is missing, in one line, by the first process only.
    given = options.get("names") or [options.get("model")]
    sentences = [missing_run(name) for name in given if name is not None]
    refusals = [sentence for sentence in sentences if sentence is not None]
    if refusals:
        if os.environ.get("RANK", "0") == "0":
            print(f"mixdepth: {refusals[0]}", file=sys.stderr)
        return BADLY_USED

    # 3. Silence other libraries, before the verb imports them.
    _silence_other_libraries()

    # 4. Run the verb. Errors that a user can mend are printed in one line, by the first process only.
    run_verb = options.pop("run")
    try:
        run_verb(**options)
    except (ValueError, OSError) as error:
        from mixdepth.files import explained

        if os.environ.get("RANK", "0") == "0":
            print(f"mixdepth: {with_hint(explained(error))}", file=sys.stderr)
        return BADLY_USED
    except KeyboardInterrupt:
        print("mixdepth: stopped; finished work is kept", file=sys.stderr)
        return INTERRUPTED
    return 0


def make_parser(*, shows_all: bool = False) -> Parser:
    """Make the parser of all verbs. With `shows_all` the help of each verb shows its rarely used settings too."""
    parser = Parser(
        prog="mixdepth",
        usage="mixdepth VERB ...",
        description="Mixture-of-Depths transformers on PyTorch and Hugging Face.",
        epilog="`mixdepth VERB --help` describes one verb.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    training_verbs.add_verbs(verbs, shows_all=shows_all)
    model_verbs.add_verbs(verbs, shows_all=shows_all)
    show_verbs.add_verbs(verbs, shows_all=shows_all)
    study_verbs.add_verbs(verbs, shows_all=shows_all)
    listing_verbs.add_verbs(verbs)
    return parser


def _silence_other_libraries() -> None:
    """Turn off progress bars of transformers, which would mix with ours, and the advice of bitsandbytes."""
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # read when transformers is imported
    if "transformers" in sys.modules:
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
