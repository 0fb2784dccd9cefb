"""The server runs in a process of its own, and the openai package is its client."""

import asyncio
import json
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from inspect import signature
from pathlib import Path

import openai
import pytest
from corpora import call, free_port, start
from tiny import dense

import mixdepth
from mixdepth.data.tokenizers import byte_tokenizer
from mixdepth.sampling.answering import Together
from mixdepth.sampling.server import make_app
from mixdepth.sampling.server_limits import Limits

STATIC = {"model": "small-mod", "prompt": "x", "generation_config": '{"cache_implementation": "static"}'}
WARM = {"stream": True, "temperature": -1}
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "small-mod"
    model = mixdepth.route(dense(vocab_size=256, max_position_embeddings=512), capacity=0.5, gate="unit", layers=(1, 3))
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def port():
    return free_port()


@pytest.fixture(scope="module")
def server_process(folder, port):
    return start("serve", str(folder), "--port", str(port), log=folder.parent / "log")


@pytest.fixture(scope="module")
def server(folder, port, server_process):
    """Start a server on a free port of this machine. It ends with Ctrl-C, without a message."""
    process, log = server_process, folder.parent / "log"
    address = f"http://127.0.0.1:{port}"
    for _ in range(600):
        assert process.is_alive(), log.read_text()
        try:
            urllib.request.urlopen(f"{address}/health")
            break
        except OSError:
            time.sleep(0.1)
    yield address
    os.kill(process.pid, signal.SIGINT)
    process.join(timeout=20)
    assert process.exitcode == 0
    assert log.read_text() == f"mixdepth: serving small-mod at {address}/v1, until Ctrl-C\n"


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)


def test_it_completes_as_generate_does(client, folder):
    (expected,) = mixdepth.generate(folder, "def f(", max_new_tokens=12, do_sample=False)
    assert [model.id for model in client.models.list()] == ["small-mod"]
    options = {"model": "small-mod", "prompt": "def f(", "max_tokens": 12, "temperature": 0}
    answer = client.completions.create(**options)
    assert answer.choices[0].text == expected.completion
    assert answer.usage.completion_tokens == 12
    parts = list(client.completions.create(**options, stream=True))
    assert len(parts) > 2
    assert "".join(part.choices[0].text for part in parts) == expected.completion


def test_it_chats_at_once_or_as_it_comes(client, folder):
    messages = [{"role": "user", "content": "hello"}]
    (expected,) = mixdepth.generate(folder, "user: hello\nassistant:", max_new_tokens=10, do_sample=False)
    options = {"model": "small-mod", "messages": messages, "max_tokens": 10, "temperature": 0}
    answer = client.chat.completions.create(**options)
    assert answer.choices[0].message.content == expected.completion
    parts = [part.choices[0].delta.content or "" for part in client.chat.completions.create(**options, stream=True)]
    assert "".join(parts) == expected.completion
    newer = {**options, "max_completion_tokens": options.pop("max_tokens")}
    newer.pop("max_tokens")
    assert client.chat.completions.create(**newer).choices[0].message.content == expected.completion


