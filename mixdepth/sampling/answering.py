"""The handlers of transformers' server, within our limits. Whatever is private in that server is named here alone."""

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
from mixdepth.sampling.requests import OF_SAMPLING, Asked, Template, understand
from mixdepth.sampling.server_limits import Limits, one_line, shown

IS_OVER: ContextVar[threading.Event] = ContextVar("IS_OVER")
"""Set when nobody waits for the answer to the request that is being handled."""

OF_TEMPLATES = {*DEFAULT_NAMESPACE, "messages", "raise_exception", "strftime_now"}
"""Names in a chat template that are no settings of it."""

NUM_TOKENISERS = 2
"""Threads that turn texts into tokens, so that a long one does not keep the others waiting."""

TOKENS_OF_A_STEP = 1024
"""Most tokens that one step of continuous batching computes; longer prompts take several steps."""

SHUTDOWN_SECONDS = 10


@dataclass(frozen=True, kw_only=True)
class Served:
    """The one model of a server, and what its clients may ask of it."""

    name: str
    model: Any
    tokenizer: Any
    limits: Limits
    in_batches: bool

    @functools.cached_property
    def positions(self) -> int:
        """The longest prompt together with its answer."""
        own = positions(self.model)
        return min(own, self.limits.batch_tokens) if self.in_batches else own

    @functools.cached_property
    def max_tokens(self) -> int:
        """The longest prompt."""
        return min(self.positions - 1, self.limits.prompt_tokens)

    @functools.cached_property
    def max_letters(self) -> float:
        """The number of characters beyond which a text has too many tokens, whatever it says.

        There is no such number for a tokenizer that changes the text first: it may make it shorter.
        """
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None or backend.normalizer is not None:
            return math.inf
        return self.max_tokens * max(map(len, self.tokenizer.get_vocab()))

    @functools.cached_property
    def template(self) -> Template | None:
        """What the chat template can be told; None if there is none."""
        if not self.tokenizer.chat_template:
            return None
        text = self.tokenizer.get_chat_template()
        names = _get_template_variables(text)
        own = {*OF_TEMPLATES, *inspect.signature(self.tokenizer.apply_chat_template).parameters}
        settings = names - own - set(self.tokenizer.special_tokens_map)
        return Template(settings=settings, has_tools="tools" in names, has_tool_calls="tool_calls" in text)


class LeftError(Exception):
    """Nobody waits for the answer any longer."""


