"""A parser that answers a typo with the usage of the verb it was made in, and with what was probably meant."""

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

CHOICE_ERROR = re.compile(r"must be one of (?P<choices>.+), not '(?P<given>[^']*)'$")
"""The end of a sentence by which settings refuse a word that is none of their choices."""


class Parser(argparse.ArgumentParser):
    """A parser of the whole command, of one verb, or of one step of a verb."""

    verbs: Any = None
    """The verbs (or steps) that this parser chooses from; None if it has flags only."""

    def add_subparsers(self, **options: Any) -> Any:
        # Errors begin with the plain name of the command, not with a usage that was written by hand.
        self.verbs = super().add_subparsers(prog=self.prog, **options)
        return self.verbs

    def parse_known_args(  # type: ignore[override]  # argparse overloads it on the class of the namespace
        self, args: Sequence[str], namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse, and refuse what is unknown: argparse alone would leave that to the parser of the whole command."""
        self._refuse_typos(args)
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"there is one word too many: {unknown[0]!r}")
        return namespace, []

    def _refuse_typos(self, arguments: Sequence[str]) -> None:
        """Refuse unknown flags and verbs first, because a typo also makes argparse miss what is required."""
        for argument in arguments:
            # 1. What follows the verb belongs to the parser of the verb.
            if self.verbs is not None and not argument.startswith("-"):
                if argument not in self.verbs.choices:
                    kind = self.verbs.metavar.lower()
                    self._refuse(kind, argument, self.verbs.choices)
                return
            # 2. Everything after -- is no flag.
            if argument == "--":
                return
            # 3. A flag is known by its name, or by the beginning of its name.
            is_flag = argument.startswith("--") and " " not in argument
            flag = argument.partition("=")[0]
            if is_flag and not any(known.startswith(flag) for known in self.flags):
                self._refuse("flag", flag, self.flags)

    @property
    def flags(self) -> list[str]:
        """All flags of this parser."""
        return [flag for flag in self._option_string_actions if flag.startswith("--")]

    def _refuse(self, kind: str, given: str, known: Iterable[str]) -> NoReturn:
        known = list(known)
        way_out = did_you_mean(given, known)
        if not way_out and kind == "flag":
            way_out = f": `{self.prog} --help` shows the flags"
        elif not way_out:
            way_out = f": choose one of {', '.join(known)}"
        self.error(f"there is no {kind} {given}{way_out}")


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return a question that names the known word most like the given one, or nothing if none is like it.

    >>> did_you_mean("--capcity", ["--capacity", "--corpus"])
    ': did you mean --capacity?'
    >>> did_you_mean("--device", ["--dense", "--corpus"])
    ''
    """
    # Without their hyphens, flags that share nothing else are unlike each other.
    by_word = {word.strip("-"): word for word in known}
    similar = difflib.get_close_matches(given.strip("-").lower(), by_word, n=1)
    if not similar:
        return ""
    return f": did you mean {by_word[similar[0]]}?"


def with_hint(sentence: str) -> str:
    """Add what was probably meant to a sentence that refuses a choice.

    >>> with_hint("gate must be one of 'raw', 'tanh', not 'tahn'")
    "gate must be one of 'raw', 'tanh', not 'tahn': did you mean tanh?"
    """
    error = CHOICE_ERROR.search(sentence)
    if error is None:
        return sentence
    choices = error["choices"].replace("'", "").split(", ")
    return sentence + did_you_mean(error["given"], choices)
