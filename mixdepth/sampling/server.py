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
from mixdepth.sampling.gate import Gate, check_host, uvicorn_options
from mixdepth.sampling.server_limits import Limits, RefusedError, error_body, shown
from mixdepth.text import tell


def make_app(
    name: str, *, continuous_batching: bool = False, limits: Limits | None = None, hosts: Sequence[str] = ()
) -> tuple[Gate, str]:
    """The server's application for this model (a run, a folder, a name of the hub, `smollm2`), and the name by which
    clients ask for it. It answers requests to this machine, and to the names in `hosts`."""
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
    settings = model.generation_config
    settings.do_sample = True  # as clients expect it; temperature 0 is greedy
    settings.max_length = None  # requests and positions set the length
    if settings.pad_token_id is None:
        settings.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0


def _application(served: Any) -> Any:
    """Transformers' server, without the paths that one language model does not need."""
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from jinja2 import TemplateError
    from starlette.exceptions import HTTPException
    from starlette.routing import Route
    from transformers.cli.serving.server import build_server

    from mixdepth.sampling.answering import IS_OVER, LeftError, make_handlers

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

    # These two are coroutines here, so that they wait for no thread.
    async def health(request: Any) -> JSONResponse:
        if state.is_cb_alive():
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unhealthy", "reason": "cb_worker_dead"}, status_code=503)

    async def list_models(request: Any) -> JSONResponse:
        model = {"id": served.name, "object": "model", "created": 0, "owned_by": "mixdepth"}
        return JSONResponse({"object": "list", "data": [model]})

    async def tell_model(request: Any) -> JSONResponse:
        name = request.path_params["name"]
        if name != served.name:
            sentence = f"this server has one model, {served.name!r}, not {shown(name)}"
            return JSONResponse(error_body(sentence), status_code=404)
        return JSONResponse({"id": served.name, "object": "model", "created": 0, "owned_by": "mixdepth"})

    kept = [route for route in app.router.routes if getattr(route, "path", None) in handlers]
    app.router.routes[:] = [*kept, Route("/health", health), Route("/v1/models", list_models)]
    app.router.routes.append(Route("/v1/models/{name:path}", tell_model))

    async def refuse(request: Any, error: Exception) -> JSONResponse:
        """What a request makes impossible is the client's to mend."""
        sentence = f"the request lacks {error}" if isinstance(error, KeyError) else str(error)
        status = error.status if isinstance(error, RefusedError) else 400
        return JSONResponse(error_body(sentence), status_code=status)

    async def refuse_body(request: Any, error: Exception) -> JSONResponse:
        sentence = "the body must be a JSON object, sent with the header Content-Type: application/json"
        return JSONResponse(error_body(sentence), status_code=400)

    async def refuse_request(request: Any, error: HTTPException) -> JSONResponse:
        """What the framework refuses by itself: unknown paths, wrong verbs, bodies that it cannot read."""
        return JSONResponse(error_body(str(error.detail)), status_code=error.status_code)

    async def fail(request: Any, error: Exception) -> JSONResponse:
        sentence = "the server failed; its log says where"
        return JSONResponse(error_body(sentence, is_fault_of_server=True), status_code=500)

    for kind in (ValueError, KeyError, TypeError, AttributeError, IndexError, TemplateError, LeftError):
        app.add_exception_handler(kind, refuse)
    app.add_exception_handler(HTTPException, refuse_request)
    app.add_exception_handler(RequestValidationError, refuse_body)
    app.add_exception_handler(Exception, fail)

    async def with_event(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            IS_OVER.set(scope["is_over"])
        await app(scope, receive, send)

    return with_event


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
    try:  # first: loading a model takes its time
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

    # What a client asks for is told to the client. The log is for the faults of the server.
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    place = f"[{host}]" if ":" in host else host
    print(f"mixdepth: serving {public} at http://{place}:{port}/v1, until Ctrl-C", flush=True)
    uvicorn.run(app, host=host, port=port, **uvicorn_options(limits))
