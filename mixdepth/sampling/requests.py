"""The requests that a client may send to the server: each field by its name, with its values. No torch."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mixdepth.sampling.server_limits import Limits, shown

IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key")
"""Fields that label a request for the client's own records. They have no influence on the answer."""

WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "background": (False,),
        "best_of": (1,),
        "echo": (False,),
        "logprobs": (False,),
        "modalities": (["text"],),
        "n": (1,),
        "parallel_tool_calls": (True,),
        "presence_penalty": (0, 0.0),
        "response_format": ({"type": "text"},),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "stream_options": ({"include_usage": True}, {"include_usage": False}),  # the last piece has it in any case
        "text": ({"format": {"type": "text"}},),
        "tool_choice": ("auto",),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }
)
"""Fields of OpenAI's interface that transformers' server ignores, with the values that ask for what it does anyway.

A request may have these fields with these values. With any other value it is refused."""

TEXT_PARTS = ("text", "input_text", "output_text")
"""Kinds of content that a language model reads. Transformers' server drops other kinds, such as images."""

PART_FIELDS = ("type", "text")
"""Fields of a part of a message that transformers' server reads."""

MESSAGE_FIELDS = ("role", "content", "tool_calls", "tool_call_id")
"""Fields of a chat message that transformers' server reads."""

ITEM_FIELDS = ("role", "content", "type", "id", "status")
"""Fields of a message in the input of `/v1/responses`; the last two are labels."""

TOOL_ITEMS = ("function_call", "function_call_output")
"""Kinds of items without a role in the input of `/v1/responses`."""

SEEDS = (-(2**63), 2**63 - 1)
"""The lowest and the highest seed that torch takes."""

MAX_BIASES = 300
MAX_END_TOKENS = 64

SAMPLING_SETTINGS = ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Settings that change how tokens are drawn. They have no effect where the most likely token is taken."""

BEAM_SETTINGS = ("early_stopping", "length_penalty")
"""Settings that have no effect without a beam search."""

SAME_SETTING: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "max_new_tokens": ("max_tokens", "max_completion_tokens", "max_output_tokens"),
        "repetition_penalty": ("frequency_penalty",),
        "stop_strings": ("stop",),
        "temperature": ("temperature",),
        "top_p": ("top_p",),
    }
)
"""Settings of `generation_config`, with the fields of a request that set the same thing."""


@dataclass(frozen=True)
class Kind:
    """The values that a field may have, and the words for them in a refusal."""

    words: str
    has: Callable[[Any], bool]
    """Says whether a value is of this kind."""
    is_number: bool = False
    """Whether values become floats: for some settings `generate` accepts 1.0 and refuses 1."""

    def check(self, name: str, value: Any) -> Any:
        """Refuse a value that is not of this kind; return it as `generate` takes it."""
        if not self.has(value):
            raise ValueError(f"{name} must be {self.words}, not {shown(value)}")
        return float(value) if self.is_number else value


@dataclass(frozen=True, kw_only=True)
class Template:
    """What a client can set in the chat template of a model."""

    settings: frozenset[str] = frozenset()
    """Names in the template that a client may set by `chat_template_kwargs`."""

    has_tools: bool = False
    """Whether the template shows the tools of a request to the model."""

    has_tool_calls: bool = False
    """Whether the template shows the calls of tools that earlier messages made to the model."""


@dataclass(frozen=True, kw_only=True)
class UnderstoodRequest:
    """A request after all of its fields were checked."""

    body: dict[str, Any]
    """The fields under the names of transformers' server. Each of them has an effect."""
    settings: dict[str, Any]
    """The `generation_config` of the request. It replaces settings of the model."""
    seed: int | None
    is_streamed: bool
    num_letters: int
    """The length of the texts that become the prompt, in characters."""


def check_letters(name: str, value: object) -> None:
    """Refuse half of a surrogate pair. It is not a character: no tokenizer takes it, and no answer could quote it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} has text that is not Unicode") from error


def parse_object(name: str, text: str | bytes) -> dict[str, Any]:
    """Parse a text that must be a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a JSON object, not {shown(value)}")
    check_letters(name, value)
    return value


def whole(low: int, high: int | None = None) -> Kind:
    """Return the kind of whole numbers from `low` to `high`. Neither 5.0 nor "5" nor true is a whole number."""

    def has(value: Any) -> bool:
        if not isinstance(value, int) or isinstance(value, bool):
            return False
        return low <= value and (high is None or value <= high)

    return Kind(f"a whole number {_range(low, high)}", has)


