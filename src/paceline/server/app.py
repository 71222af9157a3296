"""The application: routes, and how errors look. Everything stands behind security.Gate."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline import __version__
from paceline.core import SamplingParams
from paceline.errors import PacelineError
from paceline.options import Number, Whole, rows_of
from paceline.server import answers
from paceline.server.anthropic import PATH as MESSAGES
from paceline.server.anthropic import add_anthropic, envelope
from paceline.server.bodies import BodyRoute
from paceline.server.chat import prepare_chat
from paceline.server.completions import prepare_completion
from paceline.server.embeddings import add_embeddings
from paceline.server.errors import ApiError, as_api_error
from paceline.server.infill import add_infill
from paceline.server.llama import add_llama
from paceline.server.ollama import add_ollama
from paceline.server.paths import no_such_path
from paceline.server.request_log import Write
from paceline.server.responses import ResponsesRequest, prepare_response
from paceline.server.schema import ChatRequest, CompletionRequest
from paceline.server.security import Gate, Keys
from paceline.server.service import Service
from paceline.server.sse import EventStream, until_disconnect
from paceline.server.tokens import DetokenizeRequest, TokenizeRequest, detokenize, tokenize

log = logging.getLogger(__name__)
ABOUT = (
    "OpenAI's chat completions, completions and responses, Ollama's API and Anthropic's messages, for one model. "
    "`speculation` is ours: in a request how it is drafted, in an answer what that brought."
)
PAGES = {"index.html": "/", "docs.html": "/docs"}  # every other file of the page is served under its name
KINDS = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": answers.ErrorAnswer}
    for status in (400, 401, 403, 404, 405, 408, 413, 415, 421, 429, 500, 503, 504)
}


class Heads:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, without_body)


def build_app(service: Service, keys: Keys, write: Write | None = None) -> FastAPI:
    """`write` takes the lines of the request log, if one is kept."""
    app = routes(service, keys.wanted)
    counted = service.metrics.answered
    app.add_middleware(
        Gate, config=service.config, keys=keys, count=counted, write=write, limit=service.most_bytes
    )
    return app


def routes(service: Service, needs_key: bool) -> FastAPI:
    """All routes of a model, without the gate before them."""
    app = FastAPI(title="paceline", version="1", docs_url=None, redoc_url=None, responses=_ERRORS)
    if service.config.root_path:
        app.servers = [{"url": service.config.root_path}]
    app.state.service = service
    app.router.route_class = BodyRoute
    app.openapi = lambda: _schema(app, service, needs_key)  # type: ignore[method-assign]
    add_handlers(app)
    _add_state_routes(app, service)
    _add_generation_routes(app, service)
    _add_token_routes(app, service)
    add_ollama(app, service)
    add_anthropic(app, service)
    add_embeddings(app, service)
    add_llama(app, service)
    add_infill(app, service)
    page = files("paceline.server") / "page"
    for file in page.iterdir():
        if file.is_file():
            _add_page(app, PAGES.get(file.name, f"/{file.name}"), file)
    for file in (page / "vendor").iterdir():
        _add_page(app, f"/vendor/{file.name}", file)
    app.add_middleware(Heads)
    return app


def _add_state_routes(app: FastAPI, service: Service) -> None:
    @app.get("/healthz", response_model=answers.Health, include_in_schema=False)
    @app.get("/health", response_model=answers.Health)
    async def health() -> JSONResponse:
        """200 while requests are taken, else 503. The only route without a key."""
        state = service.worker.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    @app.get("/version", response_model=answers.Version)
    async def version() -> JSONResponse:
        return JSONResponse({"version": __version__})

    @app.get("/models", response_model=answers.ModelList, include_in_schema=False)
    @app.get("/v1/models", response_model=answers.ModelList)
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [model_of(service, name) for name in service.names]})

    @app.get("/v1/models/{model:path}", response_model=answers.ModelCard)
    async def model(model: str) -> JSONResponse:
        if model not in service.names:
            raise ApiError(
                404, f"model {model[:80]!r} is not served here", param="model", code="model_not_found"
            )
        return JSONResponse(model_of(service, model))

    @app.get("/lora-adapters", include_in_schema=False)
    async def adapters() -> JSONResponse:
        """llama.cpp's: what a request's `lora` may name by id. No adapter holds unless a request says so."""
        return JSONResponse(
            [{"id": i, "path": name, "scale": 0.0} for i, name in enumerate(service.room.adapters)]
        )

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus text format."""
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def model_of(service: Service, name: str) -> dict[str, Any]:
    card: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "paceline",
    }
    if service.loaded is not None:
        room = service.loaded
        if name in room.adapters:
            card |= {"parent": service.model}
        card |= {
            "max_model_len": room.max_len,
            "drafters": list(room.drafters),
            "sampling": dict(room.sampling),
            "settings": _settings(room.sampling),
        }
        card["modalities"] = ["text", *room.reads]
        card |= {"chat": room.chat, "thinking": room.format.switches, "chat_format": room.format.name}
    return card


