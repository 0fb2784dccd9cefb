"""Each field of a request has an effect, asks for nothing, or is refused by its name."""

import json
import re

import pytest
from corpora import call

from mixdepth.cli import main
from mixdepth.sampling.requests import Template, understand
from mixdepth.sampling.server_limits import Limits, error_body, one_line, shown

TEXT, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
PLAIN = {
    TEXT: {"prompt": "def f("},
    CHAT: {"messages": [{"role": "user", "content": "hello"}]},
    RESPONSES: {"input": "hello"},
}
IMAGE = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}
CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
SIMPLE, DEFAULT = Template(), Limits()
TOOL = {"type": "function", "function": {"name": "f"}}


def understood(path, template=SIMPLE, limits=DEFAULT, in_batches=False, **fields):
    return understand(path, {**PLAIN[path], **fields}, limits, template, in_batches=in_batches)


def settings(**fields):
    return {"generation_config": json.dumps(fields)}


def message(**fields):
    return {"messages": [{"role": "user", **fields}]}


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        # 1. Fields that transformers' server would pass over
        (TEXT, {"logit_bias": {"5": 100}}, "logit_bias={'5': 100} is not supported"),
        (TEXT, {"stream_options": {"include_usage": True, "x": 1}}, "stream_options="),
        (TEXT, {"surprise": 1}, "surprise=1 is not supported"),
        (TEXT, {"n": 2}, "n=2 is not supported"),
        (TEXT, {"n": True}, "n=True"),
        (TEXT, {"best_of": 3}, "best_of=3"),
        (TEXT, {"echo": True}, "echo=True"),
        (TEXT, {"logprobs": 0}, "logprobs=0"),
        (TEXT, {"presence_penalty": 0.5}, "presence_penalty=0.5"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format="),
        (CHAT, {"reasoning_effort": "high"}, "reasoning_effort='high'"),
        (CHAT, {"tool_choice": "required"}, "tool_choice='required'"),
        (CHAT, {"chat_template": "{{ x }}"}, "chat_template="),
        (RESPONSES, {"previous_response_id": "x"}, "previous_response_id='x'"),
        (RESPONSES, {"stop": "x"}, "stop='x'"),
        (RESPONSES, {"truncation": "auto"}, "truncation='auto'"),
        # 2. Values of another kind
        (TEXT, {"prompt": ["x"]}, "prompt must be a text, not"),
        (TEXT, {"prompt": ""}, "the prompt is empty"),
        (TEXT, {"prompt": "\ud800"}, "text that is not Unicode"),
        (TEXT, {"max_tokens": "5"}, "max_tokens must be a whole number of at least 1, not '5'"),
        (TEXT, {"max_tokens": 5.5}, "max_tokens must be"),
        (TEXT, {"max_tokens": 1e30}, "max_tokens must be"),
        (TEXT, {"max_tokens": 0}, "max_tokens must be"),
        (TEXT, {"temperature": 1e-320}, "temperature must be 0 or a number from 0.001 to 100"),
        (TEXT, {"temperature": float("inf")}, "temperature must be"),
        (TEXT, {"temperature": float("nan")}, "temperature must be"),
        (TEXT, {"temperature": "warm"}, "temperature must be"),
        (TEXT, {"top_p": 0}, "top_p must be a number above 0 and up to 1"),
        (TEXT, {"stream": "yes"}, "stream must be true or false"),
        (TEXT, {"seed": 2**64}, "seed must be"),
        (TEXT, {"frequency_penalty": -2}, "frequency_penalty must be"),
        (TEXT, {"stop": 3}, "stop must be a text, or up to 4 texts"),
        (TEXT, {"stop": ""}, "stop must be"),
        (TEXT, {"stop": []}, "stop must be"),
        (TEXT, {"stop": ["x"] * 5}, "stop must be"),
        (TEXT, {"stop": "x" * 65}, "stop must be"),
        (CHAT, {"logit_bias": {"5": float("nan")}}, "logit_bias must be"),
        (CHAT, {"logit_bias": {"x": 1}}, "logit_bias must be"),
        (CHAT, {"logit_bias": {str(token): 1 for token in range(301)}}, "logit_bias must be"),
        # 3. Inside generation_config
        (TEXT, {"generation_config": "[]"}, "generation_config must be a JSON object"),
        (TEXT, {"generation_config": "{"}, "generation_config is not JSON"),
        (TEXT, {"generation_config": {"top_k": 5}}, "generation_config must be a text"),
        (TEXT, settings(num_beams=1_000_000), "num_beams must be a whole number from 1 to 4, not 1000000"),
        (TEXT, settings(num_return_sequences=9), "generation_config has no num_return_sequences=9"),
        (TEXT, settings(custom_generate="evil/code"), "generation_config has no custom_generate='evil/code'"),
        (TEXT, settings(cache_implementation="static"), "generation_config has no cache_implementation='static'"),
        (TEXT, settings(dola_layers="low"), "generation_config has no dola_layers"),
        (TEXT, settings(max_length=10**9), "generation_config has no max_length"),
        (TEXT, settings(top_k=-5), "top_k must be a whole number of at least 0, not -5"),
        (TEXT, settings(repetition_penalty=0), "repetition_penalty must be a number from 0.01 to 100, not 0"),
        (TEXT, settings(eos_token_id="x"), "eos_token_id must be a token or a list of at most 64 tokens, not 'x'"),
        (TEXT, settings(stop_strings=["x" * 100] * 2000), "stop_strings must be"),
        (TEXT, settings(temperature=1e-320), "temperature must be"),
        # 4. Fields that have no effect next to others
        (TEXT, {"stream": True, **settings(num_beams=2)}, "num_beams=2 cannot be streamed"),
        (TEXT, settings(length_penalty=2.5), "length_penalty=2.5 has no effect without num_beams"),
        (TEXT, {"temperature": 0, **settings(do_sample=True)}, "leave one out"),
        (TEXT, {"temperature": 0.5, **settings(do_sample=False)}, "temperature=0.5 has no effect"),
        (TEXT, {"temperature": 0, **settings(min_p=0.1)}, "min_p=0.1 has no effect"),
        (TEXT, {"temperature": 1, **settings(temperature=2)}, "set the same: leave one out"),
        (TEXT, {"max_tokens": 4, **settings(max_new_tokens=5)}, "set the same: leave one out"),
        (TEXT, {"stop": "x", **settings(stop_strings=["y"])}, "set the same: leave one out"),
        (CHAT, {"max_tokens": 4, "max_completion_tokens": 5}, "leave one out"),
        # 5. Messages
        (CHAT, {"messages": []}, "the messages is empty"),
        (CHAT, {"messages": "hello"}, "messages must be a list of objects"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0] has no role"),
        (CHAT, message(content=5), "messages[0].content must be a text or a list, not 5"),
        (CHAT, message(content=[IMAGE]), "has a part with type='image_url': this model reads text alone"),
        (CHAT, message(content=[{"type": "text"}]), "the text of a part of messages[0].content must be a text"),
        (CHAT, message(content=[{"type": "text", "text": "x", "cache_control": {"a": 1}}]), "cache_control"),
        (CHAT, message(content="x", name="Ada"), "messages[0] has name='Ada', which the model would not see"),
        (CHAT, message(content="x", tool_calls=[CALL]), "content next to tool_calls"),
        (CHAT, message(tool_calls=[CALL]), "does not show calls of tools"),
        (CHAT, {"tools": [TOOL]}, "tools is not supported"),
        (CHAT, {"chat_template_kwargs": {"chat_template": "x"}}, "which is not a setting of the template"),
        (
            RESPONSES,
            {"input": [{"type": "input_image", "image_url": "http://localhost"}]},
            "this model reads text alone",
        ),
        (RESPONSES, {"input": [{"role": "user", "content": "x"}, {"type": "item_reference"}]}, "input[1] has neither"),
        (RESPONSES, {"input": [{"role": "user", "content": "x"}, {"type": "reasoning"}]}, "would not see"),
        (RESPONSES, {"input": [{"role": "system", "content": "x"}], "instructions": "y"}, "leave one out"),
        (RESPONSES, {"input": [5]}, "input[0] must be an object"),
    ],
)
def test_a_field_that_cannot_be_followed_is_refused_by_its_name(path, fields, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        understood(path, **fields)


def test_a_call_of_a_tool_after_content_is_refused():
    items = [{"role": "assistant", "content": "x"}, {"type": "function_call", "name": "f"}]
    with pytest.raises(ValueError, match="content before a call of a tool, which would not be seen"):
        understood(RESPONSES, input=items)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (TEXT, {"n": 1, "best_of": 1, "echo": False, "logprobs": None, "presence_penalty": 0.0, "user": "Ada"}),
        (TEXT, {"stream_options": {"include_usage": True}}),
        (CHAT, {"n": 1, "response_format": {"type": "text"}, "tool_choice": "auto", "metadata": {"a": "b"}}),
        (RESPONSES, {"store": False, "truncation": "disabled", "text": {"format": {"type": "text"}}}),
    ],
)
def test_fields_that_ask_for_nothing_are_left_out(path, fields):
    assert understood(path, **fields) == understood(path)


