"""The gate of the server, over real connections, in front of an application that only says what reached it."""

import asyncio
import json
import socket
import threading
import time

import pytest
import uvicorn
from corpora import free_port

from mixdepth.sampling.admission import Gate, check_host, uvicorn_options
from mixdepth.sampling.server_limits import Limits

LIMITS = Limits(body_bytes=10_000, arrival_seconds=0.6, connections=4)
PATIENCE = 5
"""Seconds after which a test gives up waiting for the server."""


class Application:
    """Answer with the length of the body, or as the path says, and note whether the client has left."""

    def __init__(self):
        self.has_left = threading.Event()

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        try:
            if scope["path"] == "/wait":
                await asyncio.Event().wait()
            while scope["path"] == "/endless":
                await send({"type": "http.response.body", "body": b"x" * 10_000, "more_body": True})
                await asyncio.sleep(0.001)
            while scope["path"] == "/stuck" and send.__self__.transport.get_write_buffer_size() == 0:
                await send({"type": "http.response.body", "body": b"x" * 10_000, "more_body": True})
        finally:
            if scope["is_over"].is_set():
                self.has_left.set()
        await send({"type": "http.response.body", "body": str(len(body)).encode()})


@pytest.fixture(scope="module")
def gate():
    """Start a gate; give its port, and the application behind it."""
    port = free_port()
    application = Application()
    served = Gate(application, LIMITS, hosts=("models.example",))
    server = uvicorn.Server(uvicorn.Config(served, port=port, lifespan="off", **uvicorn_options(LIMITS)))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield port, application
    server.should_exit = True
    thread.join(PATIENCE)
    assert not thread.is_alive()


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def head(path="/", *headers, length=0, host="localhost"):
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {length}", *headers, "", ""]
    return "\r\n".join(lines).encode()


def read_all(connection):
    """Read what the server sends until it closes the connection."""
    said = b""
    try:
        while part := connection.recv(2**16):
            said += part
    except ConnectionResetError:
        pass
    return said


def ask(port, *data):
    """Return the status and the body of the answer."""
    with connect(port) as connection:
        for part in data:
            connection.sendall(part)
        first, _, rest = read_all(connection).partition(b"\r\n")
    return int(first.split()[1]), rest.partition(b"\r\n\r\n")[2]


def message_of(body):
    return json.loads(body)["error"]["message"]


def wait_until_all_are_gone(port):
    """Wait until the server has noticed that connections are closed. Until then it counts them."""
    for _ in range(100):
        if ask(port, head())[0] == 200:
            return
        time.sleep(0.05)
    raise AssertionError("the server does not answer any longer")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:80", "[::1]:8000", "models.example"])
def test_a_host_that_is_known_is_answered(gate, host):
    assert ask(gate[0], head(host=host, length=3), b"abc") == (200, b"1\r\n3\r\n0\r\n\r\n")


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "evil.example:8000", "192.0.2.7", ""])
def test_a_host_that_is_not_known_is_refused(gate, host):
    status, body = ask(gate[0], head(host=host))
    assert status == 403
    assert message_of(body) == f"this server is not known as {host!r}: start it with --allowed-host NAME"


def test_a_page_of_this_server_may_use_it(gate):
    assert ask(gate[0], head("/", "Origin: http://localhost:8000", host="localhost:8000"))[0] == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "http://localhost:9", "null", "http://[", "file://"])
def test_a_foreign_page_may_not_use_it(gate, origin):
    status, body = ask(gate[0], head("/", f"Origin: {origin}", host="localhost:8000"))
    assert (status, message_of(body)) == (403, f"pages of {origin!r} may not use this server")


def test_a_request_id_that_is_long_or_odd_is_refused(gate):
    assert ask(gate[0], head("/", "X-Request-ID: abc-1.2"))[0] == 200
    for odd in ("x" * 5000, "<script>", "a b"):
        status, body = ask(gate[0], head("/", f"X-Request-ID: {odd}"))
        assert status == 400
        assert message_of(body).startswith("x-request-id must be")


