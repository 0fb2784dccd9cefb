"""What a client may ask of the server: each field of a request by its name. No torch."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mixdepth.sampling.server_limits import Limits, shown

IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key")
"""Fields that label a request for somebody's books. They have no influence on the answer, whatever their value."""

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
"""Fields of OpenAI's interface that transformers' server ignores, with the values that ask for what it does anyway. A
request may have them with these values, and is refused with any other."""

TEXT_PARTS = ("text", "input_text", "output_text")
"""Kinds of content that a language model reads. Transformers' server drops the others, such as images."""

PART_FIELDS = ("type", "text")
"""Fields of a part of a message that transformers' server reads."""

MESSAGE_FIELDS = ("role", "content", "tool_calls", "tool_call_id")
"""Fields of a chat message that transformers' server reads."""

ITEM_FIELDS = ("role", "content", "type", "id", "status")
"""Fields of a message in the input of `/v1/responses`; the last two are labels."""

TOOL_ITEMS = ("function_call", "function_call_output")
"""Kinds of items without a role in the input of `/v1/responses`."""

SEEDS = (-(2**63), 2**63 - 1)

MAX_BIASES = 300
MAX_END_TOKENS = 64

OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Settings that change how tokens are drawn, and so have no effect where the likeliest is taken."""

OF_BEAMS = ("early_stopping", "length_penalty")
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
"""Settings of `generation_config`, with the fields of a request that set the same."""


@dataclass(frozen=True)
class Kind:
    """The values that a field may have, and the words for them in a refusal."""

    words: str
    has: Callable[[Any], bool]
    is_number: bool = False

    def check(self, name: str, value: Any) -> Any:
        """The value, if it is of this kind; a number as a float, since `generate` takes 1.0 where it refuses 1."""
        if not self.has(value):
            raise ValueError(f"{name} must be {self.words}, not {shown(value)}")
        return float(value) if self.is_number else value


@dataclass(frozen=True, kw_only=True)
class Template:
    """What the chat template of a model can be told."""

    settings: frozenset[str] = frozenset()
    """Names in the template that a client may set by `chat_template_kwargs`."""

    has_tools: bool = False
    """Whether it shows the tools of a request."""

    has_tool_calls: bool = False
    """Whether it shows the calls of tools that earlier messages made."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request that was understood."""

    body: dict[str, Any]
    """Its fields, in the words of transformers' server. Each of them has an effect."""
    settings: dict[str, Any]
    """Its `generation_config`, which changes the settings that the model brings."""
    seed: int | None
    is_streamed: bool
    num_letters: int
    """Length of the texts that become the prompt, in characters."""


def check_letters(name: str, value: object) -> None:
    """Refuse half of a surrogate pair, which is no letter: no tokenizer takes it, and no answer could quote it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} has text that is not Unicode") from error


def parse_object(name: str, text: str | bytes) -> dict[str, Any]:
    """The JSON object in a text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a JSON object, not {shown(value)}")
    check_letters(name, value)
    return value


def whole(low: int, high: int | None = None) -> Kind:
    """Whole numbers; neither 5.0 nor "5" nor true is one."""

    def has(value: Any) -> bool:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return is_whole and low <= value and (high is None or value <= high)

    return Kind(f"a whole number {_range(low, high)}", has)


def number(low: float, high: float, *, above: bool = False, or_zero: bool = False) -> Kind:
    """Numbers from `low` to `high`; only those above `low`; or those and 0."""

    def has(value: Any) -> bool:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return False
        if or_zero and value == 0:
            return True
        return low < value <= high if above else low <= value <= high  # neither holds for NaN

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
"""Below the smallest of these, scores that are divided by the temperature are no longer finite."""
SHARE = number(0, 1, above=True)
TOKENS = Kind(
    f"a token or a list of at most {MAX_END_TOKENS} tokens",
    lambda value: whole(0).has(value) or (_is_list_of(value, whole(0).has) and 0 < len(value) <= MAX_END_TOKENS),
)


def _is_list_of(value: Any, has: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(has, value))


