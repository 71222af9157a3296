"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API over a chat."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field, ValidationError

from paceline.server.chat import Chat, prepare_chat, read
from paceline.server.errors import ApiError, as_api_error
from paceline.server.foreign import settle
from paceline.server.media import has_media
from paceline.server.params import refuse
from paceline.server.schema import ChatRequest, Many, Named, Part, Speculation, of_table
from paceline.server.service import Service
from paceline.server.sse import EventStream, until_disconnect
from paceline.server.usage import report

PATH = "/v1/messages"
_TAIL = 64  # tokens in which a stop sequence is looked for
_THOUGHT = ("thinking", "redacted_thinking")
_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


class Block(Part):
    """A part of a message, of any type: fields that its type does not have are left out."""

    type: str = Field(max_length=64)
    text: str | None = None
    thinking: str | None = None
    source: dict[str, Any] | None = Field(None, description="of an image: base64 with its media_type")
    id: str | None = Field(None, max_length=256)
    name: str | None = Field(None, max_length=128)
    input: dict[str, Any] | None = None
    tool_use_id: str | None = Field(None, max_length=256)
    content: Any = None
    is_error: bool | None = None
    signature: Any = Field(None, description="accepted and ignored")
    data: Any = Field(None, description="accepted and ignored")
    cache_control: Any = Field(None, description="accepted and ignored")
    citations: Any = Field(None, description="accepted and ignored")


class Message(Part):
    role: Literal["user", "assistant", "system"]
    content: str | Many[Block]


class Tool(Part):
    type: str | None = Field(None, max_length=128, description="custom, or left out; others are not run here")
    name: str = Field(max_length=128)
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: Any = Field(None, description="accepted and ignored")


class Choice(Part):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, max_length=128)
    disable_parallel_tool_use: bool | None = None


class Thinking(Part):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=0, le=2**31 - 1, description="tokens of a thought, at most")
    display: Any = Field(None, description="accepted and ignored")


class Format(Part):
    type: Literal["json_schema"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class OutputConfig(Part):
    format: Format | None = None
    effort: str | None = Field(None, max_length=32)


class Counted(Named):
    """What both endpoints take."""

    messages: Many[Message] = Field(min_length=1, max_length=4096)
    system: str | Many[Block] | None = None
    tools: Many[Tool] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = Field(None, description="accepted and ignored")


class MessagesRequest(Counted):
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1, description="left out: as the server says")
    temperature: float | None = of_table("temperature")
    top_p: float | None = of_table("top_p")
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    stop_sequences: Many[str] | None = None
    stream: bool | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    speculation: Speculation | None = None
    metadata: Any = Field(None, description="accepted and ignored")
    service_tier: Any = Field(None, description="accepted and ignored")


def add_anthropic(app: FastAPI, service: Service) -> None:
    @app.post(PATH, include_in_schema=False)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        reply = await until_disconnect(request.receive, prepare_reply(service, body, request.state.salt))
        service.tell(reply.chat, request.state.told)
        if body.stream:
            return Events(reply.stream())
        return JSONResponse(await until_disconnect(request.receive, reply.answer()))

    @app.post(f"{PATH}/count_tokens", include_in_schema=False)
    async def count(body: Counted, request: Request) -> Response:
        service.warnings(body)
        chat = await asyncio.to_thread(_chat, service, body)
        settle(chat)
        seen = has_media(chat.messages)
        _, prompt = await service.media.run(seen, read, service, service.room, chat, measured=True)
        return JSONResponse({"input_tokens": len(prompt.ids)})