def _settings(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers that the page lets a reader set: their bounds, and what holds where nothing is set.

    null: no bound that JavaScript can count to, or a value that differs from request to request.
    """
    out: dict[str, Any] = {}
    for row in rows_of(SamplingParams, "page"):
        if isinstance(row.kind, Whole | Number):
            default = None if row.name == "max_tokens" else row.default  # as many as fit
            low, high = (bound if abs(bound) < 2**53 else None for bound in (row.kind.low, row.kind.high))
            out[row.name] = {"default": sampling.get(row.name, default), "low": low, "high": high}
    return out


def _add_generation_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", response_model=answers.ChatAnswer)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """An answer to a conversation, streamed as server-sent events with `stream: true`."""
        ready = await until_disconnect(request.receive, prepare_chat(service, body, request.state.salt))
        service.tell(ready, request.state.told)
        if body.stream:
            return EventStream(ready.stream())
        return JSONResponse(await until_disconnect(request.receive, ready.answer()))

    @app.post("/v1/completions", response_model=answers.CompletionAnswer)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """What follows a prompt, streamed as server-sent events with `stream: true`."""
        ready = await until_disconnect(request.receive, prepare_completion(service, body, request.state.salt))
        service.tell(ready, request.state.told)
        if body.stream:
            return EventStream(ready.stream())
        return JSONResponse(await until_disconnect(request.receive, ready.answer()))

    @app.post("/v1/responses", response_model=answers.ResponsesAnswer)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """An answer to a conversation, in the shapes of OpenAI's Responses API."""
        ready = await until_disconnect(request.receive, prepare_response(service, body, request.state.salt))
        service.tell(ready.chat, request.state.told)
        if body.stream:
            return EventStream(ready.stream())
        return JSONResponse(await until_disconnect(request.receive, ready.answer()))


def _add_token_routes(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", response_model=answers.Tokens)
    async def to_tokens(body: TokenizeRequest) -> Response:
        """Token ids of a text, or of a conversation in the model's template."""
        return Response(await tokenize(service, body), media_type="application/json")

    @app.post("/detokenize", response_model=answers.Detokenized)
    async def to_text(body: DetokenizeRequest) -> JSONResponse:
        """The text of token ids."""
        return JSONResponse(await detokenize(service, body))


def _add_page(app: FastAPI, path: str, file: Traversable) -> None:
    content, kind = file.read_bytes(), KINDS[file.name.rpartition(".")[2]]

    async def page() -> Response:
        return Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})

    app.add_api_route(path, page, methods=["GET"], include_in_schema=False)


def add_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        deepest = max(error.errors(), key=_closeness)
        if deepest["type"] == "json_invalid":
            return shown(request, ApiError(400, "the body is not valid JSON", code="bad_json"))
        where = ".".join(str(part) for part in deepest["loc"][1:] if _is_name(part))
        message = f"{where or 'the body'}: {deepest['msg'].removeprefix('Value error, ')}"
        return shown(request, ApiError(400, message, param=where or None, code="invalid_value"))

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> Response:
        known = {
            400: ("the body is not valid JSON, or is nested too deep", "bad_json"),
            405: ("this path does not take this method", None),
        }
        if error.status_code == 404:
            return shown(request, no_such_path(request.url.path))
        message, code = known.get(error.status_code, (str(error.detail), None))
        api_error = ApiError(error.status_code, message, code=code, headers=dict(error.headers or {}))
        return shown(request, api_error)

    @app.exception_handler(ApiError)
    @app.exception_handler(PacelineError)
    async def known(request: Request, error: Exception) -> Response:
        return shown(request, as_api_error(error))

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> Response:
        return shown(request, as_api_error(error))


