"""The server, in a process of its own, asked by the openai package."""

import json
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request

import openai
import pytest
from corpora import call, free_port, start
from tiny import dense

import mixdepth
from mixdepth.serving import make_app
from mixdepth.tokens import byte_tokenizer

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
def server(folder):
    """A server on a free port of this machine; it ends with Ctrl-C, and says nothing of it."""
    port, log = free_port(), folder.parent / "log"
    process = start("serve", str(folder), "--port", str(port), log=log)
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
    data = json.dumps({"model": "somebody/else"}).encode()
    request = urllib.request.Request(f"{server}/{path}", data, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(request, timeout=60)


@pytest.mark.parametrize("path", ["docs", "redoc", "openapi.json"])
def test_there_are_no_pages_with_scripts_from_elsewhere(path, server):
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{server}/{path}", timeout=60)


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
    """Each of the 256 tokens may be used once. Greedily the first would be taken all the same."""
    with pytest.raises(openai.BadRequestError, match="no token is left to continue with"):
        client.completions.create(
            model="small-mod",
            prompt="x",
            max_tokens=300,
            temperature=temperature,
            extra_body={"generation_config": '{"no_repeat_ngram_size": 1}'},
        )


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