def envelope(error: ApiError) -> dict[str, Any]:
    """An error as this API tells it."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


async def prepare_reply(service: Service, body: MessagesRequest, key: str) -> Reply:
    """As prepare_chat, for a request of this API. Raises ApiError."""
    left = _left_out(body)
    if body.thinking is not None and body.thinking.budget_tokens and not service.room.chats.bounds_thoughts:
        left["thinking.budget_tokens"] = (
            "this model's thoughts have no tokens around them, so they are not bounded"
        )
    warnings = service.warnings(body) + service.unknown.left_out(left)
    chat = await prepare_chat(service, await asyncio.to_thread(_chat, service, body), key)
    chat.warnings += warnings
    return Reply(chat, body)


def _chat(service: Service, body: Counted) -> ChatRequest:
    """The request as a chat has it. Raises ApiError."""
    thinking, config, choice = body.thinking, body.output_config, body.tool_choice
    effort = None if thinking is None else "none" if thinking.type == "disabled" else "medium"
    given: dict[str, Any] = {
        "model": service.called(body.model),
        "messages": [
            converted for place, message in enumerate(_all(body)) for converted in _messages(message, place)
        ],
        "tools": _functions(body) or None,
        "reasoning_effort": config.effort
        if config is not None and config.effort and effort != "none"
        else effort,
    }
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name or ""}}
        given["tool_choice"] = {"auto": "auto", "none": "none", "any": "required", "tool": named}[choice.type]
        given["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
    if config is not None and config.format is not None:
        given["response_format"] = {"type": "json_schema", "json_schema": {"schema": config.format.schema_}}
    if thinking is not None and thinking.type == "enabled" and service.room.chats.bounds_thoughts:
        given["thinking_budget"] = thinking.budget_tokens
    if isinstance(body, MessagesRequest):
        same = ("temperature", "top_p", "top_k", "seed", "speculation", "stream")
        given |= {name: getattr(body, name) for name in same}
        given |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences}
    try:
        return ChatRequest.model_validate(given)
    except ValidationError as error:  # of what is checked there only
        first = error.errors()[0]
        raise refuse(".".join(map(str, first["loc"][:2])) or "messages", first["msg"]) from error


def _all(body: Counted) -> list[Message]:
    """The system prompt and the messages, in order."""
    system = body.system
    if isinstance(system, list):
        system = "\n\n".join(block.text or "" for block in system)
    first = [Message.model_validate({"role": "system", "content": system})] if system else []
    return [*first, *body.messages]


def _functions(body: Counted) -> list[dict[str, Any]]:
    out = []
    for tool in body.tools or []:
        if tool.type in (None, "custom") and tool.input_schema is not None:
            function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
            out.append({"type": "function", "function": function | {"strict": tool.strict}})
    return out


def _left_out(body: Counted) -> dict[str, str]:
    """What of a request does not reach the model as it is: field -> why."""
    return {
        f"tools.{i}": f"tools of type {(tool.type or 'custom')[:40]!r} without an input_schema are not run here"
        for i, tool in enumerate(body.tools or [])
        if tool.type not in (None, "custom") or tool.input_schema is None
    }


def _messages(message: Message, place: int) -> Iterator[dict[str, Any]]:
    """A message as chats have it: results of tools are turns of their own, thoughts and calls fields. Raises ApiError."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    parts: list[dict[str, Any]] = []
    calls, thoughts, results = [], "", 0
    for i, block in enumerate(message.content):
        where = f"messages.{place}.content.{i}"
        if block.type == "tool_result":
            results += 1
            shown = _parts(block.content, where)
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": shown}
        elif block.type == "tool_use":
            calls.append(
                {"id": block.id, "function": {"name": block.name or "", "arguments": block.input or {}}}
            )
        elif block.type in _THOUGHT:
            thoughts += block.thinking or ""
        else:
            parts += _part(block, where)
    made: dict[str, Any] = {"role": message.role, "content": parts or None}
    if calls:
        made["tool_calls"] = calls
    if thoughts:
        made["reasoning_content"] = thoughts
    if parts or calls or not results:
        yield made


def _parts(content: Any, where: str) -> list[dict[str, Any]] | str:
    """The content of a result: a text, or blocks."""
    if content is None or isinstance(content, str):
        return content or ""
    try:
        blocks = [Block.model_validate(given) for given in content] if isinstance(content, list) else None
    except ValidationError:
        blocks = None
    if blocks is None:
        raise refuse(f"{where}.content", "give a text, or a list of blocks")
    return [part for block in blocks for part in _part(block, where)]


def _part(block: Block, where: str) -> list[dict[str, Any]]:
    source = block.source or {}
    if block.type == "text":
        return [{"type": "text", "text": block.text or ""}]
    if block.type == "image" and source.get("type") == "base64":
        return [
            {
                "type": "image_url",
                "image_url": {"url": f"data:{source.get('media_type')};base64,{source.get('data')}"},
            }
        ]
    if block.type == "document" and source.get("type") == "text" and isinstance(source.get("data"), str):
        return [{"type": "text", "text": source["data"]}]
    raise refuse(
        where,
        f"blocks of type {block.type[:40]!r} in this form are not supported: send text, or images as base64",
    )


