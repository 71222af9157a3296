"""Ollama's /api/chat, /api/generate, /api/tags and /api/version, in terms of the requests this server has anyway."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi import Response as HttpResponse
from fastapi.responses import JSONResponse
from pydantic import Field

from paceline import __version__
from paceline.core import TokenLogprob
from paceline.server.chat import Chat, prepare_chat
from paceline.server.completions import Completion, prepare_completion
from paceline.server.errors import ApiError, as_api_error
from paceline.server.logprobs import chat_entry
from paceline.server.ollama_models import model_about, model_card
from paceline.server.params import refuse
from paceline.server.schema import (
    ChatRequest,
    CompletionRequest,
    FunctionCall,
    Many,
    Named,
    Part,
    Tool,
    of_table,
)
from paceline.server.service import Service
from paceline.server.sse import EventStream, until_disconnect
from paceline.server.usage import report

LATEST = ":latest"


class Options(Part):
    """Where a field has another name here, `NAMES` has it."""

    temperature: float | None = of_table("temperature")
    top_k: int | None = of_table("top_k")
    top_p: float | None = of_table("top_p")
    min_p: float | None = of_table("min_p")
    typical_p: float | None = of_table("typical_p")
    seed: int | None = of_table("seed")
    stop: Many[str] | str | None = None
    presence_penalty: float | None = of_table("presence_penalty")
    frequency_penalty: float | None = of_table("frequency_penalty")
    mirostat: int | None = Field(None, description="0 or 2")
    mirostat_tau: float | None = of_table("mirostat_tau")
    mirostat_eta: float | None = of_table("mirostat_eta")
    num_predict: int | None = of_table("max_tokens", low=-2)
    repeat_penalty: float | None = of_table("repetition_penalty")
    repeat_last_n: int | None = of_table("penalty_last_n")


NAMES = {"repeat_penalty": "repetition_penalty", "repeat_last_n": "penalty_last_n"}


class Call(Part):
    function: FunctionCall


class Message(Part):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Many[str] | None = Field(None, max_length=64, description="base64, shown before the text")
    tool_calls: Many[Call] | None = Field(None, max_length=128)
    tool_name: str | None = Field(None, max_length=256)


class Asked(Named):
    """What both have."""

    stream: bool | None = Field(None, description="true if it is left out")
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | str | None = None
    keep_alive: Any = Field(None, description="has no effect")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, description="needs logprobs")
    truncate: bool | None = Field(
        None, description="false: a chat over the context is refused, not shortened"
    )


class ShowAsked(Part):
    model: str | None = Field(None, max_length=256)
    name: str | None = Field(None, max_length=256, description="the older name of model")
    verbose: bool | None = Field(None, description="accepted and ignored")


class ChatAsked(Asked):
    messages: Many[Message] = Field(default_factory=list, max_length=4096)
    tools: Many[Tool] | None = None


class GenerateAsked(Asked):
    prompt: str = ""
    system: str | None = None
    suffix: str | None = Field(None, description="what follows: for models that write between two texts")
    images: Many[str] | None = Field(None, max_length=64, description="base64, shown before the text")
    raw: bool | None = Field(None, description="continue the prompt as it is, without the chat template")


def add_ollama(app: FastAPI, service: Service) -> None:
    @app.post("/api/chat", include_in_schema=False)
    async def chat(body: ChatAsked, request: Request) -> HttpResponse:
        if not body.messages:
            return _loaded(service, body, {"message": {"role": "assistant", "content": ""}})
        warnings = _settled(service, body)
        ready, left_out = await until_disconnect(request.receive, _fitting(service, body, request.state.salt))
        ready.warnings += warnings + left_out
        return await _answer(Turn(service, ready, body, "message"), request)

    @app.post("/api/generate", include_in_schema=False)
    async def generate(body: GenerateAsked, request: Request) -> HttpResponse:
        if not body.prompt:
            return _loaded(service, body, {"response": ""})
        warnings = _settled(service, body)
        ready = await until_disconnect(request.receive, _generated(service, body, request.state.salt))
        ready.warnings += warnings
        return await _answer(Turn(service, ready, body, "response"), request)

    @app.get("/api/tags", include_in_schema=False)
    async def tags() -> JSONResponse:
        made = datetime.fromtimestamp(service.created, UTC).isoformat()
        return JSONResponse(
            {"models": [model_card(service, name) | {"modified_at": made} for name in service.names]}
        )

    @app.get("/api/ps", include_in_schema=False)
    async def running() -> JSONResponse:
        ends = datetime.fromtimestamp(service.created, UTC).replace(year=9999).isoformat()
        more = {"expires_at": ends, "size_vram": 0} | (
            {"context_length": service.loaded.max_len} if service.loaded is not None else {}
        )
        names = service.names if service.loaded is not None else ()
        return JSONResponse({"models": [model_card(service, name) | more for name in names]})

    @app.post("/api/show", include_in_schema=False)
    async def show(body: ShowAsked) -> JSONResponse:
        asked = body.model or body.name or service.model
        if asked not in service.names and asked.removesuffix(LATEST) not in service.names:
            raise ApiError(404, f"model {asked[:80]!r} not found", param="model", code="model_not_found")
        return JSONResponse(model_about(service))

    @app.get("/api/version", include_in_schema=False)
    async def version() -> JSONResponse:
        return JSONResponse({"version": __version__})


def _loaded(service: Service, body: Asked, fields: dict[str, Any]) -> JSONResponse:
    """A request without text only asks for the model to be there, or to go: it stays, as it is the only one."""
    _ = service.room
    unload = body.keep_alive == 0 or (
        isinstance(body.keep_alive, str) and body.keep_alive.strip("smh") == "0"
    )
    reason = "unload" if unload and not isinstance(body.keep_alive, bool) else "load"
    return JSONResponse(
        {"model": service.model, "created_at": _now(), **fields, "done": True, "done_reason": reason}
    )


async def _generated(service: Service, body: GenerateAsked, salt: str) -> Chat | Completion:
    """What /api/generate asks for. Raises ApiError."""
    if body.raw or body.suffix:
        return await prepare_completion(service, _completion(service, body), salt)
    return await prepare_chat(service, _as_chat(service, body), salt)


async def _fitting(service: Service, body: ChatAsked, salt: str) -> tuple[Chat, list[str]]:
    """The chat, without its oldest turns where they are over the context, as Ollama has it. Raises ApiError."""
    try:
        return await prepare_chat(service, await asyncio.to_thread(_chat, service, body), salt), []
    except ApiError as error:
        messages = body.messages
        turns = [i for i, message in enumerate(messages) if message.role == "user"][1:]
        if error.code != "context_length_exceeded" or body.truncate is False or not turns:
            raise
        refusal = error
    fitting: tuple[Chat, list[str]] | None = None
    low, high = 0, len(turns) - 1
    while low <= high:  # the fewest turns that have to go
        at = (low + high) // 2
        left = [m for i, m in enumerate(messages) if i >= turns[at] or m.role in ("system", "developer")]
        try:
            asked = await asyncio.to_thread(_chat, service, body.model_copy(update={"messages": left}))
            chat = await prepare_chat(service, asked, salt)
            gone = len(messages) - len(left)
            fitting, high = (chat, [f"messages: the oldest {gone} were left out, to fit the context"]), at - 1
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            low = at + 1
    if fitting is None:
        raise refusal
    return fitting


async def _answer(turn: Turn, request: Request) -> HttpResponse:
    turn.service.tell(turn.ready, request.state.told)
    if turn.body.stream is not False:
        return Lines(turn.lines())
    return JSONResponse(await until_disconnect(request.receive, turn.whole()))


def _settled(service: Service, body: Asked) -> list[str]:
    """What of the request is ignored; its model as it is called here, where `:latest` means nothing."""
    if body.model is not None and body.model not in service.names:
        body.model = body.model.removesuffix(LATEST)
    return service.warnings(body)


def _common(service: Service, body: Asked) -> dict[str, Any]:
    """The fields of our own requests."""
    options = body.options or Options.model_validate({})
    out = {NAMES.get(name, name): getattr(options, name) for name in Options.model_fields}
    length = out.pop("num_predict")
    if length is None:
        length = service.config.default_output or -1
    out |= {"model": service.called(body.model), "max_tokens": max(length, -1)}
    if body.format:
        out["response_format"] = {"type": "json_object"} if body.format == "json" else {
            "type": "json_schema", "json_schema": {"schema": body.format},
        }  # fmt: skip
    return out


def _likely(body: Asked) -> dict[str, Any]:
    """The fields of a chat for log probabilities."""
    return {"logprobs": body.logprobs, "top_logprobs": body.top_logprobs if body.logprobs else None}


def _chat(service: Service, body: ChatAsked) -> ChatRequest:
    messages = []
    for message in body.messages:
        calls = [{"function": call.function} for call in message.tool_calls or []]
        messages.append(
            {"role": message.role, "content": _seen(message.images, message.content), "tool_calls": calls or None,
             "reasoning_content": message.thinking, "name": message.tool_name}
        )  # fmt: skip
    return ChatRequest.model_validate(
        _common(service, body)
        | {"messages": messages, "tools": body.tools, "think": body.think}
        | _likely(body)
    )


def _as_chat(service: Service, body: GenerateAsked) -> ChatRequest:
    system = [{"role": "system", "content": body.system}] if body.system else []
    messages = [*system, {"role": "user", "content": _seen(body.images, body.prompt)}]
    more = {"messages": messages, "think": body.think} | _likely(body)
    return ChatRequest.model_validate(_common(service, body) | more)


def _completion(service: Service, body: GenerateAsked) -> CompletionRequest:
    _only_text(body, ("images",))
    if body.system:
        raise refuse("system", "raw: true and suffix take the prompt as it is: put it there")
    made = _common(service, body) | {"prompt": body.prompt, "suffix": body.suffix}
    made["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    return CompletionRequest.model_validate(made)


def _seen(images: list[str] | None, text: str | None) -> str | list[dict[str, Any]] | None:
    """Content with the pictures before the text."""
    if not images:
        return text
    return [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text or ""}]


def _only_text(body: GenerateAsked, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(body, name):
            raise refuse(name, "is not supported: leave it out")


@dataclass(slots=True)
class Turn:
    """One request, ready to run. `where`: the field that holds what is said, message or response."""

    service: Service
    ready: Chat | Completion
    body: Asked
    where: str
    begin: float = 0.0

    async def lines(self) -> AsyncIterator[bytes]:
        waiting: list[TokenLogprob] = []  # of text that is not shown yet
        async with aclosing(self._pieces()) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                waiting += piece.get("logprobs", ())
                content, thoughts = _shown(piece)
                if content or thoughts:
                    told = self._head() | self._said(content, thoughts) | self._likely(waiting)
                    yield _line(told | {"done": False})
                    waiting.clear()
        yield _line(self._head() | self._said("", "", self._calls()) | self._likely(waiting) | self._end())

    async def whole(self) -> dict[str, Any]:
        content_all = thought = ""
        entries: list[TokenLogprob] = []
        async for piece in self._pieces():
            content, thoughts = _shown(piece)
            content_all, thought = content_all + content, thought + thoughts
            entries += piece.get("logprobs", ())
        told = self._head() | self._said(content_all, thought, self._calls()) | self._likely(entries)
        return told | self._end()

    async def _pieces(self) -> AsyncIterator[dict[str, Any]]:
        self.begin = time.monotonic()
        async with aclosing(self.ready.pieces()) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                yield piece

    def _likely(self, entries: list[TokenLogprob]) -> dict[str, Any]:
        if not entries:
            return {}
        made = [chat_entry(self.ready.room.tokenizer, entry) for entry in entries]
        if not self.body.top_logprobs:
            made = [{name: entry[name] for name in ("token", "logprob", "bytes")} for entry in made]
        return {"logprobs": made}

    def _head(self) -> dict[str, Any]:
        return {"model": self.body.model or self.service.model, "created_at": _now()}

    def _said(self, content: str, thoughts: str, calls: Any = ()) -> dict[str, Any]:
        thinking = {"thinking": thoughts} if thoughts else {}
        if self.where == "response":
            return {"response": content, **thinking}
        more = {"tool_calls": calls} if calls else {}
        return {"message": {"role": "assistant", "content": content, **thinking, **more}}

    def _calls(self) -> list[dict[str, Any]]:
        """Whole calls with their arguments as objects. One that was cut has none: `done_reason` says so."""
        out = []
        for call in self.ready.choices[0].calls if isinstance(self.ready, Chat) else []:
            made = call["function"]
            try:
                out.append(
                    {"function": {"name": made["name"], "arguments": json.loads(made["arguments"] or "{}")}}
                )
            except (ValueError, RecursionError):
                continue
        return out

    def _end(self) -> dict[str, Any]:
        ready = self.ready
        stats = ready.stats[0]
        first = min(stats.first_token_seconds, stats.seconds)
        return {
            "done": True, "done_reason": "length" if ready.reason == "length" else "stop",
            "total_duration": _nanoseconds(time.monotonic() - self.begin), "load_duration": 0,
            "prompt_eval_count": len(ready.ask.jobs[0][0]), "prompt_eval_duration": _nanoseconds(first),
            "eval_count": ready.completion_tokens, "eval_duration": _nanoseconds(stats.seconds - first),
            **report(ready.stats, ready.params.seed, ready.warnings),
        }  # fmt: skip


def _shown(piece: dict[str, Any]) -> tuple[str, str]:
    """What a piece says, and what it thinks."""
    return piece.get("content", ""), piece.get("reasoning_content", "")


class Lines(EventStream):
    """JSON, one object a line."""

    media_type = "application/x-ndjson"
    waiting = b""  # there are no comments in such a stream

    def failure(self, error: Exception) -> bytes:
        return _line({"error": as_api_error(error).message})


def _line(data: dict[str, Any]) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
