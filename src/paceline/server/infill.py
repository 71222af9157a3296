"""POST /infill, as llama.cpp has it: what stands between two texts, for models that were taught to write it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from paceline.server.completions import Completion, prepare_completion
from paceline.server.schema import CompletionRequest, Part, Sampling
from paceline.server.service import Service
from paceline.server.sse import EventStream, event, until_disconnect


class Extra(Part):
    filename: str = Field("", max_length=1024)
    text: str


class InfillRequest(Sampling):
    input_prefix: str
    input_suffix: str
    prompt: str | None = Field(None, description="goes on the prefix")
    input_extra: list[Extra] | None = Field(None, max_length=64, description="other files, shown first")
    samplers: Any = Field(None, description="accepted and ignored")


def add_infill(app: FastAPI, service: Service) -> None:
    @app.post("/infill", include_in_schema=False)
    async def infill(body: InfillRequest, request: Request) -> Response:
        ready = await until_disconnect(request.receive, _prepared(service, body, request.state.salt))
        service.tell(ready, request.state.told)
        if body.stream:
            return EventStream(_stream(service, ready))
        return JSONResponse(await until_disconnect(request.receive, _whole(service, ready)))


async def _prepared(service: Service, body: InfillRequest, salt: str) -> Completion:
    warnings = service.warnings(body)
    files = {extra.filename or f"file{i}": extra.text for i, extra in enumerate(body.input_extra or [])}
    given = {name: getattr(body, name) for name in Sampling.model_fields} | {
        "model": service.model, "prompt": body.input_prefix + (body.prompt or ""), "suffix": body.input_suffix,
    }  # fmt: skip
    if body.max_tokens is None and body.n_predict is None and body.max_new_tokens is None:
        given["max_tokens"] = -1
    ready = await prepare_completion(service, CompletionRequest.model_validate(given), salt, files)
    ready.warnings += warnings
    return ready


async def _stream(service: Service, ready: Completion) -> AsyncIterator[bytes]:
    async with aclosing(ready.pieces()) as pieces:  # type: ignore[type-var]
        async for piece in pieces:
            if piece:
                yield event({"content": piece["content"], "stop": False})
    yield event(_last(service, ready, ""))


async def _whole(service: Service, ready: Completion) -> dict[str, Any]:
    text = ""
    async with aclosing(ready.pieces()) as pieces:  # type: ignore[type-var]
        async for piece in pieces:
            text += piece.get("content", "")
    return _last(service, ready, text)


def _last(service: Service, ready: Completion, text: str) -> dict[str, Any]:
    kind = {"length": "limit"}.get(ready.reason, "eos")
    return {
        "content": text, "stop": True, "stop_type": kind, "model": service.model, "truncated": False,
        "tokens_evaluated": len(ready.ask.jobs[0][0]), "tokens_predicted": ready.completion_tokens,
        **({"warnings": ready.warnings} if ready.warnings else {}),
    }  # fmt: skip
