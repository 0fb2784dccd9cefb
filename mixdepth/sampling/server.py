"""`mixdepth serve`: transformers' own OpenAI-compatible server, for one model, routed or plain."""

import socket
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers.utils import logging
from transformers.utils.import_utils import is_serve_available

from mixdepth.hf.model import RoutedCausalLM
from mixdepth.models.loading import load
from mixdepth.sampling.admission import Gate, check_host, uvicorn_options
from mixdepth.sampling.server_limits import Limits, RefusedError, error_body, shown
from mixdepth.text import tell


def make_app(
    name: str, *, continuous_batching: bool = False, limits: Limits | None = None, hosts: Sequence[str] = ()
) -> tuple[Gate, str]:
    """Make the application that serves this model; return it with the name of the model for clients.

    `name` is a run, a folder, a name of the hub, or `smollm2`. The application answers requests to this machine, and to
    the names in `hosts`.
    """
    if not is_serve_available():
        raise ValueError("serving needs further packages: pip install 'mixdepth[serve]'")
    from mixdepth.sampling.answering import Served, check_batches

    limits = limits or Limits()
    loaded = load(name)
    if loaded.note:
        tell(loaded.note)
    if continuous_batching and isinstance(loaded.model, RoutedCausalLM):
        raise ValueError(
            f"{name!r} is routed, and continuous batching keeps one length for all layers: leave out "
            "--continuous-batching"
        )
    if continuous_batching:
        check_batches(name, loaded.model)
    _prepare_generation(loaded.model, loaded.tokenizer)
    public = Path(name).resolve().name if Path(name).exists() else name
    served = Served(
        name=public,
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        limits=limits,
        in_batches=continuous_batching,
    )
    return Gate(_application(served), limits, hosts), public


def _prepare_generation(model: Any, tokenizer: Any) -> None:
    """Change the model's settings of generation to those that clients of OpenAI's interface expect."""
    settings = model.generation_config
    settings.do_sample = True  # a request with temperature 0 is greedy
    settings.max_length = None  # requests and positions set the length
    if settings.pad_token_id is None:
        settings.pad_token_id = tokenizer.pad_token_id
    if settings.pad_token_id is None:
        settings.pad_token_id = 0


def _application(served: Any) -> Any:
    """Make transformers' server, without the paths that one language model does not need."""
    from fastapi.responses import JSONResponse
    from starlette.routing import Route
    from transformers.cli.serving.server import build_server

    from mixdepth.sampling.answering import IS_OVER, make_handlers

    models, state, handlers = make_handlers(served)
    app = build_server(
        models,
        handlers["/v1/chat/completions"],
        completion_handler=handlers["/v1/completions"],
        response_handler=handlers["/v1/responses"],
        transcription_handler=None,
        systemone_handler=None,
        generation_state=state,
    )

    # These are coroutines, so that they wait for no thread.
    model = {"id": served.name, "object": "model", "created": 0, "owned_by": "mixdepth"}

    async def health(request: Any) -> JSONResponse:
        if state.is_cb_alive():
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unhealthy", "reason": "cb_worker_dead"}, status_code=503)

    async def list_models(request: Any) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [model]})

    async def show_model(request: Any) -> JSONResponse:
        name = request.path_params["name"]
        if name != served.name:
            sentence = f"this server has one model, {served.name!r}, not {shown(name)}"
            return JSONResponse(error_body(sentence), status_code=404)
        return JSONResponse(model)

    routes = [route for route in app.router.routes if getattr(route, "path", None) in handlers]
    routes.append(Route("/health", health))
    routes.append(Route("/v1/models", list_models))
    routes.append(Route("/v1/models/{name:path}", show_model))
    app.router.routes[:] = routes
    _add_refusals(app)

    # The gate's event belongs to one request, and so does a context variable.
    async def with_event(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            IS_OVER.set(scope["is_over"])
        await app(scope, receive, send)

    return with_event


def _add_refusals(app: Any) -> None:
    """Let the application answer each error with a sentence, in the form that clients of OpenAI's interface read."""
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from jinja2 import TemplateError
    from starlette.exceptions import HTTPException

    from mixdepth.sampling.answering import LeftError

    async def refuse(request: Any, error: Exception) -> JSONResponse:
        """Answer a request that cannot be computed. The client has to change it."""
        sentence = f"the request lacks {error}" if isinstance(error, KeyError) else str(error)
        status = error.status if isinstance(error, RefusedError) else 400
        return JSONResponse(error_body(sentence), status_code=status)

    async def refuse_body(request: Any, error: Exception) -> JSONResponse:
        sentence = "the body must be a JSON object, sent with the header Content-Type: application/json"
        return JSONResponse(error_body(sentence), status_code=400)

    async def refuse_request(request: Any, error: HTTPException) -> JSONResponse:
        """Answer a request that the framework refuses: an unknown path, a wrong verb, a body that it cannot read."""
        return JSONResponse(error_body(str(error.detail)), status_code=error.status_code)

    async def fail(request: Any, error: Exception) -> JSONResponse:
        sentence = "the server failed; its log says where"
        return JSONResponse(error_body(sentence, is_fault_of_server=True), status_code=500)

    for kind in (ValueError, KeyError, TypeError, AttributeError, IndexError, TemplateError, LeftError):
        app.add_exception_handler(kind, refuse)
    app.add_exception_handler(HTTPException, refuse_request)
    app.add_exception_handler(RequestValidationError, refuse_body)
    app.add_exception_handler(Exception, fail)


def serve(
    name: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    allowed_host: Sequence[str] = (),
    continuous_batching: bool = False,
    limits: Limits | None = None,
) -> None:
    """Serve the model until interrupted."""
    if not 0 < port < 2**16:
        raise ValueError(f"port must be from 1 to 65535, not {port}")
    for allowed in allowed_host:
        check_host(allowed)
    limits = limits or Limits()
    try:  # before the model is loaded, which takes its time
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot listen at {host}:{port} ({reason}): choose another --host or --port") from error
    hosts = (host, *allowed_host)
    app, public = make_app(name, continuous_batching=continuous_batching, limits=limits, hosts=hosts)
    import uvicorn

    # Clients hear of their own mistakes in the answers. The log is for faults of the server.
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    place = f"[{host}]" if ":" in host else host
    print(f"mixdepth: serving {public} at http://{place}:{port}/v1, until Ctrl-C", flush=True)
    uvicorn.run(app, host=host, port=port, **uvicorn_options(limits))
