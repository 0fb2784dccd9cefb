"""`mixdepth serve`: transformers' own OpenAI-compatible server, for one model, routed or plain."""

import math
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.utils.import_utils import is_serve_available

from mixdepth.files import tell
from mixdepth.hf import RoutedCausalLM
from mixdepth.hf.cache import unsupported_cache
from mixdepth.loading import load, positions

OF_MANY_MODELS = ("/load_model", "/reset", "/v1/audio/transcriptions", "/v1/systemone")
"""Paths of transformers' server that one language model does not need."""
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    **{"n": (1,), "best_of": (1,), "echo": (False,), "logprobs": (False, 0), "top_logprobs": (0,)},
    **{"presence_penalty": (0,), "response_format": ({"type": "text"},)},
}
"""Fields of a request that transformers' server passes over, with the values that ask for nothing."""


def make_app(name: str, *, continuous_batching: bool = False) -> tuple[Any, str]:
    """The server's application for this model (a run, a folder, a name of the hub, `smollm2`), and the name by which
    clients ask for it."""
    if not is_serve_available():
        raise ValueError("serving needs further packages: pip install 'mixdepth[serve]'")
    from fastapi import Request
    from fastapi.responses import JSONResponse
    from jinja2 import TemplateError
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.response import ResponseHandler
    from transformers.cli.serving.server import build_server
    from transformers.cli.serving.systemone import SystemOneHandler
    from transformers.cli.serving.transcription import TranscriptionHandler
    from transformers.cli.serving.utils import GenerateManager, GenerationState

    loaded = load(name)
    if loaded.note:
        tell(loaded.note)
    if continuous_batching and isinstance(loaded.model, RoutedCausalLM):
        raise ValueError(
            f"{name!r} is routed, and continuous batching keeps one length for all layers: leave out "
            "--continuous-batching"
        )
    public = Path(name).resolve().name if Path(name).exists() else name

    class OneModel(ModelManager):
        """Knows the one model that was loaded, and fetches no other whatever a client asks for."""

        def load_model_and_processor(self, model_id_and_revision: str, *args: Any, **kwargs: Any) -> Any:
            if model_id_and_revision != self.process_model_name(public):
                raise ValueError(f"this server has one model, {public!r}, not {model_id_and_revision!r}")
            return loaded.model, loaded.tokenizer

        def get_gen_models(self) -> list[dict[str, Any]]:
            return [{"id": public, "object": "model", "created": 0, "owned_by": "mixdepth"}]

        def shutdown(self) -> None:
            """It stays loaded."""
            state.shutdown()

    class Checked(GenerateManager):
        """Refuses before the answer begins: once a stream is under way it is too late for a 4xx."""

        def generate_streaming(self, model: Any, processor: Any, inputs: Any, gen_config: Any, **kwargs: Any) -> Any:
            check_request(model, inputs["input_ids"].shape[-1], gen_config, is_streamed=True)
            return super().generate_streaming(model, processor, inputs, gen_config, **kwargs)

        async def generate_non_streaming(
            self, model: Any, processor: Any, inputs: Any, gen_config: Any, **kwargs: Any
        ) -> Any:
            check_request(model, inputs["input_ids"].shape[-1], gen_config, is_streamed=False)
            return await super().generate_non_streaming(model, processor, inputs, gen_config, **kwargs)

    class State(GenerationState):
        def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
            if not use_cb:
                self._generate_managers.setdefault(model_id, Checked())
            return super().get_manager(model_id, use_cb=use_cb)

    class Completions(CompletionHandler):
        async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
            if not body.get("prompt"):
                raise ValueError("the prompt is empty: there is nothing to continue")
            return await super().handle_request(understood(body), request_id)

    class Chat(ChatCompletionHandler):
        async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
            return await super().handle_request(understood(body), request_id)

    loaded.model.generation_config.do_sample = True  # as clients expect it; temperature 0 is greedy
    manager = OneModel(force_model=public)
    state = State(continuous_batching=continuous_batching)
    app = build_server(
        manager,
        Chat(manager, state),
        completion_handler=Completions(manager, state),
        response_handler=ResponseHandler(manager, state),
        transcription_handler=TranscriptionHandler(manager, state),
        systemone_handler=SystemOneHandler(manager, state),
        generation_state=state,
    )

    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) not in OF_MANY_MODELS]

    async def refuse(request: Request, error: Exception) -> JSONResponse:
        """What a request makes impossible is the client's to mend."""
        missing = f"the request lacks {error}" if isinstance(error, KeyError) else str(error)
        return JSONResponse({"error": {"message": missing, "type": "invalid_request_error"}}, status_code=400)

    for kind in (ValueError, KeyError, TypeError, AttributeError, IndexError, TemplateError):
        app.add_exception_handler(kind, refuse)
    return app, public


def understood(body: Mapping[str, Any]) -> dict[str, Any]:
    """The request in the words of transformers' server; what that would pass over in silence is refused."""
    for field, harmless in WITHOUT_EFFECT.items():
        value = body.get(field)
        if value is not None and value not in harmless:
            raise ValueError(f"{field}={value!r} is not supported: leave it out")
    body = dict(body)
    limit = body.pop("max_completion_tokens", None)  # the newer name
    return body if limit is None else {"max_tokens": limit, **body}


def check_request(model: Any, num_tokens: int, settings: Any, is_streamed: bool) -> None:
    """Refuse generation settings with which `generate` would fail, and hold the answer within the model's positions."""
    room = positions(model) - num_tokens
    if room < 1:
        raise ValueError(f"the prompt has {num_tokens} tokens, and the model takes {positions(model)} with the answer")
    for name, low, high in (
        ("max_new_tokens", 1, None),
        ("temperature", 0, None),
        ("top_p", 0, 1),
        ("num_beams", 1, 1 if is_streamed else None),
    ):
        value = getattr(settings, name)
        if value is not None and not low <= value <= (math.inf if high is None else high):  # nor is NaN
            limits = f"at least {low}" if high is None else f"{low}" if low == high else f"from {low} to {high}"
            where = " in a stream" if name == "num_beams" and is_streamed else ""
            raise ValueError(f"{name} must be {limits}{where}, not {value}")
    cache = settings.cache_implementation
    if isinstance(model, RoutedCausalLM) and cache not in (None, "dynamic"):
        raise unsupported_cache(f"cache_implementation={cache!r}")
    if settings.max_new_tokens is not None:
        settings.max_new_tokens = min(settings.max_new_tokens, room)


def serve(name: str, *, host: str = "127.0.0.1", port: int = 8000, continuous_batching: bool = False) -> None:
    """Serve the model until interrupted."""
    if not 0 < port < 2**16:
        raise ValueError(f"port must be from 1 to 65535, not {port}")
    try:  # first: loading a model takes its time
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot listen at {host}:{port} ({reason}): choose another --host or --port") from error
    app, public = make_app(name, continuous_batching=continuous_batching)
    import uvicorn

    place = f"[{host}]" if ":" in host else host
    print(f"mixdepth: serving {public} at http://{place}:{port}/v1, until Ctrl-C", flush=True)
    uvicorn.run(app, host=host, port=port, log_level="warning")