def test_several_clients_get_each_their_own(client, folder):
    prompts = [f"number {number}: " for number in range(6)]
    expected = [
        mixdepth.generate(folder, prompt, max_new_tokens=16, do_sample=False)[0].completion for prompt in prompts
    ]
    answers = {}

    def ask(prompt):
        options = {"model": "small-mod", "prompt": prompt, "max_tokens": 16, "temperature": 0, "stream": True}
        answers[prompt] = "".join(part.choices[0].text for part in client.completions.create(**options))

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[prompt] for prompt in prompts] == expected


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"model": "small-mod", "prompt": 5}),
        ("completions", {"model": "small-mod", "prompt": "x", "surprise": 1}),
        ("completions", {"model": "another", "prompt": "x"}),
        ("completions", {"model": "small-mod", "prompt": "x", "temperature": "warm"}),
        ("completions", {"model": "small-mod", "prompt": "x", "temperature": -1, "max_tokens": 4}),
        ("completions", {"model": "small-mod", "prompt": "x", "max_tokens": -5}),
        ("completions", {"model": "small-mod", "prompt": ""}),
        ("completions", {"model": "small-mod", "prompt": "x", "n": 2}),
        ("completions", {"model": "small-mod", "prompt": "x" * 5000}),
        ("completions", {"model": "small-mod", "prompt": "x", "stream": True, "temperature": -1}),
        ("completions", {"model": "small-mod", "prompt": "x", "stream": True, "top_p": 2}),
        ("completions", b'{"model": "small-mod", "prompt": "x", "stream": true, "temperature": NaN}'),
        ("completions", {"model": "small-mod", "prompt": "x", "stream": True, "max_tokens": -5}),
        ("completions", {"model": "small-mod", "prompt": "x", "stream": True, "generation_config": '{"num_beams": 2}'}),
        ("completions", {"model": "small-mod", "prompt": "x", "generation_config": '{"num_beams": 0}'}),
        ("completions", {"prompt": "x", "generation_config": '{"num_beams": 1000000}'}),
        ("completions", {"prompt": "x", "stop": ["x" * 100] * 2000}),
        ("completions", {"prompt": "x", "logit_bias": {"5": 100}}),
        ("completions", {"prompt": "x", "temperature": 1e-320}),
        ("completions", {"prompt": "x", "generation_config": '{"min_new_tokens": 9}', "max_tokens": 5}),
        ("completions", {"prompt": "x", "generation_config": '{"eos_token_id": 256}', "stream": True}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "logit_bias": {"999": 1}}),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "logit_bias": {"999": 1}, "stream": True},
        ),
        ("completions", {**STATIC, "stream": True}),
        ("chat/completions", {"model": "small-mod", "messages": [{"role": "user", "content": "x"}], **WARM}),
        ("responses", {"model": "small-mod", "input": "x", "stream": True, "max_output_tokens": -4}),
        ("chat/completions", {"model": "small-mod"}),
        ("chat/completions", {"model": "small-mod", "messages": "hello"}),
        ("chat/completions", {"model": "small-mod", "messages": []}),
        ("chat/completions", {"model": "small-mod", "messages": [{"content": "x"}]}),
        ("completions", b"{not json"),
        ("completions", b"[1, 2]"),
        ("completions", b"[" * 100_000),
        ("nothing", {}),
    ],
)
def test_a_bad_request_gets_a_4xx_and_the_server_lives_on(path, body, server, client):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{server}/v1/{path}", data, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(request, timeout=60)
    assert 400 <= refusal.value.code < 500
    answer = json.loads(refusal.value.read())
    assert answer["error"]["type"] == "invalid_request_error"
    assert len(answer["error"]["message"]) < 410
    assert client.completions.create(model="small-mod", prompt="x", max_tokens=1).choices