def test_a_request_is_said_in_the_words_of_the_server():
    asked = understood(CHAT, max_completion_tokens=7, seed=3, logit_bias={"5": 100}, temperature=0, top_p=0.5)
    assert asked.body == {
        **PLAIN[CHAT],
        "max_tokens": 7,
        "logit_bias": {"5": 100.0},
        "temperature": 0,
        "top_p": 0.5,
        "stream": False,
    }
    assert (asked.seed, asked.is_streamed, asked.num_letters, asked.settings) == (3, False, 5, {})
    asked = understood(TEXT, stream=True, **settings(top_k=3, min_p=None))
    assert "generation_config" not in asked.body
    assert (asked.settings, asked.is_streamed) == ({"top_k": 3}, True)


def test_a_number_of_generation_config_may_be_written_without_a_point():
    """`generate` refuses a repetition penalty of 2, and takes 2.0."""
    taken = understood(TEXT, **settings(repetition_penalty=2, top_k=3)).settings
    assert {name: type(value) for name, value in taken.items()} == {"repetition_penalty": float, "top_k": int}


def test_letters_are_counted_in_all_that_becomes_the_prompt():
    parts = [{"type": "text", "text": "four"}, {"type": "input_text", "text": "five!"}]
    assert understood(CHAT, messages=[{"role": "system", "content": "x"}, *message(content=parts)["messages"]])
    assert understood(CHAT, **message(content=parts)).num_letters == 9
    assert understood(RESPONSES, input=parts, instructions="do").num_letters == 11
    assert understood(RESPONSES, input=[{"role": "user", "content": parts}]).num_letters == 9
    assert understood(TEXT).num_letters == 6