def shown(request: Request, error: ApiError) -> Response:
    """OpenAI's envelope, but what Ollama's clients read below /api, and Anthropic's below their path."""
    if request.url.path.startswith(MESSAGES):
        return JSONResponse(envelope(error), error.status, error.headers)
    if request.url.path.startswith("/api/"):
        return JSONResponse({"error": error.message}, error.status, error.headers)
    return error.response()


def _closeness(error: dict[str, Any]) -> tuple[int, bool]:
    """Sort key: of a union's errors, report the branch that matched deepest, and among these one of the right type."""
    return len(error["loc"]), not error["type"].endswith("_type")


def _is_name(part: str | int) -> bool:
    """Whether this step of an error's location is a field or an index, and not a form that pydantic tried."""
    return isinstance(part, int) or (part.islower() and part.isidentifier() and part not in ("str", "list"))


def _add_limits(schemas: dict[str, Any], service: Service) -> None:
    """What only this server's settings know. A field that may be null has its real form first in `anyOf`."""
    c = service.config
    limits = {
        "n": {"maximum": min(c.max_n, c.max_texts)}, "logit_bias": {"maxProperties": c.max_logit_bias},
        "tools": {"maxItems": c.max_tools}, "top_logprobs": {"maximum": c.max_logprobs},
        "logprobs": {"maximum": c.max_logprobs},
    }  # fmt: skip
    width = service.loaded.vocab_size if service.loaded is not None else 2**31
    prompts = schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"]
    prompts[1] |= {"minItems": 1, "maxItems": service.config.max_prompts}
    prompts[3] |= {"minItems": 1, "maxItems": service.config.max_prompts}
    prompts[2]["minItems"] = 1
    prompts[2]["items"]["exclusiveMaximum"] = prompts[3]["items"]["items"]["exclusiveMaximum"] = width
    word = {"maxLength": c.max_stop_length}
    for name in ("ChatRequest", "CompletionRequest", "ResponsesRequest"):
        fields = schemas[name]["properties"]
        if c.strict:
            fields["model"]["anyOf"][0]["enum"] = list(service.names)
        for field, limit in limits.items():
            if field in fields and fields[field]["anyOf"][0]["type"] != "boolean":
                fields[field]["anyOf"][0] |= limit
        fields["stop_token_ids"]["anyOf"][0]["items"]["exclusiveMaximum"] = width
        fields["stop"]["anyOf"][0] |= word
        fields["stop"]["anyOf"][1] |= {"maxItems": c.max_stop, "items": {"type": "string", **word}}
        fields["logit_bias"]["anyOf"][0] |= {
            "propertyNames": {"pattern": _numeral_below(width)},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }


def _numeral_below(limit: int) -> str:
    """A pattern for the decimal numerals of 0 .. limit - 1."""
    digits = str(limit - 1)
    options = [f"[0-9]{{1,{len(digits) - 1}}}"] if len(digits) > 1 else []
    for i, digit in enumerate(digits):
        if digit != "0":
            options.append(f"{digits[:i]}[0-{int(digit) - 1}][0-9]{{{len(digits) - i - 1}}}")
    return f"^({'|'.join([*options, digits])})$"


def _schema(app: FastAPI, service: Service, needs_key: bool) -> dict[str, Any]:
    """FastAPI's schema, with what this server really takes and answers: its model, 400 for 422, streams."""
    if app.openapi_schema:
        return app.openapi_schema
    schema = get_openapi(
        title=app.title, version=app.version, routes=app.routes, description=ABOUT, servers=app.servers
    )
    for path, methods in schema["paths"].items():
        for method in methods.values():
            method["responses"].pop("422", None)
            if path == "/metrics":
                method["responses"]["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
            if path.endswith(("completions", "responses")):
                content = method["responses"]["200"]["content"]
                content["text/event-stream"] = {}  # OpenAPI 3.1 has no words for a stream of events
    for name in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(name, None)
    _add_limits(schema["components"]["schemas"], service)
    if needs_key:
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"key": []}]
        schema["paths"]["/health"]["get"]["security"] = []
    if service.loaded is not None:
        app.openapi_schema = schema
    return schema
