"""What stands between the network and the server's application: whom it answers, and how long it waits for a client."""

import asyncio
import ipaddress
import json
import re
import threading
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from mixdepth.sampling.server_limits import Limits, RefusedError, error_body, shown

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

GOODBYE_SECONDS = 5
"""After Ctrl-C, answers that are under way have this long to end."""

OF_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
ANY_HOST = "*"
REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Gate:
    """Passes on the requests for this server, whole and within the limits, and ends each when its client has left.

    The application finds a `threading.Event` in `scope["is_over"]`, which is set when nobody waits for the answer.
    """

    def __init__(self, application: Application, limits: Limits, hosts: Sequence[str] = ()) -> None:
        self.application = application
        self.limits = limits
        self.hosts = {_host_of(host) for host in (*OF_THIS_MACHINE, *hosts)}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":  # the server starts, or ends
            await self.application(scope, receive, send)
            return
        if scope["type"] != "http":
            raise ValueError(f"the server speaks HTTP, not {scope['type']}")
        try:
            body = await self.read(receive)  # first: a client that is still sending would not hear of a refusal
            if body is None:
                return
            self.check_head(scope)
        except RefusedError as refusal:
            await _refuse(refusal, send)
            return
        await self.answer(scope, body, receive, send)

    def check_head(self, scope: Message) -> None:
        """Refuse requests that a foreign page in a browser of this machine could make.

        By its own name, which it lets point at this machine, a page would reach the server as if it came from there.
        """
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        name = headers.get(b"host", "")
        listening = scope.get("server") or ("",)
        is_known = ANY_HOST in self.hosts or _host_of(name) in {*self.hosts, _host_of(str(listening[0]))}
        if not is_known:
            raise RefusedError(403, f"this server is not known as {shown(name)}: start it with --allowed-host NAME")
        origin = headers.get(b"origin")
        if origin is not None and _place_of(origin) != name.lower():
            raise RefusedError(403, f"pages of {shown(origin)} may not use this server")
        request_id = headers.get(b"x-request-id")  # it comes back with the answer
        if request_id is not None and not REQUEST_ID.fullmatch(request_id):
            raise RefusedError(400, "x-request-id must be up to 128 letters, digits and marks out of - _ . :")

    async def read(self, receive: Receive) -> bytes | None:
        """The whole body; None if the client left before it had sent it."""
        body = bytearray()
        size = 0
        limit = self.limits.body_bytes
        try:
            async with asyncio.timeout(self.limits.arrival_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    size += len(part)
                    if size <= limit:
                        body += part
                    else:
                        body.clear()  # the rest is only counted, so that the client can hear of it
                    if not message.get("more_body"):
                        break
        except TimeoutError as error:
            if size <= limit:
                seconds = self.limits.arrival_seconds
                raise RefusedError(408, f"the body took longer than {seconds:g} seconds to arrive") from error
        if size > limit:
            raise RefusedError(413, f"the body has more than {limit} bytes")
        return bytes(body)

    async def answer(self, scope: Message, body: bytes, receive: Receive, send: Send) -> None:
        """Let the application answer for as long as the client is there."""
        scope["is_over"] = threading.Event()
        is_read = False

        async def receive_again() -> Message:
            nonlocal is_read
            if is_read:
                await asyncio.Event().wait()  # this task is cancelled when the client leaves
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        answering = asyncio.ensure_future(self.application(scope, receive_again, send))
        leaving = asyncio.ensure_future(_has_left(receive))
        is_answered = False
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            is_answered = answering.done()
        except asyncio.CancelledError:
            pass  # the server ends, and closes the connection
        finally:
            scope["is_over"].set()
            answering.cancel()
            leaving.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
        if is_answered:
            answering.result()


async def _has_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _refuse(refusal: RefusedError, send: Send) -> None:
    """Answer with the refusal, and close the connection, on which the client may not have said all."""
    body = json.dumps(error_body(refusal)).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def check_host(name: str) -> None:
    """Refuse what cannot be the name of a host, as a client says it."""
    if name != ANY_HOST and not re.fullmatch(r"[\w.:\[\]-]+", name):
        raise ValueError(f"allowed_host must be a name or an address, as in models.example or 192.0.2.7, not {name!r}")


def _host_of(name: str) -> str:
    """A host without its port, in one spelling.

    >>> _host_of("LocalHost:8000"), _host_of("[0::1]:80"), _host_of("::1")
    ('localhost', '::1', '::1')
    """
    bare = name.strip().lower()
    if bare.startswith("["):
        bare = bare[1:].partition("]")[0]
    elif bare.count(":") == 1:
        bare = bare.partition(":")[0]
    try:
        return str(ipaddress.ip_address(bare))
    except ValueError:
        return bare


def _place_of(origin: str) -> str | None:
    """Host and port of an origin; None if it has none, as in `null`."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def uvicorn_options(limits: Limits) -> dict[str, Any]:
    """How uvicorn serves a gate with these limits."""
    return {
        "http": _make_protocol(limits),
        "ws": "none",
        "limit_concurrency": limits.connections + 1,  # the number at which it answers with 503
        "timeout_graceful_shutdown": GOODBYE_SECONDS,
        "log_level": "error",
        "access_log": False,
    }


def _make_protocol(limits: Limits) -> Any:
    """uvicorn's protocol, but a connection that keeps it waiting is closed."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Punctual(H11Protocol):  # type: ignore[misc]
        """Gives the head of each request, and each piece of an answer, some seconds to cross the network."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.waits: dict[str, asyncio.TimerHandle] = {}
            transport.set_write_buffer_limits(0)  # pause_writing is called for every piece that does not leave at once
            self._wait_for_head()
            if len(self.connections) > 2 * limits.connections:  # up to there uvicorn answers with 503
                transport.abort()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._wait_for_head()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._wait("answer")

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop_waiting("answer")

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            for wait in ("head", "answer"):
                self._stop_waiting(wait)

        def _wait_for_head(self) -> None:
            if self.conn.their_state is h11.IDLE:
                self._wait("head")
            else:
                self._stop_waiting("head")

        def _wait(self, wait: str) -> None:
            if wait not in self.waits:
                self.waits[wait] = self.loop.call_later(limits.arrival_seconds, self.transport.abort)

        def _stop_waiting(self, wait: str) -> None:
            if wait in self.waits:
                self.waits.pop(wait).cancel()

    return Punctual
