"""The handlers of transformers' server, within our limits. No other module uses private names of that server."""

import asyncio
import contextlib
import copy
import functools
import inspect
import json
import math
import threading
import time
import uuid
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from jinja2.defaults import DEFAULT_NAMESPACE
from transformers import (
    ContinuousBatchingConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import CBGenerateManager, GenerateManager, GenerationState, _StreamError
from transformers.utils.chat_template_utils import _get_template_variables

from mixdepth.models.loading import positions
from mixdepth.sampling.requests import SAMPLING_SETTINGS, Template, UnderstoodRequest, understand
from mixdepth.sampling.server_limits import Limits, one_line, shown

IS_OVER: ContextVar[threading.Event] = ContextVar("IS_OVER")
"""It is set when no client waits any longer for the answer to the request that is being handled."""

TEMPLATE_NAMES = {*DEFAULT_NAMESPACE, "messages", "raise_exception", "strftime_now"}
"""Names in a chat template that are not settings of it."""

NUM_TOKENISERS = 2
"""How many threads turn texts into tokens. With more than one, a long text does not keep the others waiting."""

TOKENS_OF_A_STEP = 1024
"""The most tokens that one step of continuous batching computes. Longer prompts take several steps."""

SHUTDOWN_SECONDS = 10
"""How long the server waits at its end for an answer that is being computed."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """The one model of a server, and what its clients may ask of it."""

    name: str
    """The name of the model for clients."""
    model: Any
    tokenizer: Any
    limits: Limits
    in_batches: bool
    """Whether answers are computed together, by continuous batching."""

    @functools.cached_property
    def positions(self) -> int:
        """The most tokens of a prompt together with its answer."""
        of_model = positions(self.model)
        if self.in_batches:
            return min(of_model, self.limits.batch_tokens)
        return of_model

    @functools.cached_property
    def max_tokens(self) -> int:
        """The most tokens of a prompt."""
        return min(self.positions - 1, self.limits.prompt_tokens)

    @functools.cached_property
    def max_letters(self) -> float:
        """The number of characters beyond which a text has more than `max_tokens` tokens, whatever it says.

        There is no such number for a tokenizer that changes the text first, because it may make the text shorter.
        """
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None or backend.normalizer is not None:
            return math.inf
        longest_token = max(map(len, self.tokenizer.get_vocab()))
        return self.max_tokens * longest_token

    @functools.cached_property
    def template(self) -> Template | None:
        """What clients can set in the chat template; None if there is no template."""
        if not self.tokenizer.chat_template:
            return None
        text = self.tokenizer.get_chat_template()
        names = _get_template_variables(text)
        arguments = inspect.signature(self.tokenizer.apply_chat_template).parameters
        settings = names - TEMPLATE_NAMES - set(arguments) - set(self.tokenizer.special_tokens_map)
        return Template(settings=settings, has_tools="tools" in names, has_tool_calls="tool_calls" in text)


class LeftError(Exception):
    """The client has left, and does not wait for the answer any longer."""


class Turn:
    """The computation of one answer. For transformers' server it stands in for the model."""

    def __init__(self, served: Served, request: UnderstoodRequest, is_over: threading.Event) -> None:
        self.served = served
        self.seed = request.seed
        self.is_over = is_over
        self.config = served.model.config
        self.loop = asyncio.get_running_loop()
        self.has_begun: asyncio.Future[Exception | None] = self.loop.create_future()
        """It is done with the first token. Its result is the error if there is no such token, else None."""

    def generate(self, **options: Any) -> Any:
        """Call the `generate` of the model, but end with an error when the client has left or the time is over."""
        self.end = time.monotonic() + self.served.limits.answer_seconds
        try:
            self.check()
            if self.seed is None:
                torch.seed()  # the seed of an earlier client ends with its answer
            else:
                torch.manual_seed(self.seed)
            return self.served.model.generate(
                **options,
                logits_processor=LogitsProcessorList([_SomeTokenIsLeft()]),
                stopping_criteria=StoppingCriteriaList([_AfterEachToken(self)]),
            )
        except Exception as error:
            self.begin(error)
            if "streamer" not in options or isinstance(error, LeftError):
                raise
            # transformers' server puts the message between quotes
            raise ValueError(one_line(error).replace("\\", "/").replace('"', "'")) from error

    def check(self) -> None:
        if self.is_over.is_set():
            raise LeftError
        if time.monotonic() > self.end:
            raise too_long(self.served.limits)

    def begin(self, error: Exception | None = None) -> None:
        """Report, from any thread, that the first token is there, or the error in its place."""
        self.loop.call_soon_threadsafe(self._begin, error)

    def _begin(self, error: Exception | None) -> None:
        if not self.has_begun.done():
            self.has_begun.set_result(error)


class _SomeTokenIsLeft(LogitsProcessor):
    """Refuse a request whose settings rule out every token. Without this, an impossible token could be drawn."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if scores.isnan().any():
            raise RuntimeError("the model computes NaN: its weights or its config.json are damaged")
        has_choice = scores.isfinite().any(dim=-1)  # (rows,)
        if not has_choice.all():
            raise ValueError(
                "no token is left to continue with: ask for fewer tokens, or less of no_repeat_ngram_size and "
                "min_new_tokens"
            )
        return scores


class _AfterEachToken(StoppingCriteria):
    """Check after each token whether the answer is still wanted. It stops no row by itself."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self.is_first = True

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        if self.is_first:
            self.turn.begin()
            self.is_first = False
        self.turn.check()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def too_long(limits: Limits) -> ValueError:
    return ValueError(f"the answer took longer than {limits.answer_seconds:g} seconds: ask for fewer tokens")


def check_request(served: Served, num_tokens: int, settings: Any, *, is_streamed: bool) -> None:
    """Refuse what is impossible for this model, and keep the answer within its positions."""
    if num_tokens > served.max_tokens:
        raise ValueError(f"the prompt has {num_tokens} tokens, and this server takes {served.max_tokens}")
    room = served.positions - num_tokens
    if settings.max_new_tokens is None or settings.max_new_tokens > room:
        settings.max_new_tokens = room
    if settings.min_new_tokens is not None and settings.min_new_tokens > settings.max_new_tokens:
        raise ValueError(
            f"min_new_tokens={settings.min_new_tokens} is more than the answer can have, {settings.max_new_tokens}"
        )
    if is_streamed and settings.num_beams is not None and settings.num_beams > 1:
        raise ValueError("this model's own settings ask for a beam search, which cannot be streamed")
    ends = settings.eos_token_id
    for token in ends if isinstance(ends, list) else [ends]:
        if token is not None and token >= len(served.tokenizer):
            raise ValueError(f"eos_token_id={token} is not a token of this model, which has {len(served.tokenizer)}")
    for (token,) in settings.sequence_bias or {}:
        if token >= len(served.tokenizer):
            raise ValueError(
                f"logit_bias has the token {token}, and this model has {len(served.tokenizer)} tokens: leave it out"
            )


class OneByOne(GenerateManager):
    """Compute one answer after the other, all on one thread."""

    def generate_streaming(self, model: Turn, processor: Any, inputs: Any, gen_config: Any, **options: Any) -> Any:
        check_request(model.served, inputs["input_ids"].shape[-1], gen_config, is_streamed=True)
        return super().generate_streaming(model, processor, inputs, gen_config, **options)

    async def generate_non_streaming(
        self, model: Turn, processor: Any, inputs: Any, gen_config: Any, **options: Any
    ) -> Any:
        check_request(model.served, inputs["input_ids"].shape[-1], gen_config, is_streamed=False)
        answer = asyncio.ensure_future(super().generate_non_streaming(model, processor, inputs, gen_config, **options))
        answer.add_done_callback(_retrieve_error)
        return await asyncio.shield(answer)  # the thread sets the result, which must not have been cancelled by then

    def stop(self) -> None:
        """Wait for the answer that is being computed: its thread must find the event loop open."""
        self.submit(int).result(timeout=SHUTDOWN_SECONDS)


def _retrieve_error(answer: asyncio.Future[Any]) -> None:
    """Retrieve the error of an answer whose client has left, because asyncio logs errors that are not retrieved."""
    if not answer.cancelled():
        answer.exception()


class Together(CBGenerateManager):
    """Compute several answers together, by continuous batching."""

    def __init__(self, limits: Limits) -> None:
        config = ContinuousBatchingConfig(
            max_batch_tokens=TOKENS_OF_A_STEP,
            max_requests_per_batch=limits.connections,
        )
        # By default the cache takes nine tenths of the memory; on a CPU that is the memory of the whole machine.
        config.num_blocks = math.ceil(limits.batch_tokens / config.page_size)
        super().__init__(config)
        self.lock = threading.Lock()

    def init_cb(self, model: Any, gen_config: Any) -> None:
        with self.lock:
            super().init_cb(model, gen_config)

    def generate_streaming(
        self, model: Turn, processor: Any, inputs: Any, gen_config: Any, request_id: str, **options: Any
    ) -> Any:
        check_request(model.served, len(inputs["input_ids"]), gen_config, is_streamed=True)
        queue, streamer = super().generate_streaming(
            model, processor, inputs, gen_config, request_id=request_id, **options
        )
        model.begin()
        limits = model.served.limits

        # End the stream with an error when the time is over.
        def stop() -> None:
            queue.put_nowait(_StreamError(str(too_long(limits))))
            self.forget(request_id)

        model.loop.call_later(limits.answer_seconds, stop)
        # When the client leaves, transformers' server cancels the streamer. Stop the computation then, too.
        cancel = streamer.cancel

        def cancel_and_forget() -> None:
            cancel()
            self.forget(request_id)

        streamer.cancel = cancel_and_forget
        return queue, streamer

    async def generate_non_streaming(
        self, model: Turn, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> Any:
        limits = model.served.limits
        check_request(model.served, len(inputs["input_ids"]), gen_config, is_streamed=False)
        try:
            async with asyncio.timeout(limits.answer_seconds):
                return await super().generate_non_streaming(model, processor, inputs, gen_config, request_id=request_id)
        except TimeoutError as error:
            raise too_long(limits) from error
        finally:
            self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """Stop the computation of an answer, and drop what is there of it."""
        assert self._cb is not None
        if self._cb.output_router.result_handlers.pop(request_id, None) is not None:
            self._cb.cancel_request(request_id)


class OneModel(ModelManager):
    """Hold the one model that was loaded, and never fetch another one."""

    def __init__(self, served: Served, state: "State") -> None:
        self.served = served
        self.state = state
        super().__init__(force_model=served.name)

    def load_model_and_processor(self, model_id_and_revision: str, *args: Any, **options: Any) -> Any:
        assert model_id_and_revision == self.process_model_name(self.served.name)
        return self.served.model, self.served.tokenizer

    def shutdown(self) -> None:
        self.state.shutdown()


class State(GenerationState):
    """Keep one manager for all requests, because there is one model."""

    def __init__(self, served: Served) -> None:
        super().__init__(continuous_batching=served.in_batches)
        self.manager = Together(served.limits) if served.in_batches else OneByOne()

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
        return self.manager

    def shutdown(self) -> None:
        with contextlib.suppress(TimeoutError):  # a step that takes longer ends with the process
            self.manager.stop()

    def is_cb_alive(self) -> bool:
        return not isinstance(self.manager, Together) or self.manager.is_alive()


class WithinLimits:
    """Handle a request before transformers' own handler does: check it, and keep long work off the event loop."""

    path: str
    tokenisers: ThreadPoolExecutor
    model_manager: OneModel

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        served = self.model_manager.served
        # 1. Refuse what can be refused before the text is read.
        request = understand(self.path, body, served.limits, served.template, in_batches=served.in_batches)
        if request.body.setdefault("model", served.name) != served.name:
            raise ValueError(f"this server has one model, {served.name!r}, not {shown(request.body['model'])}")
        if request.num_letters > served.max_letters:
            raise ValueError(
                f"the prompt has {request.num_letters} characters, and this server takes {served.max_tokens} tokens, "
                f"which are at most {served.max_letters}"
            )
        if request.settings:
            request.body["generation_config"] = json.dumps(request.settings)
        if served.in_batches:
            request_id = uuid.uuid4().hex  # the batch needs an id that no other client can choose
        # 2. Make tokens of the text, on another thread.
        turn = Turn(served, request, IS_OVER.get())
        handling = super().handle_request(request.body, request_id)  # type: ignore[misc]
        begin = await turn.loop.run_in_executor(self.tokenisers, _result_of, handling)
        # 3. Compute the answer. A stream begins with its first token, because until then the request can be refused.
        if not request.is_streamed:
            return await begin(turn)
        answer = begin(turn)
        error = await turn.has_begun
        if error is not None:
            raise error
        return answer

    def _streaming(self, request_id: str, model: Any, *rest: Any, **options: Any) -> Callable[[Turn], Any]:
        begin = super()._streaming  # type: ignore[misc]
        return lambda turn: begin(request_id, turn, *rest, **options)

    async def _non_streaming(self, request_id: str, model: Any, *rest: Any, **options: Any) -> Callable[[Turn], Any]:
        begin = super()._non_streaming  # type: ignore[misc]
        return lambda turn: begin(request_id, turn, *rest, **options)

    def _build_generation_config(self, body: dict[str, Any], default: Any, use_cb: bool = False) -> Any:
        """Return the settings of the model, replaced by those of the request where it has some."""
        settings = json.loads(body.get("generation_config", "{}"))
        fields = {name: value for name, value in body.items() if name != "generation_config"}
        default = copy.deepcopy(default)
        default.update(**settings)
        config = super()._build_generation_config(fields, default, use_cb=use_cb)  # type: ignore[misc]
        if "max_new_tokens" in settings:
            config.max_new_tokens = settings["max_new_tokens"]  # transformers' server makes it at least 1024
        if config.temperature == 0:
            config.do_sample = False
        if not config.do_sample:
            for name in SAMPLING_SETTINGS:
                setattr(config, name, None)
        return config


def _result_of(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never waits to its end, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("transformers' server waits for something before it generates")


class Completions(WithinLimits, CompletionHandler):
    path = "/v1/completions"


class Chat(WithinLimits, ChatCompletionHandler):
    path = "/v1/chat/completions"


class Responses(WithinLimits, ResponseHandler):
    path = "/v1/responses"


def make_handlers(served: Served) -> tuple[OneModel, State, dict[str, Any]]:
    """Return the parts of transformers' server: its models, its state, and a handler for each path."""
    state = State(served)
    models = OneModel(served, state)
    tokenisers = ThreadPoolExecutor(NUM_TOKENISERS, thread_name_prefix="tokeniser")
    handlers = {}
    for kind in (Completions, Chat, Responses):
        handlers[kind.path] = kind(models, state)
        handlers[kind.path].tokenisers = tokenisers
    return models, state, handlers


def check_batches(name: str, model: Any) -> None:
    """Refuse continuous batching for a model that does not support it, instead of silently doing without."""
    if not hasattr(model, "init_continuous_batching"):
        raise ValueError(f"{name!r} does not support continuous batching: leave out --continuous-batching")