def stop_strings(limits: Limits) -> Kind:
    def is_stop(value: Any) -> bool:
        return isinstance(value, str) and 1 <= len(value) <= limits.stop_letters

    def has(value: Any) -> bool:
        return is_stop(value) or (_is_list_of(value, is_stop) and 1 <= len(value) <= limits.stops)

    return Kind(f"a text, or up to {limits.stops} texts, of 1 to {limits.stop_letters} letters", has)


def _is_bias(value: Any) -> bool:
    if not isinstance(value, dict) or not 1 <= len(value) <= MAX_BIASES:
        return False
    are_tokens = all(key.isascii() and key.isdigit() and len(key) < 10 for key in value)
    return are_tokens and all(map(number(-100, 100).has, value.values()))


BIAS = Kind(f"an object with up to {MAX_BIASES} tokens as keys and numbers from -100 to 100", _is_bias)


def generation_settings(limits: Limits) -> dict[str, Kind]:
    """The fields of `generation_config` that a request may have. What is not here either has no effect on an answer or
    can take time and memory without a limit."""
    return {
        "do_sample": FLAG,
        "early_stopping": Kind("true, false or 'never'", lambda value: FLAG.has(value) or value == "never"),
        "eos_token_id": TOKENS,
        "epsilon_cutoff": number(0, 0.999),
        "eta_cutoff": number(0, 0.999),
        "length_penalty": number(-5, 5),  # the exponent of a length, which has to stay finite
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
    """The fields that have an effect on an answer of `/v1/completions`, `/v1/chat/completions` or `/v1/responses`."""
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
        "frequency_penalty": number(-0.99, 2),  # transformers makes it a repetition penalty of 1 + this
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

OF_BATCHES = ("model", "stream", "max_tokens", "max_completion_tokens", "max_output_tokens")
"""The fields that continuous batching heeds, besides those that make the prompt."""


def understand(
    path: str, body: Mapping[str, Any], limits: Limits, template: Template | None, *, in_batches: bool = False
) -> Asked:
    """Check each field of a request. Whatever the server would pass over in silence is refused by its name.

    A model without a chat template has the `template` None. With `in_batches` all requests share the model's own
    settings of sampling.
    """
    check_letters("the body", body)
    # 1. Leave out what is null, what has no effect by definition, and what asks for nothing.
    given = {}
    for name, value in body.items():
        if value is None or name in IGNORED or _asks_for_nothing(name, value):
            continue
        given[name] = value
    # 2. Every other field must be known, and its value of its kind.
    kinds = request_fields(path, limits)
    for name, value in given.items():
        if name not in kinds:
            raise ValueError(f"{_named(name, value)} is not supported: leave it out")
        kinds[name].check(name, value)
    field = INPUT_FIELD[path]
    if not given.get(field):
        raise ValueError(f"the {field} is empty: there is nothing to continue")
    if in_batches:
        _check_batched(given, field)
    # 3. Some fields have an inside, and some have no effect next to others.
    settings = _settings(given, limits)
    _check_together(given, settings)
    num_letters = _check_input(given, field) + len(given.get("instructions", ""))
    if path != "/v1/completions":
        _check_template(given, given[field], template)
    # 4. Say it in the words of transformers' server.
    seed = given.pop("seed", None)
    is_streamed = given.setdefault("stream", False)
    limit = given.pop("max_completion_tokens", None)  # the newer name of max_tokens
    if limit is not None:
        given["max_tokens"] = limit
    if "logit_bias" in given:
        given["logit_bias"] = {token: float(bias) for token, bias in given["logit_bias"].items()}
    return Asked(body=given, settings=settings, seed=seed, is_streamed=is_streamed, num_letters=num_letters)


def _asks_for_nothing(name: str, value: Any) -> bool:
    return any(type(value) is type(harmless) and value == harmless for harmless in WITHOUT_EFFECT.get(name, ()))


def _named(name: str, value: Any) -> str:
    """A field as it was given, without all of a long name or value."""
    shortened = name if len(name) <= 60 else f"{name[:60]}..."
    return f"{shortened}={shown(value)}"


def _settings(given: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """Take the `generation_config` out of a request, and check each of its fields."""
    if "generation_config" not in given:
        return {}
    kinds = generation_settings(limits)
    settings = {}
    for name, value in parse_object("generation_config", given.pop("generation_config")).items():
        if name not in kinds:
            known = ", ".join(kinds)
            raise ValueError(f"generation_config has no {_named(name, value)} here; it may have {known}")
        if value is not None:
            settings[name] = kinds[name].check(name, value)
    return settings


def _check_together(given: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse fields that have no effect because of others."""
    if "max_tokens" in given and "max_completion_tokens" in given:
        raise ValueError("max_tokens and max_completion_tokens are two names of one setting: leave one out")
    for setting, names in SAME_SETTING.items():
        for name in names:
            if setting in settings and name in given:
                raise ValueError(f"{name} and {setting} in generation_config set the same: leave one out")
    # 1. Beams
    num_beams = settings.get("num_beams", 1)
    if num_beams > 1 and given.get("stream"):
        raise ValueError(f"num_beams={num_beams} cannot be streamed, since a beam search knows its answer at the end")
    for name in OF_BEAMS:
        if name in settings and num_beams == 1:
            raise ValueError(f"{_named(name, settings[name])} has no effect without num_beams above 1: leave it out")
    # 2. Sampling
    temperature = given.get("temperature", settings.get("temperature"))
    if temperature == 0 and settings.get("do_sample"):
        raise ValueError("temperature=0 takes the likeliest token, and do_sample=True asks to sample: leave one out")
    if temperature == 0 or settings.get("do_sample") is False:
        for name in OF_SAMPLING:
            value = given.get(name, settings.get(name))
            is_usual = name == "top_p" or (name == "temperature" and value == 0)  # many clients send both
            if value is not None and not is_usual:
                raise ValueError(
                    f"{_named(name, value)} has no effect where the likeliest token is taken: leave it out"
                )


def _check_batched(given: Mapping[str, Any], field: str) -> None:
    heeded = (*OF_BATCHES, field, "instructions", "tools", "chat_template_kwargs", "suffix")
    for name, value in given.items():
        if name not in heeded:
            raise ValueError(
                f"{_named(name, value)} has no effect under continuous batching, where all requests share the model's "
                "own settings: leave it out, or start the server without --continuous-batching"
            )


def _check_input(given: Mapping[str, Any], field: str) -> int:
    """Check the texts that become the prompt; their length in characters."""
    value = given[field]
    if isinstance(value, str):
        return len(value)
    for index, item in enumerate(value):
        OBJECT.check(f"{field}[{index}]", item)
    if field == "input":
        return _check_items(value, given.get("instructions"))
    return sum(_check_message(message, f"messages[{index}]") for index, message in enumerate(value))


def _check_fields(item: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name, value in item.items():
        if name not in known and value not in (None, [], ""):
            raise ValueError(f"{where} has {_named(name, value)}, which the model would not see: leave it out")


def _check_message(message: Mapping[str, Any], where: str) -> int:
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
    """Check the items in the input of `/v1/responses`: messages, calls of tools, or the parts of one message."""
    if "role" not in items[0]:
        return _check_content(items, "input")
    if items[0]["role"] == "system" and instructions:
        raise ValueError("instructions would take the place of the system message in input: leave one out")
    num_letters = 0
    before: Mapping[str, Any] = {}
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
        if item.get("type") == "function_call" and before.get("role") == "assistant" and before.get("content"):
            raise ValueError(f"input[{index - 1}] has content before a call of a tool, which would not be seen")
        before = item
    return num_letters


def _check_content(content: Any, where: str) -> int:
    """Check the content of a message; its length in characters."""
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


def _check_template(given: Mapping[str, Any], items: str | list[Any], template: Template | None) -> None:
    """Refuse what the model's chat template would not show to the model."""
    if template is None:
        raise ValueError("this model has no chat template: use /v1/completions")
    if given.get("tools") and not template.has_tools:
        raise ValueError("tools is not supported, because the chat template of this model does not mention them")
    if isinstance(items, list) and not template.has_tool_calls:
        for item in items:
            if item.get("tool_calls") or item.get("type") == "function_call":
                raise ValueError("the chat template of this model does not show calls of tools: leave them out")
    for name, value in given.get("chat_template_kwargs", {}).items():
        if name not in template.settings:
            raise ValueError(f"chat_template_kwargs has {_named(name, value)}, which is no setting of the template")
        if not isinstance(value, bool | int | float | str):
            raise ValueError(f"{name} in chat_template_kwargs must be a text, a number, true or false")