def test_a_body_up_to_the_limit_is_passed_on_whole(gate):
    assert ask(gate[0], head(length=10_000), b"x" * 10_000) == (200, b"5\r\n10000\r\n0\r\n\r\n")


def test_a_longer_body_is_refused_in_words_that_the_client_can_read(gate):
    for size in (10_001, 5_000_000):
        status, body = ask(gate[0], head(length=size), b"x" * size)
        assert (status, message_of(body)) == (413, "the body has more than 10000 bytes")


def test_a_longer_body_without_a_length_is_refused(gate):
    start = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"1000\r\n" + b"x" * 0x1000 + b"\r\n"
    assert ask(gate[0], start, chunk, chunk, chunk, b"0\r\n\r\n")[0] == 413


def test_a_body_that_does_not_arrive_in_time_is_refused(gate):
    begin = time.monotonic()
    status, body = ask(gate[0], head(length=10), b"x")
    assert (status, message_of(body)) == (408, "the body took longer than 0.6 seconds to arrive")
    assert time.monotonic() - begin < PATIENCE


@pytest.mark.parametrize("beginning", [b"", b"POST / HTT"])
def test_a_connection_that_brings_no_request_in_time_is_closed(gate, beginning):
    with connect(gate[0]) as connection:
        connection.sendall(beginning)
        assert read_all(connection) == b""


def test_a_request_that_trickles_in_is_closed(gate):
    """Each letter arrives in time, but the head of the request does not."""

    def trickle(connection):
        for letter in head() * 10:
            connection.sendall(bytes([letter]))
            time.sleep(0.05)

    begin = time.monotonic()
    with connect(gate[0]) as connection, pytest.raises(OSError, match=r"reset|pipe"):
        trickle(connection)
    assert time.monotonic() - begin < PATIENCE


@pytest.mark.parametrize("path", ["/wait", "/endless"])
def test_the_application_ends_when_the_client_leaves(gate, path):
    port, application = gate
    application.has_left.clear()
    with connect(port) as connection:
        connection.sendall(head(path))
        assert connection.recv(12) == b"HTTP/1.1 200"
    assert application.has_left.wait(PATIENCE)


def test_a_client_that_does_not_take_its_answer_has_left(gate):
    port, application = gate
    application.has_left.clear()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port))
        connection.sendall(head("/endless"))
        assert application.has_left.wait(PATIENCE)


def test_the_end_of_an_answer_that_is_not_taken_is_not_kept(gate):
    """The application has sent all of its answer, and a few kilobytes of it wait in the server."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(PATIENCE)
        connection.connect(("127.0.0.1", gate[0]))
        connection.sendall(head("/stuck"))
        time.sleep(2 * LIMITS.arrival_seconds)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 200")
    assert not answer.endswith(b"0\r\n\r\n")


def test_more_connections_than_the_limit_are_answered_with_503(gate):
    port, _ = gate
    waiting = [connect(port) for _ in range(LIMITS.connections)]
    for connection in waiting:
        connection.sendall(head("/wait"))
        assert connection.recv(12) == b"HTTP/1.1 200"
    assert ask(port, head())[0] == 503
    for connection in waiting:
        connection.close()
    wait_until_all_are_gone(port)


def test_many_more_connections_than_the_limit_are_closed(gate):
    port, _ = gate
    idle = [connect(port) for _ in range(2 * LIMITS.connections)]
    begin = time.monotonic()
    with connect(port) as connection:
        assert read_all(connection) == b""
    assert time.monotonic() - begin < LIMITS.arrival_seconds / 2
    for connection in idle:
        connection.close()
    wait_until_all_are_gone(port)


def test_the_name_of_a_host_is_checked():
    for name in ("models.example", "192.0.2.7", "[::1]", "*"):
        check_host(name)
    for name in ("http://models.example", "models.example/", ""):
        with pytest.raises(ValueError, match="allowed_host must be a name or an address"):
            check_host(name)


def test_every_host_can_be_allowed():
    gate = Gate(Application(), LIMITS, hosts=("*",))
    gate.check_head({"headers": [(b"host", b"anything.example")]})