def test_a_template_says_what_it_can_be_told():
    template = Template(settings=frozenset({"enable_thinking"}), has_tools=True, has_tool_calls=True)
    fields = {"tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}, **message(tool_calls=[CALL])}
    assert understood(CHAT, template, **fields).body["tools"] == [TOOL]
    with pytest.raises(ValueError, match="must be a text, a number, true or false"):
        understood(CHAT, template, chat_template_kwargs={"enable_thinking": [1]})
    assert understood(TEXT, None)
    with pytest.raises(ValueError, match="this model has no chat template: use /v1/completions"):
        understood(CHAT, None)


def test_fields_without_effect_in_batches_are_refused_there_alone():
    assert understood(TEXT, temperature=0.5)
    assert understood(TEXT, in_batches=True, max_tokens=5, stream=True)
    for fields in ({"temperature": 0.5}, {"seed": 1}, {"stop": "x"}, settings(top_k=5)):
        with pytest.raises(ValueError, match="no effect under continuous batching"):
            understood(TEXT, in_batches=True, **fields)


def test_the_limits_are_heeded():
    limits = Limits(beams=7, stops=1, stop_letters=2)
    assert understood(TEXT, limits=limits, **settings(num_beams=7)).settings == {"num_beams": 7}
    for fields in (settings(num_beams=8), {"stop": ["a", "b"]}, {"stop": "abc"}):
        with pytest.raises(ValueError, match="must be"):
            understood(TEXT, limits=limits, **fields)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "many", None, float("nan")])
def test_a_limit_of_another_kind_is_refused(value):
    with pytest.raises(ValueError, match=f"beams must be a whole number of at least 1, not {value!r}"):
        Limits(beams=value)
    if value != 1.5:
        with pytest.raises(ValueError, match="answer_seconds must be a number above 0"):
            Limits(answer_seconds=False if value is True else value)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--beams", "0"), "beams must be a whole number of at least 1, not 0"),
        (("--body-bytes", "1e6"), "body_bytes must be a whole number of at least 1, not 1000000.0"),
        (("--prompt-tokens", "many"), "prompt_tokens must be a whole number of at least 1, not 'many'"),
        (("--answer-seconds", "-5"), "answer_seconds must be a number above 0 and up to a million, not -5"),
        (("--arrival-seconds", "nan"), "arrival_seconds must be a number above 0 and up to a million, not nan"),
        (
            ("--allowed-host", "http://models.example/"),
            "allowed_host must be a name or an address, as in models.example or 192.0.2.7, not 'http://models.example/'",
        ),
    ],
)
def test_a_wrong_limit_ends_the_command_with_one_sentence(arguments, sentence):
    process = call("serve", "nowhere", *arguments)
    assert (process.returncode, process.stderr) == (2, f"mixdepth: {sentence}\n")


def test_the_help_prints_each_limit_with_its_default(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for name, default in vars(Limits()).items():
        assert f"--{name.replace('_', '-')} " in text
        assert f"(default: {default})" in text


def test_what_a_client_sent_is_quoted_in_part():
    assert len(shown("x" * 10**6)) < 70
    assert len(shown({"x" * 10**6: ["y" * 10**6] * 1000})) < 600
    assert len(one_line("x " * 10**6)) < 410
    assert one_line("half \ud800 of a pair") == "half ? of a pair"
    assert error_body("no")["error"] == {"message": "no", "type": "invalid_request_error"}
    for fields in ({"x" * 10**6: 1}, {"n": "y" * 10**6}, settings(**{"z" * 10**6: 1})):
        with pytest.raises(ValueError, match=r"supported|generation_config has no") as refusal:
            understood(TEXT, **fields)
        assert len(str(refusal.value)) < 600
