"""`mixdepth serve`: transformers' own OpenAI-compatible server, for one model, routed or plain."""

import socket
from pathlib import Path
from typing import Any

from transformers.utils.import_utils import is_serve_available

from mixdepth.files import tell
from mixdepth.hf import RoutedCausalLM
from mixdepth.hf.cache import unsupported_cache
from mixdepth.loading import load

OF_MANY_MODELS = ("/load_model", "/reset", "/v1/audio/transcriptions", "/v1/systemone")
"""Paths of transformers' server that one language model does not need."""


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
    from transformers.cli.serving.utils import GenerationState

    loaded = load(name)
    if loaded.note:
        tell(loaded.note)
    if continuous_batching and isinstance(loaded.model, RoutedCausalLM):
        raise unsupported_cache("continuous batching")
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

    class Completions(CompletionHandler):
        async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
            if not body.get("prompt"):
                raise ValueError("the prompt is empty: there is nothing to continue")
            return await super().handle_request(body, request_id)

    loaded.model.generation_config.do_sample = True  # as clients expect it; temperature 0 is greedy
    manager = OneModel(force_model=public)
    state = GenerationState(continuous_batching=continuous_batching)
    app = build_server(
        manager,
        ChatCompletionHandler(manager, state),
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


def serve(name: str, *, host: str = "127.0.0.1", port: int = 8000, continuous_batching: bool = False) -> None:
    """Serve the model until interrupted."""
    try:  # first: loading a model takes its time
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot listen at {host}:{port} ({reason}): choose another --host or --port") from error
    app, public = make_app(name, continuous_batching=continuous_batching)
    import uvicorn

    print(f"mixdepth: serving {public} at http://{host}:{port}/v1, until Ctrl-C", flush=True)
    uvicorn.run(app, host=host, port=port, log_level="warning")