def number(low: float, high: float, *, above: bool = False, or_zero: bool = False) -> Kind:
    """Return the kind of numbers from `low` to `high`.

    With `above`, `low` itself is not one of them. With `or_zero`, 0 is one of them, too.
    """

    def has(value: Any) -> bool:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return False
        if or_zero and value == 0:
            return True
        if above and value == low:
            return False
        return low <= value <= high  # which is false for NaN

    limits = f"above {low} and up to {high}" if above else _range(low, high)
    words = f"0 or a number {limits}" if or_zero else f"a number {limits}"
    return Kind(words, has, is_number=True)


def _range(low: float, high: float | None) -> str:
    return f"of at least {low}" if high is None else f"from {low} to {high}"


FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a text", lambda value: isinstance(value, str))
TEXT_OR_LIST = Kind("a text or a list", lambda value: isinstance(value, str | list))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
SOME_OBJECTS = Kind("a list of objects", lambda value: _is_list_of(value, lambda item: isinstance(item, dict)))
TEMPERATURE = number(0.001, 100, or_zero=True)
"""A score that is divided by a smaller temperature than these may not be finite."""
SHARE = number(0, 1, above=True)
TOKEN = whole(0)


def _is_list_of(value: Any, has: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(has, value))


def _are_tokens(value: Any) -> bool:
    if _is_list_of(value, TOKEN.has):
        return 1 <= len(value) <= MAX_END_TOKENS
    return TOKEN.has(value)


TOKENS = Kind(f"a token or a list of at most {MAX_END_TOKENS} tokens", _are_tokens)


def stop_strings(limits: Limits) -> Kind:
    """Return the kind of one or more texts at which an answer stops."""

    def is_stop(value: Any) -> bool:
        return isinstance(value, str) and 1 <= len(value) <= limits.stop_letters

    def has(value: Any) -> bool:
        if _is_list_of(value, is_stop):
            return 1 <= len(value) <= limits.stops
        return is_stop(value)

    return Kind(f"a text, or up to {limits.stops} texts, of 1 to {limits.stop_letters} letters", has)


def _is_bias(value: Any) -> bool:
    if not isinstance(value, dict) or not 1 <= len(value) <= MAX_BIASES:
        return False
    are_tokens = all(key.isascii() and key.isdigit() and len(key) < 10 for key in value)
    return are_tokens and all(map(number(-100, 100).has, value.values()))


BIAS = Kind(f"an object with up to {MAX_BIASES} tokens as keys and numbers from -100 to 100", _is_bias)


def generation_settings(limits: Limits) -> dict[str, Kind]:
    """Return the fields of `generation_config` that a request may have.

    Any other field either has no effect on an answer, or could take time and memory without a limit.
    """
    return {
        "do_sample": FLAG,
        "early_stopping": Kind("true, false or 'never'", lambda value: FLAG.has(value) or value == "never"),
        "eos_token_id": TOKENS,
        "epsilon_cutoff": number(0, 0.999),
        "eta_cutoff": number(0, 0.999),
        "length_penalty": number(-5, 5),  # the exponent of a length, and the power must be finite
        "max_new_tokens": whole(1),
        "min_new_tokens": whole(0),
        "min_p": number(0, 1),
        "no_repeat_ngram_size": whole(0, 64),
        "num_beams": whole(1, limits.beams),
        "renormalize_logits": FLAG,
        "repetition_penalty": number(0.01, 100),
        "stop_strings": stop_strings(limits),
        "temperature": TEMPERATURE,
        "top_k": whole(0),
        "top_p": SHARE,
        "typical_p": SHARE,
    }


def request_fields(path: str, limits: Limits) -> dict[str, Kind]:
    """Return the fields that have an effect on an answer, for one of the paths in `INPUT_FIELD`."""
    common = {
        "generation_config": TEXT,
        "model": TEXT,
        "seed": whole(*SEEDS),
        "stream": FLAG,
        "temperature": TEMPERATURE,
        "top_p": SHARE,
    }
    if path == "/v1/responses":
        return {
            **common,
            "input": TEXT_OR_LIST,
            "instructions": TEXT,
            "max_output_tokens": whole(1),
            "tools": SOME_OBJECTS,
        }
    sampling = {
        "frequency_penalty": number(-0.99, 2),  # transformers turns x into a repetition penalty of 1 + x
        "max_tokens": whole(1),
        "stop": stop_strings(limits),
    }
    if path == "/v1/completions":
        return {**common, **sampling, "prompt": TEXT, "suffix": TEXT}
    return {
        **common,
        **sampling,
        "chat_template_kwargs": OBJECT,
        "logit_bias": BIAS,
        "max_completion_tokens": whole(1),
        "messages": SOME_OBJECTS,
        "tools": SOME_OBJECTS,
    }