class Turn:
    """The computation of one answer. Transformers' server takes it for the model, of which it has what that needs."""

    def __init__(self, served: Served, asked: Asked, is_over: threading.Event) -> None:
        self.served = served
        self.seed = asked.seed
        self.is_over = is_over
        self.config = served.model.config
        self.loop = asyncio.get_running_loop()
        self.has_begun: asyncio.Future[Exception | None] = self.loop.create_future()
        """Done with the first token; its result is what came in the way of it."""

    def generate(self, **options: Any) -> Any:
        """Call the model's own `generate`, but end with an error when the client has left or the time is over."""
        self.end = time.monotonic() + self.served.limits.answer_seconds
        try:
            self.check()
            if self.seed is None:
                torch.seed()  # what an earlier client asked for ends with its answer
            else:
                torch.manual_seed(self.seed)
            return self.served.model.generate(
                **options,
                logits_processor=LogitsProcessorList([_SomeChoice()]),
                stopping_criteria=StoppingCriteriaList([_EachToken(self)]),
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
        """Tell that the first token is there, or what came in the way of it."""
        self.loop.call_soon_threadsafe(self._begin, error)

    def _begin(self, error: Exception | None) -> None:
        if not self.has_begun.done():
            self.has_begun.set_result(error)


class _SomeChoice(LogitsProcessor):
    """Refuses a request whose settings rule out every token: one would be drawn all the same, or none could be."""

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


class _EachToken(StoppingCriteria):
    """Is asked by `generate` after each token."""

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
    """Refuse what only the model can tell to be impossible, and hold the answer within its positions."""
    if num_tokens > served.max_tokens:
        raise ValueError(f"the prompt has {num_tokens} tokens, and this server takes {served.max_tokens}")
    room = served.positions - num_tokens
    settings.max_new_tokens = room if settings.max_new_tokens is None else min(settings.max_new_tokens, room)
    if settings.min_new_tokens is not None and settings.min_new_tokens > settings.max_new_tokens:
        raise ValueError(
            f"min_new_tokens={settings.min_new_tokens} is more than the answer can have, {settings.max_new_tokens}"
        )
    if is_streamed and settings.num_beams is not None and settings.num_beams > 1:
        raise ValueError("this model's own settings ask for a beam search, which cannot be streamed")
    ends = settings.eos_token_id
    for token in ends if isinstance(ends, list) else [ends]:
        if token is not None and token >= len(served.tokenizer):
            raise ValueError(f"eos_token_id={token} is no token of this model, which has {len(served.tokenizer)}")
    for (token,) in settings.sequence_bias or {}:
        if token >= len(served.tokenizer):
            raise ValueError(
                f"logit_bias has the token {token}, and this model has {len(served.tokenizer)} tokens: leave it out"
            )


class OneByOne(GenerateManager):
    """Computes one answer after the other, on one thread for all."""

    def generate_streaming(self, model: Turn, processor: Any, inputs: Any, gen_config: Any, **options: Any) -> Any:
        check_request(model.served, inputs["input_ids"].shape[-1], gen_config, is_streamed=True)
        return super().generate_streaming(model, processor, inputs, gen_config, **options)

    async def generate_non_streaming(
        self, model: Turn, processor: Any, inputs: Any, gen_config: Any, **options: Any
    ) -> Any:
        check_request(model.served, inputs["input_ids"].shape[-1], gen_config, is_streamed=False)
        answer = asyncio.ensure_future(super().generate_non_streaming(model, processor, inputs, gen_config, **options))
        answer.add_done_callback(_hear)
        return await asyncio.shield(answer)  # the thread could not tell its result to what was cancelled

    def stop(self) -> None:
        """Wait for the answer that nobody waits for any longer: the thread has to find its event loop open."""
        self.submit(int).result(timeout=SHUTDOWN_SECONDS)


def _hear(answer: asyncio.Future[Any]) -> None:
    """Take the error of an answer that nobody waits for: asyncio would log it."""
    if not answer.cancelled():
        answer.exception()


class Together(CBGenerateManager):
    """Computes answers together, by continuous batching."""

    def __init__(self, limits: Limits) -> None:
        config = ContinuousBatchingConfig(
            max_batch_tokens=TOKENS_OF_A_STEP,
            max_requests_per_batch=limits.connections,
        )
        # By default the cache takes nine tenths of the memory, which on a CPU is that of the whole machine.
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

        def stop() -> None:
            queue.put_nowait(_StreamError(str(too_long(limits))))
            self.forget(request_id)

        model.loop.call_later(limits.answer_seconds, stop)
        cancel = streamer.cancel

        def forget() -> None:
            cancel()
            self.forget(request_id)

        streamer.cancel = forget
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
        """Compute no more of an answer, and keep nothing of it."""
        assert self._cb is not None
        if self._cb.output_router.result_handlers.pop(request_id, None) is not None:
            self._cb.cancel_request(request_id)


class OneModel(ModelManager):
    """Knows the one model that was loaded, and fetches no other whatever a client asks for."""

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
    """Has one manager for all requests, since there is one model."""

    def __init__(self, served: Served) -> None:
        super().__init__(continuous_batching=served.in_batches)
        self.manager = Together(served.limits) if served.in_batches else OneByOne()

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
        return self.manager

    def shutdown(self) -> None:
        with contextlib.suppress(TimeoutError):  # a step that takes so long ends with the process
            self.manager.stop()

    def is_cb_alive(self) -> bool:
        return not isinstance(self.manager, Together) or self.manager.is_alive()


class Within:
    """What each handler does before transformers' own: understand the request, and leave the event loop alone."""

    path: str
    tokenisers: ThreadPoolExecutor
    model_manager: OneModel

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        served = self.model_manager.served
        # 1. Refuse what can be refused unread.
        asked = understand(self.path, body, served.limits, served.template, in_batches=served.in_batches)
        if asked.body.setdefault("model", served.name) != served.name:
            raise ValueError(f"this server has one model, {served.name!r}, not {shown(asked.body['model'])}")
        if asked.num_letters > served.max_letters:
            raise ValueError(
                f"the prompt has {asked.num_letters} characters, and this server takes {served.max_tokens} tokens, "
                f"which are at most {served.max_letters}"
            )
        if asked.settings:
            asked.body["generation_config"] = json.dumps(asked.settings)
        if served.in_batches:
            request_id = uuid.uuid4().hex  # requests are told apart by it
        # 2. Make tokens of the text, on another thread.
        turn = Turn(served, asked, IS_OVER.get())
        handling = super().handle_request(asked.body, request_id)  # type: ignore[misc]
        begin = await turn.loop.run_in_executor(self.tokenisers, _result_of, handling)
        # 3. Compute the answer, and begin a stream with its first token: until then it can be refused.
        if not asked.is_streamed:
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

    def _build_generation_config(self, body: dict[str, Any], own: Any, use_cb: bool = False) -> Any:
        """The model's own settings, with those of the request in their place."""
        settings = json.loads(body.get("generation_config", "{}"))
        fields = {name: value for name, value in body.items() if name != "generation_config"}
        own = copy.deepcopy(own)
        own.update(**settings)
        config = super()._build_generation_config(fields, own, use_cb=use_cb)  # type: ignore[misc]
        if "max_new_tokens" in settings:
            config.max_new_tokens = settings["max_new_tokens"]  # transformers' server raises it to 1024
        if config.temperature == 0:
            config.do_sample = False
        if not config.do_sample:
            for name in OF_SAMPLING:
                setattr(config, name, None)
        return config


def _result_of(waits_for_nothing: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end, without an event loop."""
    try:
        waits_for_nothing.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("transformers' server waits for something before it generates")


class Completions(Within, CompletionHandler):
    path = "/v1/completions"


class Chat(Within, ChatCompletionHandler):
    path = "/v1/chat/completions"


class Responses(Within, ResponseHandler):
    path = "/v1/responses"


def make_handlers(served: Served) -> tuple[OneModel, State, dict[str, Any]]:
    """What transformers' server is built of: its models, its state, and a handler for each path."""
    state = State(served)
    models = OneModel(served, state)
    tokenisers = ThreadPoolExecutor(NUM_TOKENISERS, thread_name_prefix="tokeniser")
    handlers = {}
    for kind in (Completions, Chat, Responses):
        handlers[kind.path] = kind(models, state)
        handlers[kind.path].tokenisers = tokenisers
    return models, state, handlers


def check_batches(name: str, model: Any) -> None:
    """Refuse continuous batching for a model that cannot have it, rather than do without it in silence."""
    if not hasattr(model, "init_continuous_batching"):
        raise ValueError(f"{name!r} does not support continuous batching: leave out --continuous-batching")
