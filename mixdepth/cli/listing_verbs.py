"""Verbs that list what there is: env."""

from typing import Any

from mixdepth.cli.flags import add_verb


def add_verbs(verbs: Any) -> None:
    _add_env(verbs)


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