INPUT_FIELD = {"/v1/completions": "prompt", "/v1/chat/completions": "messages", "/v1/responses": "input"}
"""The paths at which the server answers, each with the field that a request must have."""

BATCH_FIELDS = ("model", "stream", "max_tokens", "max_completion_tokens", "max_output_tokens")
"""The fields that have an effect under continuous batching, besides those that make the prompt."""


def understand(
    path: str, body: Mapping[str, Any], limits: Limits, template: Template | None, *, in_batches: bool = False
) -> UnderstoodRequest:
    """Check each field of a request. A field that the server would silently ignore is refused by its name.

    The `template` of a model without a chat template is None. With `in_batches` all requests share the sampling
    settings of the model.
    """
    check_letters("the body", body)
    # 1. Leave out what is null, what has no effect by definition, and what asks for nothing.
    fields = {}
    for name, value in body.items():
        if value is None or name in IGNORED or _asks_for_nothing(name, value):
            continue
        fields[name] = value
    # 2. Every other field must be known, and have a value of its kind.
    kinds = request_fields(path, limits)
    for name, value in fields.items():
        if name not in kinds:
            raise ValueError(f"{_named(name, value)} is not supported: leave it out")
        kinds[name].check(name, value)
    field = INPUT_FIELD[path]
    if not fields.get(field):
        raise ValueError(f"the {field} is empty: there is nothing to continue")
    if in_batches:
        _check_batched(fields, field)
    # 3. Some fields have fields of their own, and some have no effect together with others.
    settings = _settings(fields, limits)
    _check_together(fields, settings)
    num_letters = _check_input(fields, field) + len(fields.get("instructions", ""))
    if path != "/v1/completions":
        _check_template(fields, fields[field], template)
    # 4. Rename and convert what transformers' server calls or takes differently.
    seed = fields.pop("seed", None)
    is_streamed = fields.setdefault("stream", False)
    limit = fields.pop("max_completion_tokens", None)  # the newer name of max_tokens
    if limit is not None:
        fields["max_tokens"] = limit
    if "logit_bias" in fields:
        fields["logit_bias"] = {token: float(bias) for token, bias in fields["logit_bias"].items()}
    return UnderstoodRequest(
        body=fields, settings=settings, seed=seed, is_streamed=is_streamed, num_letters=num_letters
    )


def _asks_for_nothing(name: str, value: Any) -> bool:
    """Return whether a field has a value that asks for what the server does anyway. 1 is not True here."""
    harmless_values = WITHOUT_EFFECT.get(name, ())
    return any(type(value) is type(harmless) and value == harmless for harmless in harmless_values)


def _named(name: str, value: Any) -> str:
    """Return a field for a message, as it was given; a long name or value is cut."""
    shortened = name if len(name) <= 60 else f"{name[:60]}..."
    return f"{shortened}={shown(value)}"


