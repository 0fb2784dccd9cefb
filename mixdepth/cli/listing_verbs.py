"""Verbs that list what there is: env, runs."""

from typing import Any

from mixdepth.cli.flags import add_verb


def add_verbs(verbs: Any) -> None:
    _add_env(verbs)
    _add_runs(verbs)


def _add_env(verbs: Any) -> None:
    env = add_verb(
        verbs,
        "env",
        summary="print versions, device and installed extras, for reports of bugs",
        description="Print the versions of mixdepth, Python, torch and transformers, the device, the processor, the "
        "threads, and which extras are installed. Put it into a report of a bug.",
        example="mixdepth env",
    )
    env.set_defaults(run=_env)


def _env() -> None:
    from mixdepth.cli.environment import describe_environment

    print(describe_environment())


def _add_runs(verbs: Any) -> None:
    runs = add_verb(
        verbs,
        "runs",
        summary="list the runs in a folder, with their loss and state",
        description="List the runs in a folder and below it: dense or routed, step, held-out loss, training FLOPs, and "
        "whether each is finished, unfinished or damaged. The step of an unfinished run is that of its newest "
        "checkpoint, from which it resumes.",
        example="mixdepth runs runs/",
    )
    runs.add_argument("folder", nargs="?", default=".", metavar="FOLDER", help="Folder of runs. (default: this one)")
    runs.set_defaults(run=_runs)


def _runs(folder: str) -> None:
    from mixdepth.cli.run_table import runs_table

    print(runs_table(folder))
