"""POST /infill, as llama.cpp has it: what stands between two texts, for models that were taught to write it."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import Field

from paceline.server.completions import Completion, prepare_completion
from paceline.server.llama import LlamaRequest, as_completion, respond
from paceline.server.schema import Part
from paceline.server.service import Service
from paceline.server.sse import until_disconnect


class Extra(Part):
    filename: str = Field("", max_length=1024)
    text: str


class InfillRequest(LlamaRequest):
    input_prefix: str
    input_suffix: str
    prompt: str | None = Field(None, description="goes on the prefix")
    input_extra: list[Extra] | None = Field(None, max_length=64, description="other files, shown first")
    samplers: Any = Field(None, description="accepted and ignored")


def add_infill(app: FastAPI, service: Service) -> None:
    @app.post("/infill", include_in_schema=False)
    async def infill(body: InfillRequest, request: Request) -> Response:
        ready = await until_disconnect(request.receive, _prepared(service, body, request.state.salt))
        return await respond(service, body, ready, request)


async def _prepared(service: Service, body: InfillRequest, salt: str) -> Completion:
    warnings = service.warnings(body)
    files = {extra.filename or f"file{i}": extra.text for i, extra in enumerate(body.input_extra or [])}
    text = body.input_prefix + (body.prompt or "")
    made = as_completion(service, body, prompt=text, suffix=body.input_suffix)
    ready = await prepare_completion(service, made, salt, files)
    ready.warnings += warnings
    return ready
