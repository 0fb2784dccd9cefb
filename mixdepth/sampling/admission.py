"""The gate between the network and the server: which clients it answers, and how long it waits for them."""

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
"""How long answers that are being sent may take to end after Ctrl-C."""

OWN_NAMES = ("localhost", "127.0.0.1", "::1")
"""Names by which clients on the same machine call the server."""

ANY_HOST = "*"
"""The name that allows all names."""

REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Gate:
    """Pass complete requests within the limits to the application, and end each of them when its client has left.

    The application finds a `threading.Event` in `scope["is_over"]`. It is set when no client waits for the answer.
    """

    def __init__(self, application: Application, limits: Limits, hosts: Sequence[str] = ()) -> None:
        self.application = application
        self.limits = limits
        self.hosts = {_host_of(host) for host in (*OWN_NAMES, *hosts)}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":  # the server starts or ends
            await self.application(scope, receive, send)
            return
        if scope["type"] != "http":
            raise ValueError(f"the server speaks HTTP, not {scope['type']}")
        try:
            body = await self.read(receive)  # first, because a client that is still sending would not read a refusal
            if body is None:
                return
            self.check_head(scope)
        except RefusedError as refusal:
            await _refuse(refusal, send)
            return
        await self.answer(scope, body, receive, send)

    def check_head(self, scope: Message) -> None:
        """Refuse requests that a page of another site could make in a browser on this machine.

        Such a site can let its own name point at this machine (DNS rebinding). Then its page reaches this server, and
        the browser takes the server for that site. The header `Host` shows it.
        """
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        # 1. The client must call the server by one of its names.
        host = headers.get(b"host", "")
        listening = scope.get("server") or ("",)
        names = {*self.hosts, _host_of(str(listening[0]))}
        if ANY_HOST not in self.hosts and _host_of(host) not in names:
            raise RefusedError(403, f"this server is not known as {shown(host)}: start it with --allowed-host NAME")
        # 2. A page must come from this server.
        origin = headers.get(b"origin")
        if origin is not None and _place_of(origin) != host.lower():
            raise RefusedError(403, f"pages of {shown(origin)} may not use this server")
        # 3. The request's id comes back in the answer, so it must be harmless.
        request_id = headers.get(b"x-request-id")
        if request_id is not None and not REQUEST_ID.fullmatch(request_id):
            raise RefusedError(400, "x-request-id must be up to 128 letters, digits and marks out of - _ . :")

    async def read(self, receive: Receive) -> bytes | None:
        """Read the whole body; None if the client leaves before it has sent all of it."""
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
                        body.clear()  # read on without keeping anything, so that the client can read the refusal
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
        """Let the application answer for as long as the client stays."""
        # 1. The application reads the body that is here already.
        scope["is_over"] = threading.Event()
        is_read = False

        async def receive_again() -> Message:
            nonlocal is_read
            if is_read:
                await asyncio.Event().wait()  # this task is cancelled when the client leaves
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        # 2. Wait until the answer is sent, or the client leaves, whichever comes first. End the other task.
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
            answering.result()  # raises the error of the application, if there was one


async def _has_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _refuse(refusal: RefusedError, send: Send) -> None:
    """Answer with the refusal, and close the connection, because the client may not have sent all of its request."""
    body = json.dumps(error_body(refusal)).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def check_host(name: str) -> None:
    """Refuse a name that cannot stand in the header `Host` of a client."""
    if name != ANY_HOST and not re.fullmatch(r"[\w.:\[\]-]+", name):
        raise ValueError(f"allowed_host must be a name or an address, as in models.example or 192.0.2.7, not {name!r}")


def _host_of(name: str) -> str:
    """Return a host without its port, always in the same spelling.

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
    """Return host and port of an origin; None if it has none, as the origin `null`."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def uvicorn_options(limits: Limits) -> dict[str, Any]:
    """Return the options with which uvicorn serves a gate with these limits."""
    return {
        "http": _make_protocol(limits),
        "ws": "none",
        "limit_concurrency": limits.connections + 1,  # the number at which it answers with 503
        "timeout_graceful_shutdown": GOODBYE_SECONDS,
        "log_level": "error",
        "access_log": False,
    }


def _make_protocol(limits: Limits) -> Any:
    """Make a protocol for uvicorn that closes a connection that keeps it waiting."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Punctual(H11Protocol):  # type: ignore[misc]
        """Close a connection if the head of a request, or a piece of an answer, takes too long on the network."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.waits: dict[str, asyncio.TimerHandle] = {}
            transport.set_write_buffer_limits(0)  # then pause_writing is called for every piece that has to wait
            self._wait_for_head()
            if len(self.connections) > 2 * limits.connections:  # fewer than these get an answer with 503 from uvicorn
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