@dataclass(slots=True)
class Content:
    """The blocks of an answer as they grow, and the events that tell of it."""

    blocks: list[dict[str, Any]] = field(default_factory=list)

    def push(self, piece: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """`piece`: what a chat's delta holds."""
        if piece.get("reasoning_content"):
            yield from self._grow(
                {"type": "thinking", "thinking": "", "signature": ""}, "thinking", piece["reasoning_content"]
            )
        if piece.get("content"):
            yield from self._grow({"type": "text", "text": ""}, "text", piece["content"])
        for call in piece.get("tool_calls", ()):
            made = call["function"]
            if "name" in made:
                yield from self._begin(
                    {"type": "tool_use", "id": call["id"], "name": made["name"], "input": ""}
                )
            if made["arguments"]:
                self.blocks[-1]["input"] += made["arguments"]
                yield self._delta({"type": "input_json_delta", "partial_json": made["arguments"]})

    def close(self) -> Iterator[dict[str, Any]]:
        """End the last block."""
        if self.blocks:
            yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def whole(self) -> list[dict[str, Any]]:
        """The blocks; a call that was cut has no arguments."""
        return [
            block if block["type"] != "tool_use" else block | {"input": _object(block["input"])}
            for block in self.blocks
        ]

    def _grow(self, empty: dict[str, Any], name: str, text: str) -> Iterator[dict[str, Any]]:
        if not self.blocks or self.blocks[-1]["type"] != empty["type"]:
            yield from self._begin(empty)
        self.blocks[-1][name] += text
        yield self._delta({"type": f"{name}_delta", name: text})

    def _begin(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self.close()
        self.blocks.append(block)
        shown = block | {"input": {}} if block["type"] == "tool_use" else dict(block)
        yield {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": shown}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def _object(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}


@dataclass(slots=True)
class Reply:
    """One request, ready to run."""

    chat: Chat
    body: MessagesRequest
    id: str = field(default_factory=lambda: "msg_" + uuid.uuid4().hex[:24])
    content: Content = field(default_factory=Content)
    tail: deque[int] = field(default_factory=lambda: deque(maxlen=_TAIL))

    def __post_init__(self) -> None:
        self.chat.id = self.id  # what the request log names

    async def answer(self) -> dict[str, Any]:
        async with aclosing(self.chat.pieces(self.tail)) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                for _ in self.content.push(piece):
                    pass
        ends = {"content": self.content.whole(), **self._reason(), "usage": self._usage()}
        return self._head() | ends | self._report()

    async def stream(self) -> AsyncIterator[bytes]:
        begun = False
        async with aclosing(self.chat.pieces(self.tail)) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                out = b"".join(map(_event, self.content.push(piece)))
                if not begun:  # an error before the first token has its own status
                    begun = True
                    first: dict[str, Any] = {
                        "content": [],
                        "stop_reason": None,
                        "stop_sequence": None,
                        "usage": self._usage(),
                    }
                    out = _event({"type": "message_start", "message": self._head() | first}) + out
                yield out
        last = {"type": "message_delta", "delta": self._reason(), "usage": self._usage()} | self._report()
        yield b"".join(map(_event, [*self.content.close(), last, {"type": "message_stop"}]))

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.chat.body.model}

    def _reason(self) -> dict[str, Any]:
        reason = self.chat.reason
        reached = self._stopped_at() if reason == "stop" else None
        names = {"tool_calls": "tool_use", "length": "max_tokens"}
        return {
            "stop_reason": "stop_sequence" if reached else names.get(reason, "end_turn"),
            "stop_sequence": reached,
        }

    def _stopped_at(self) -> str | None:
        """The stop sequence that ended the text; None where a token did."""
        tokenizer, params = self.chat.room.tokenizer, self.chat.params
        if not self.tail or self.tail[-1] in {*tokenizer.eos_ids, *params.stop_token_ids}:
            return None
        text = tokenizer.decode(list(self.tail), skip_special=False, begins=False)
        return next((stop for stop in params.stop if stop in text), None)

    def _usage(self) -> dict[str, Any]:
        counted = self.chat.usage(self.chat.stats)
        cached = counted["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counted["prompt_tokens"] - cached, "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0, "output_tokens": counted["completion_tokens"],
        }  # fmt: skip

    def _report(self) -> dict[str, Any]:
        return report(self.chat.stats, self.chat.params.seed, self.chat.warnings)


class Events(EventStream):
    waiting = b'event: ping\ndata: {"type": "ping"}\n\n'

    def failure(self, error: Exception) -> bytes:
        return _event(envelope(as_api_error(error)))


def _event(data: dict[str, Any]) -> bytes:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"event: {data['type']}\ndata: {text}\n\n".encode()
