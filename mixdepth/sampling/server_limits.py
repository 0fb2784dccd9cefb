"""The limits of what one client can take of the server, and the form of refusals. No torch."""

import reprlib
from dataclasses import dataclass, fields
from typing import Any

from mixdepth.config import check_integer, is_number

MAX_LETTERS_OF_A_MESSAGE = 400
"""The longest error message. It is cut there, because it may quote what the client sent."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of what one client can take of the server.

    >>> Limits(beams=2).stops
    4
    """

    body_bytes: int = 2**20
    """Largest body of a request, in bytes."""

    arrival_seconds: float = 10
    """Seconds within which the head of a request must arrive, and then its body. A client must take each piece of its
    answer within as many seconds."""

    prompt_tokens: int = 8192
    """Longest prompt, in tokens, if the positions of the model do not set a lower limit."""

    answer_seconds: float = 300
    """Seconds for which the model computes one answer. A longer one ends with an error."""

    batch_tokens: int = 16384
    """Tokens that all answers under continuous batching share, prompts included. Memory is reserved for as many."""

    beams: int = 4
    """The most beams of a beam search (`num_beams` in `generation_config`)."""

    stops: int = 4
    """The most stop strings in a request."""

    stop_letters: int = 64
    """Longest stop string, in characters."""

    connections: int = 128
    """The most connections at a time. Further requests are answered with 503."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int:
                check_integer(field.name, value, minimum=1)
            elif not is_number(value) or not 0 < value <= 1e6:
                raise ValueError(f"{field.name} must be a number above 0 and up to a million, not {value!r}")


class RefusedError(ValueError):
    """A request that is refused with this HTTP status. A plain ValueError means 400."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def shown(value: Any) -> str:
    """Return the beginning of a value that a client sent, for a message."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 60
    return short.repr(value)


def one_line(sentence: object) -> str:
    """Return an error message as one printable line that is not too long to be sent.

    >>> one_line("the prompt\\n  is empty")
    'the prompt is empty'
    """
    words = " ".join(str(sentence)[: 2 * MAX_LETTERS_OF_A_MESSAGE].split())
    printable = words.encode("utf-8", "replace").decode()
    if len(printable) <= MAX_LETTERS_OF_A_MESSAGE:
        return printable
    return printable[:MAX_LETTERS_OF_A_MESSAGE] + " ..."


def error_body(sentence: object, *, is_fault_of_server: bool = False) -> dict[str, Any]:
    """Return the body of a refusal, as clients of OpenAI's interface read it."""
    kind = "server_error" if is_fault_of_server else "invalid_request_error"
    return {"error": {"message": one_line(sentence), "type": kind}}
