"""Load a real server with requests of every kind, and look at what it holds before and after.

    .venv/bin/python tests/load.py      # prints the figures, and writes them to benchmarks/serving.json

Clients ask, ask for what cannot be, leave, and dawdle. `test_load.py` asserts what has to come of it.
"""

import collections
import http.client
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corpora import free_port
from tiny import dense

import mixdepth
from mixdepth.bench import describe_machine
from mixdepth.data.tokenizers import byte_tokenizer
from mixdepth.sampling.server_limits import Limits

FIGURES = Path(__file__).parents[1] / "benchmarks" / "serving.json"
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
TEXT, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
NUM_POSITIONS = 2048
NUM_REQUESTS = 2000
NUM_WARM_UP = 300
"""Requests of the same kinds before the first look: threads of pools start late, and memory is kept for reuse."""
NUM_CLIENTS = 16
NUM_DAWDLERS = 100
"""Connections that begin a request and say no more. As many again would reach the limit of connections."""
PATIENCE = 120
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
IMAGE = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}


def settings(**fields: Any) -> dict[str, str]:
    return {"generation_config": json.dumps(fields)}


GOOD: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": "def f(", "max_tokens": 12}),
    (TEXT, {"prompt": "def f(", "max_tokens": 12, "stream": True}),
    (TEXT, {"prompt": "x" * 500, "max_tokens": 8, "temperature": 0, "n": 1, "user": "Ada"}),
    (TEXT, {"prompt": "x", "max_tokens": 8, "seed": 3, "top_p": 0.9, "stop": ["\n", "é"], "suffix": "end"}),
    (TEXT, {"prompt": "x", "max_tokens": 8, **settings(num_beams=4, length_penalty=2)}),
    (TEXT, {"prompt": "x", "max_tokens": 8, "frequency_penalty": 1, **settings(top_k=5, min_p=0.1)}),
    (CHAT, {**HELLO, "max_completion_tokens": 8}),
    (CHAT, {**HELLO, "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}),
    (CHAT, {**HELLO, "max_tokens": 8, "logit_bias": {"70": 100}}),
    (RESPONSES, {"input": "hello", "max_output_tokens": 8}),
    (RESPONSES, {"input": "hello", "instructions": "be brief", "max_output_tokens": 8, "stream": True}),
]
"""Requests that are answered with 200."""

HOSTILE: list[tuple[str, Any]] = [
    (TEXT, b"{not json"),
    (TEXT, b""),
    (TEXT, b"[1, 2]"),
    (TEXT, b"\xff\xfe"),
    (TEXT, b'{"prompt": ' + b"[" * 100_000),
    (TEXT, b'{"prompt": "x", "temperature": NaN}'),
    (TEXT, {"prompt": "x" * 500_000}),
    (TEXT, {"prompt": "x" * 500_000, "stream": True}),
    (TEXT, {"prompt": "\ud800"}),
    (TEXT, {"prompt": 5}),
    (TEXT, {"prompt": ""}),
    (TEXT, {"model": "y" * 100_000, "prompt": "x"}),
    (TEXT, {"model": "../../etc/passwd", "prompt": "x"}),
    (TEXT, {"prompt": "x", "max_tokens": 0}),
    (TEXT, {"prompt": "x", "n": 1000}),
    (TEXT, {"prompt": "x", "temperature": 1e-320}),
    (TEXT, {"prompt": "x", "logit_bias": {"5": 100}}),
    (TEXT, {"prompt": "x", "stop": ["x" * 100] * 2000}),
    (TEXT, {"prompt": "x", "stop": "", "stream": True}),
    (TEXT, {"prompt": "x", "trust_remote_code": True}),
    (TEXT, {"prompt": "x", **settings(num_beams=1_000_000)}),
    (TEXT, {"prompt": "x", **settings(num_return_sequences=10_000)}),
    (TEXT, {"prompt": "x", **settings(custom_generate="somebody/else")}),
    (TEXT, {"prompt": "x", "stream": True, **settings(top_k=-5)}),
    (TEXT, {"prompt": "x", "stream": True, **settings(dola_layers="low")}),
    (TEXT, {"prompt": "x", "max_tokens": 400, **settings(no_repeat_ngram_size=1)}),
    (CHAT, {"messages": "hello"}),
    (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}),
    (CHAT, {**HELLO, "chat_template": "{{ 0 / 0 }}"}),
    (CHAT, {**HELLO, "logit_bias": {"999": 1}, "stream": True}),
    (RESPONSES, {"input": [{"type": "item_reference"}]}),
    (RESPONSES, {"input": "x", "stream": True, "max_output_tokens": -4}),
]
"""Requests that are refused with 400."""

LONG = {"prompt": "x", "max_tokens": NUM_POSITIONS}
"""A request whose answer takes seconds."""


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    threads: int
    files: int
    megabytes: float


class Server:
    """`mixdepth serve` in a process of its own."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.port = free_port()
        self.name = folder.name
        self.log = log
        command = [sys.executable, "-m", "mixdepth", "serve", str(folder), "--port", str(self.port)]
        with log.open("w") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)

    def wait_until_ready(self) -> None:
        for _ in range(600):
            assert self.process.poll() is None, self.log.read_text()
            with suppress(OSError):
                if self.ask("/health")[0] == 200:
                    return
            time.sleep(0.1)
        raise AssertionError(f"no answer: {self.log.read_text()}")

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def head(self, path: str, body: bytes) -> bytes:
        lines = [f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{self.port}", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "Content-Type: application/json", "", ""]).encode()

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
        """Status and body of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        headers = {"Content-Type": "application/json", **headers}
        try:
            connection.request("GET" if data is None else "POST", path, data, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def held(self) -> Held:
        folder = Path("/proc") / str(self.process.pid)
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        return Held(
            threads=int(status["Threads"]),
            files=len(list((folder / "fd").iterdir())),
            megabytes=round(int(status["VmRSS"].split()[0]) / 1024, 1),
        )

    def held_at_rest(self) -> Held:
        """What it holds when no connection is left: uvicorn closes idle ones after 5 seconds."""
        time.sleep(6)
        return self.held()

    def stop(self) -> int:
        """Ctrl-C; the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=PATIENCE)


def ask_good(server: Server, choose: random.Random) -> str:
    path, body = choose.choice(GOOD)
    status, answer = server.ask(path, {"model": server.name, **body})
    has_error = b'"error": "' in answer  # in the midst of a stream
    return f"{status} with an error inside" if has_error else str(status)


def ask_hostile(server: Server, choose: random.Random) -> str:
    path, body = choose.choice(HOSTILE)
    status, answer = server.ask(path, body)
    assert len(answer) < 1000
    assert b"Traceback" not in answer
    return str(status)


def ask_too_much(server: Server, choose: random.Random) -> str:
    """A body beyond the limit, without and with a model's name that is fit to be echoed."""
    name = "x" * choose.choice((2_000_000, 4_000_000))
    return str(server.ask(TEXT, {"model": name, "prompt": "x"})[0])


def ask_from_elsewhere(server: Server, choose: random.Random) -> str:
    headers = choose.choice(
        (
            {"Host": "evil.example"},
            {"Host": f"evil.example:{server.port}"},
            {"Origin": "http://evil.example"},
            {"Origin": "null"},
        )
    )
    return str(server.ask(TEXT, {"prompt": "x", "max_tokens": 1}, **headers)[0])


def leave(server: Server, choose: random.Random) -> str:
    """Leave in the midst of an answer that comes whole, or as a stream, or of a request."""
    is_streamed = choose.random() < 0.5
    body = json.dumps({**LONG, "stream": is_streamed}).encode()
    with server.connect() as connection:
        connection.sendall(server.head(TEXT, body))
        if choose.random() < 0.2:
            connection.sendall(body[:10])
            return "left"
        connection.sendall(body)
        if is_streamed:
            connection.recv(100)
        else:
            time.sleep(choose.uniform(0, 0.2))
    return "left"


def dawdle(server: Server, choose: random.Random) -> str:
    """Send a request in pieces, and take its answer in pieces."""
    body = json.dumps({"prompt": "x", "max_tokens": 20, "stream": True}).encode()
    request = server.head(TEXT, body) + body
    with server.connect() as connection:
        for begin in range(0, len(request), 100):
            connection.sendall(request[begin : begin + 100])
            time.sleep(0.1)
        answer = b""
        while not answer.endswith(b"0\r\n\r\n"):
            answer += connection.recv(200)
            time.sleep(0.01)
    return answer.split()[1].decode()


def look(server: Server, choose: random.Random) -> str:
    return str(server.ask(choose.choice(("/health", "/v1/models")))[0])


KINDS: dict[str, tuple[int, Callable[[Server, random.Random], str], str]] = {
    "good": (45, ask_good, "200"),
    "hostile": (30, ask_hostile, "400"),
    "too much": (3, ask_too_much, "413"),
    "from elsewhere": (7, ask_from_elsewhere, "403"),
    "leaving": (7, leave, "left"),
    "dawdling": (3, dawdle, "200"),
    "looking": (5, look, "200"),
}
"""Each kind of request with its share in percent, what a client does, and what has to come of it."""


def send_many(server: Server, number: int, seed: int) -> dict[str, dict[str, int]]:
    """Send so many requests, several at a time; how often each kind ended in which way."""
    choose = random.Random(seed)
    names = choose.choices(list(KINDS), [share for share, _, _ in KINDS.values()], k=number)

    def send(index: int) -> tuple[str, str]:
        name = names[index]
        try:
            return name, KINDS[name][1](server, random.Random(seed * number + index))
        except (OSError, http.client.HTTPException) as error:
            return name, type(error).__name__

    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        counts = collections.Counter(clients.map(send, range(number)))
    outcomes: dict[str, dict[str, int]] = {name: {} for name in KINDS}
    for (name, outcome), count in sorted(counts.items()):
        outcomes[name][outcome] = count
    return outcomes


@contextmanager
def health_watched(server: Server) -> Iterator[list[float]]:
    """Ask for the server's health all the while; the seconds that each answer took."""
    seconds: list[float] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.05):
            begin = time.monotonic()
            assert server.ask("/health")[0] == 200
            seconds.append(time.monotonic() - begin)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seconds
    finally:
        is_over.set()
        thread.join()


def hold_connections(server: Server) -> tuple[float, float]:
    """Begin many requests and say no more: seconds for another's answer meanwhile, and until all are closed."""
    begin = time.monotonic()
    connections = [server.connect() for _ in range(NUM_DAWDLERS)]
    for connection in connections:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: loc")
    asked = time.monotonic()
    status, _ = server.ask(TEXT, {"prompt": "x", "max_tokens": 1})
    assert status == 200
    seconds = time.monotonic() - asked
    for connection in connections:
        with connection, suppress(ConnectionResetError):
            assert connection.recv(100) == b""
    return seconds, time.monotonic() - begin


def seconds_after_leaving(server: Server) -> float:
    """How long an answer of one token takes after eight clients have left whole answers that take seconds each."""
    body = json.dumps(LONG).encode()
    connections = [server.connect() for _ in range(8)]
    for connection in connections:
        connection.sendall(server.head(TEXT, body) + body)
    time.sleep(1)
    for connection in connections:
        connection.close()
    begin = time.monotonic()
    assert server.ask(TEXT, {"prompt": "x", "max_tokens": 1})[0] == 200
    return time.monotonic() - begin


def greedy(server: Server) -> str:
    _, answer = server.ask(TEXT, {"prompt": "def f(", "max_tokens": 30, "temperature": 0})
    return json.loads(answer)["choices"][0]["text"]


def write_model(folder: Path) -> None:
    model = mixdepth.route(
        dense(vocab_size=256, max_position_embeddings=NUM_POSITIONS), capacity=0.5, gate="unit", layers=(1, 3)
    )
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def run(folder: Path) -> dict[str, Any]:
    """Load a server of a small model, and return the figures."""
    write_model(folder / "small-mod")
    log = folder / "log"
    server = Server(folder / "small-mod", log)
    try:
        # 1. Warm up, and look at what the server holds.
        server.wait_until_ready()
        send_many(server, NUM_WARM_UP, seed=0)
        answer_before = greedy(server)
        before = server.held_at_rest()
        # 2. The requests
        begin = time.monotonic()
        with health_watched(server) as health_seconds:
            outcomes = send_many(server, NUM_REQUESTS, seed=1)
        seconds = time.monotonic() - begin
        # 3. Clients that hold connections, and clients that leave
        seconds_beside_dawdlers, seconds_until_closed = hold_connections(server)
        seconds_after = seconds_after_leaving(server)
        # 4. Look again, and end.
        answer_after = greedy(server)
        after = server.held_at_rest()
        exit_code = server.stop()
    finally:
        server.process.kill()
        server.process.wait()
    said = [line for line in log.read_text().splitlines() if "serving small-mod at" not in line]
    return {
        "machine": describe_machine(),
        "limits": vars(Limits()),
        "clients": NUM_CLIENTS,
        "requests": NUM_REQUESTS,
        "seconds": round(seconds, 1),
        "outcomes": outcomes,
        "before": vars(before),
        "after": vars(after),
        "is_same_answer": answer_before == answer_after,
        "health_milliseconds": {
            "median": round(1000 * statistics.median(health_seconds), 1),
            "highest": round(1000 * max(health_seconds), 1),
        },
        "dawdlers": {
            "connections": NUM_DAWDLERS,
            "seconds_for_another": round(seconds_beside_dawdlers, 2),
            "seconds_until_closed": round(seconds_until_closed, 1),
        },
        "seconds_after_eight_left": round(seconds_after, 2),
        "exit_code": exit_code,
        "log": said,
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        figures = run(Path(place))
    print(json.dumps(figures, indent=2))
    FIGURES.write_text(json.dumps(figures, indent=2) + "\n")