@pytest.mark.parametrize("path", ["load_model", "reset", "v1/systemone", "v1/audio/transcriptions"])
def test_no_other_model_is_loaded_for_a_client(path, server):
    data = json.dumps({"model": "another/model"}).encode()
    request = urllib.request.Request(f"{server}/{path}", data, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(request, timeout=60)


@pytest.mark.parametrize("path", ["docs", "redoc", "openapi.json"])
def test_there_are_no_pages_with_scripts_from_elsewhere(path, server):
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{server}/{path}", timeout=60)


def test_the_model_can_be_looked_up_by_its_name(client):
    assert client.models.retrieve("small-mod").id == "small-mod"
    with pytest.raises(openai.NotFoundError, match="this server has one model, 'small-mod', not 'gpt2'"):
        client.models.retrieve("gpt2")


def test_a_seed_and_a_logit_bias_have_an_effect(client):
    options = {"model": "small-mod", "prompt": "def f(", "max_tokens": 20}
    first, again, other = (client.completions.create(**options, seed=seed).choices[0].text for seed in (1, 1, 2))
    assert first == again
    assert first != other
    messages = [{"role": "user", "content": "hello"}]
    answer = client.chat.completions.create(
        model="small-mod", messages=messages, max_tokens=4, logit_bias={str(ord("F")): 100}
    )
    assert answer.choices[0].message.content == "FFFF"


def test_a_seed_ends_with_its_answer(client):
    texts = set()
    for _ in range(2):
        client.completions.create(model="small-mod", prompt="x", max_tokens=1, seed=1)
        texts.add(client.completions.create(model="small-mod", prompt="x", max_tokens=20).choices[0].text)
    assert len(texts) == 2


def test_a_generation_config_changes_the_settings_of_the_model(client, folder):
    expected = mixdepth.generate(
        folder, "def f(", max_new_tokens=30, do_sample=False, no_repeat_ngram_size=1, repetition_penalty=2.0
    )[0]
    answer = client.completions.create(
        model="small-mod",
        prompt="def f(",
        max_tokens=30,
        temperature=0,
        extra_body={"generation_config": '{"no_repeat_ngram_size": 1, "repetition_penalty": 2}'},
    )
    assert answer.choices[0].text == expected.completion


@pytest.mark.parametrize("temperature", [0, 1])
def test_settings_that_leave_no_token_are_refused(temperature, client):
    """Each of the 256 tokens may be used once. After that, greedy decoding would take the first one again."""
    with pytest.raises(openai.BadRequestError, match="no token is left to continue with"):
        client.completions.create(
            model="small-mod",
            prompt="x",
            max_tokens=300,
            temperature=temperature,
            extra_body={"generation_config": '{"no_repeat_ngram_size": 1}'},
        )


def num_threads(process):
    return len(list(Path(f"/proc/{process.pid}/task").iterdir()))


def test_requests_leave_no_threads_behind(client, server_process):
    def complete(temperature):
        with suppress(openai.BadRequestError):
            client.completions.create(model="small-mod", prompt="x", max_tokens=1, temperature=temperature)

    for _ in range(4):  # both threads that make tokens have begun
        complete(1)
    before = num_threads(server_process)
    for index in range(20):
        complete(1 if index % 2 else -1)
    assert num_threads(server_process) == before


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_when_its_client_leaves(stream, server, client):
    """The clients of eight answers, of more than a second each, leave."""
    port = int(server.rpartition(":")[2])
    body = json.dumps({"prompt": "x", "max_tokens": 500, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
    for connection in connections:
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    time.sleep(0.3)
    for connection in connections:
        connection.close()
    begin = time.monotonic()
    client.completions.create(model="small-mod", prompt="x", max_tokens=1)
    assert time.monotonic() - begin < 1


async def post(app, request):
    """Send one request to an application in this process; return the status and the body of its answer."""
    said = asyncio.Queue()
    said.put_nowait({"type": "http.request", "body": json.dumps(request).encode(), "more_body": False})
    answer = []

    async def send(message):
        answer.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    path = "/v1/completions"
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    await app(scope, said.get, send)
    return answer[0]["status"], b"".join(message.get("body", b"") for message in answer).decode()


def ask(app, *requests):
    """Send these requests at once, and return their answers."""

    async def post_all():
        return await asyncio.gather(*(post(app, request) for request in requests))

    return asyncio.run(post_all())


def end(app):
    """End the application as Ctrl-C does: its threads end."""
    said = asyncio.Queue()
    for name in ("startup", "shutdown"):
        said.put_nowait({"type": f"lifespan.{name}"})

    async def send(message):
        assert message["type"].endswith(".complete")

    asyncio.run(app({"type": "lifespan"}, said.get, send))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "plain"
    model = dense(vocab_size=256, max_position_embeddings=512)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("in_batches", [False, True])
def test_an_answer_that_takes_too_long_ends_with_an_error(in_batches, plain):
    app, _ = make_app(str(plain), continuous_batching=in_batches, limits=Limits(answer_seconds=0.3))
    whole = {"prompt": "x", "max_tokens": 511}
    [(status, text)] = ask(app, whole)
    sentence = "the answer took longer than 0.3 seconds: ask for fewer tokens"
    assert (status, json.loads(text)["error"]["message"]) == (400, sentence)
    [(status, text)] = ask(app, {**whole, "stream": True})
    assert status == 200
    assert text.endswith(f'data: {{"error": "{sentence}"}}\n\n')
    end(app)


def test_a_prompt_has_fewer_tokens_than_the_positions_and_the_limit(plain):
    app, _ = make_app(str(plain), limits=Limits(prompt_tokens=100))
    answers = ask(app, *({"prompt": "x" * length, "max_tokens": 1} for length in (100, 101, 10_000)))
    assert [status for status, _ in answers] == [200, 400, 400]
    assert "has 101 characters, and this server takes 100 tokens" in answers[1][1]
    assert "has 10000 characters" in answers[2][1]


def test_a_prompt_of_few_letters_and_many_tokens_is_refused(plain):
    """A character of four bytes has four tokens in this model."""
    app, _ = make_app(str(plain), limits=Limits(prompt_tokens=100))
    for stream in (False, True):
        [(status, text)] = ask(app, {"prompt": "🙂" * 30, "stream": stream})
        assert status == 400
        assert "the prompt has 120 tokens, and this server takes 100" in text


def test_a_plain_model_answers_several_at_once_by_continuous_batching(plain):
    app, _ = make_app(str(plain), continuous_batching=True)
    requests = [{"prompt": f"number {number}: ", "max_tokens": 12} for number in range(6)]
    for status, text in ask(app, *requests, {**requests[0], "stream": True}):
        assert status == 200
        assert '"completion_tokens":12' in text
    [(status, text)] = ask(app, {**requests[0], "temperature": 0.5})
    assert status == 400
    assert "no effect under continuous batching" in text
    end(app)


def test_continuous_batching_reserves_memory_for_as_many_tokens_as_it_is_told():
    """By default continuous batching would take nine tenths of the memory of the machine."""
    config = Together(Limits(batch_tokens=1000))._cb_config
    assert config.num_blocks * config.page_size == 1024


def test_answers_under_continuous_batching_wait_for_room(plain):
    app, _ = make_app(str(plain), continuous_batching=True, limits=Limits(batch_tokens=256))
    [(status, text)] = ask(app, {"prompt": "x", "max_tokens": 300})
    assert status == 200
    assert '"completion_tokens":255' in text
    answers = ask(app, *[{"prompt": "x" * 100, "max_tokens": 100}] * 3)  # together they are longer
    assert [status for status, _ in answers] == [200] * 3
    [(status, text)] = ask(app, {"prompt": "x" * 256})
    assert status == 400
    assert "this server takes 255 tokens" in text
    end(app)


def test_the_private_names_of_transformers_server_are_those_we_lean_on():
    """sampling/answering.py changes what these functions do. If one of them disappears, read that module again."""
    from transformers.cli.serving import chat_completion, completion, response, utils

    for handler in (chat_completion.ChatCompletionHandler, completion.CompletionHandler, response.ResponseHandler):
        for name in ("_streaming", "_non_streaming"):
            first = list(signature(getattr(handler, name)).parameters)[:3]
            assert first == ["self", "request_id", "model"]
        assert list(signature(handler._build_generation_config).parameters)[-1] == "use_cb"
    plain = ["self", "model", "processor", "inputs", "gen_config", "request_id"]
    for manager in (utils.GenerateManager, utils.CBGenerateManager):
        assert list(signature(manager.generate_streaming).parameters) == [*plain, "response_parser"]
        assert list(signature(manager.generate_non_streaming).parameters) == plain
    assert utils.CBGenerateManager()._cb is None
    assert utils._StreamError("words").msg == "words"


def test_continuous_batching_and_a_taken_port_are_refused(folder):
    with pytest.raises(ValueError, match="continuous batching"):
        make_app(str(folder), continuous_batching=True)
    for port in ("0", "99999"):
        process = call("serve", str(folder), "--port", port)
        assert (process.returncode, process.stderr) == (2, f"mixdepth: port must be from 1 to 65535, not {port}\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = call("serve", str(folder), "--port", port)
    assert process.returncode == 2
    assert f"cannot listen at 127.0.0.1:{port} (Address already in use): choose another" in process.stderr