def _settings(fields: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """Take the `generation_config` out of a request, and check each of its fields."""
    if "generation_config" not in fields:
        return {}
    kinds = generation_settings(limits)
    settings = {}
    for name, value in parse_object("generation_config", fields.pop("generation_config")).items():
        if name not in kinds:
            raise ValueError(f"generation_config has no {_named(name, value)} here; it may have {', '.join(kinds)}")
        if value is not None:
            settings[name] = kinds[name].check(name, value)
    return settings


def _check_together(fields: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse fields that have no effect because of others."""
    if "max_tokens" in fields and "max_completion_tokens" in fields:
        raise ValueError("max_tokens and max_completion_tokens are two names of one setting: leave one out")
    for setting, names in SAME_SETTING.items():
        for name in names:
            if setting in settings and name in fields:
                raise ValueError(f"{name} and {setting} in generation_config set the same: leave one out")
    # 1. Beams
    num_beams = settings.get("num_beams", 1)
    if num_beams > 1 and fields.get("stream"):
        raise ValueError(f"num_beams={num_beams} cannot be streamed, since a beam search knows its answer at the end")
    for name in BEAM_SETTINGS:
        if name in settings and num_beams == 1:
            raise ValueError(f"{_named(name, settings[name])} has no effect without num_beams above 1: leave it out")
    # 2. Sampling
    temperature = fields.get("temperature", settings.get("temperature"))
    if temperature == 0 and settings.get("do_sample"):
        raise ValueError("temperature=0 takes the most likely token, and do_sample=True samples: leave one out")
    if temperature == 0 or settings.get("do_sample") is False:
        for name in SAMPLING_SETTINGS:
            value = fields.get(name, settings.get(name))
            sent_by_many_clients = name == "top_p" or (name == "temperature" and value == 0)
            if value is not None and not sent_by_many_clients:
                raise ValueError(
                    f"{_named(name, value)} has no effect where the most likely token is taken: leave it out"
                )


def _check_batched(fields: Mapping[str, Any], field: str) -> None:
    """Refuse fields that have no effect under continuous batching."""
    prompt_fields = (field, "instructions", "tools", "chat_template_kwargs", "suffix")
    for name, value in fields.items():
        if name not in BATCH_FIELDS and name not in prompt_fields:
            raise ValueError(
                f"{_named(name, value)} has no effect under continuous batching, where all requests share the model's "
                "own settings: leave it out, or start the server without --continuous-batching"
            )


def _check_input(fields: Mapping[str, Any], field: str) -> int:
    """Check the texts that become the prompt; return their length in characters."""
    value = fields[field]
    if isinstance(value, str):
        return len(value)
    for index, item in enumerate(value):
        OBJECT.check(f"{field}[{index}]", item)
    if field == "input":
        return _check_items(value, fields.get("instructions"))
    return sum(_check_message(message, f"messages[{index}]") for index, message in enumerate(value))


def _check_fields(item: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    """Refuse fields with another name, unless they are empty."""
    for name, value in item.items():
        if name not in names and value not in (None, [], ""):
            raise ValueError(f"{where} has {_named(name, value)}, which the model would not see: leave it out")


def _check_message(message: Mapping[str, Any], where: str) -> int:
    """Check a chat message; return its length in characters."""
    if "role" not in message:
        raise ValueError(f"{where} has no role")
    TEXT.check(f"{where}.role", message["role"])
    _check_fields(message, MESSAGE_FIELDS, where)
    if "tool_calls" in message:
        if message.get("content"):
            raise ValueError(f"{where} has content next to tool_calls, which would not be seen: make two messages")
        SOME_OBJECTS.check(f"{where}.tool_calls", message["tool_calls"])
    return _check_content(message.get("content"), f"{where}.content")


def _check_items(items: Sequence[Any], instructions: str | None) -> int:
    """Check the items in the input of `/v1/responses`; return their length in characters.

    They are messages and calls of tools, or the parts of one message.
    """
    if "role" not in items[0]:
        return _check_content(items, "input")
    if items[0]["role"] == "system" and instructions:
        raise ValueError("instructions would take the place of the system message in input: leave one out")
    num_letters = 0
    previous: Mapping[str, Any] = {}
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if item.get("type") == "reasoning":
            raise ValueError(f"{where} has type='reasoning', which the model would not see: leave it out")
        if "role" in item:
            TEXT.check(f"{where}.role", item["role"])
            _check_fields(item, ITEM_FIELDS, where)
            num_letters += _check_content(item.get("content"), f"{where}.content")
        elif item.get("type") not in TOOL_ITEMS:
            raise ValueError(f"{where} has neither a role nor one of the types {', '.join(TOOL_ITEMS)}")
        follows_content = previous.get("role") == "assistant" and previous.get("content")
        if item.get("type") == "function_call" and follows_content:
            raise ValueError(f"input[{index - 1}] has content before a call of a tool, which would not be seen")
        previous = item
    return num_letters


def _check_content(content: Any, where: str) -> int:
    """Check the content of a message; return its length in characters."""
    if content is None:
        return 0
    TEXT_OR_LIST.check(where, content)
    if isinstance(content, str):
        return len(content)
    num_letters = 0
    for part in content:
        OBJECT.check(f"a part of {where}", part)
        if part.get("type") not in TEXT_PARTS:
            raise ValueError(f"{where} has a part with type={shown(part.get('type'))}: this model reads text alone")
        TEXT.check(f"the text of a part of {where}", part.get("text"))
        _check_fields(part, PART_FIELDS, f"a part of {where}")
        num_letters += len(part["text"])
    return num_letters


def _check_template(fields: Mapping[str, Any], items: str | list[Any], template: Template | None) -> None:
    """Refuse everything that the chat template would not show to the model."""
    if template is None:
        raise ValueError("this model has no chat template: use /v1/completions")
    if fields.get("tools") and not template.has_tools:
        raise ValueError("tools is not supported, because the chat template of this model does not mention them")
    if isinstance(items, list) and not template.has_tool_calls:
        for item in items:
            if item.get("tool_calls") or item.get("type") == "function_call":
                raise ValueError("the chat template of this model does not show calls of tools: leave them out")
    for name, value in fields.get("chat_template_kwargs", {}).items():
        if name not in template.settings:
            raise ValueError(f"chat_template_kwargs has {_named(name, value)}, which is not a setting of the template")
        if not isinstance(value, bool | int | float | str):
            raise ValueError(f"{name} in chat_template_kwargs must be a text, a number, true or false")
