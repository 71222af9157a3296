"""POST /v1/responses: OpenAI's Responses API over a chat. Nothing is stored: each request brings its conversation."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from pydantic import Field, ValidationError

from paceline.core import TokenLogprob
from paceline.server.chat import Chat, prepare_chat
from paceline.server.errors import ApiError
from paceline.server.items import (
    AllowedFunctions,
    AnyTool,
    CustomTool,
    FunctionTool,
    Item,
    NamedCustom,
    NamedFunction,
    OtherTool,
    left_out,
    messages,
)
from paceline.server.logprobs import chat_entry
from paceline.server.params import refuse
from paceline.server.schema import ChatRequest, JsonSchema, Many, Part, Sampling
from paceline.server.service import Service
from paceline.server.sse import event
from paceline.server.usage import report


class Format(JsonSchema):
    type: Literal["text", "json_object", "json_schema"]


class TextOptions(Part):
    format: Format | None = None
    verbosity: Any = Field(None, description="accepted and ignored")


class Effort(Part):
    effort: str | None = Field(None, max_length=32)
    summary: Any = Field(None, description="accepted and ignored")
    generate_summary: Any = Field(None, description="accepted and ignored")


class ResponsesRequest(Sampling):
    input: str | Many[Item]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    tools: Many[AnyTool] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | NamedFunction
        | NamedCustom
        | AllowedFunctions
        | OtherTool
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Effort | None = None
    include: Any = Field(None, description="`message.output_text.logprobs` asks for them; others are ignored")
    top_logprobs: int | None = Field(None, ge=0, description="how many likely tokens to show at each place")
    truncation: Literal["disabled"] | None = Field(None, description="a prompt that is too long is refused")
    background: bool | None = Field(None, description="not supported: must be false")
    previous_response_id: Any = Field(None, description="not supported: must be null")
    conversation: Any = Field(None, description="not supported: must be null")
    prompt: Any = Field(None, description="not supported: must be null")


_LOGPROBS = "message.output_text.logprobs"
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
_STORED = "nothing is stored here: send the whole conversation as input"
_REFUSED = {
    "previous_response_id": _STORED, "conversation": _STORED, "prompt": "no prompts are kept here: send the text itself",
    "background": "answers come at once, or with stream: true",
}  # fmt: skip
_NAMES = {
    "messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}  # fmt: skip


async def prepare_response(service: Service, body: ResponsesRequest, key: str) -> Response:
    """As prepare_chat, for a Responses request. Raises ApiError, with the names of this API's fields."""
    for name, why in _REFUSED.items():
        if getattr(body, name):
            raise refuse(name, why)
    if (body.n or 1) > 1:
        raise refuse("n", "this API has one answer: leave it out, or use POST /v1/chat/completions")
    warnings = service.warnings(body) + service.unknown.left_out(left_out(body.input, body.tools))
    try:
        chat = await prepare_chat(service, await asyncio.to_thread(_as_chat, service, body), key)
    except ValidationError as error:  # of what is checked there only
        raise ApiError(
            400, f"input: {error.errors()[0]['msg']}", param="input", code="invalid_value"
        ) from error
    except ApiError as error:
        raise _renamed(error) from error
    chat.warnings += warnings
    return Response(chat, body)


def _as_chat(service: Service, body: ResponsesRequest) -> ChatRequest:
    """The same in the fields of a chat. Raises ApiError, and ValidationError for what only a chat checks."""
    given = {name: getattr(body, name) for name in Sampling.model_fields}
    given |= {
        "model": service.called(body.model),
        "messages": messages(body.input, body.instructions),
        "continue_final_message": False,
        "max_completion_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "tools": _functions(body) or None,
        "tool_choice": _choice(body.tool_choice),
    }
    if wants_logprobs(body):
        given |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.text is not None and body.text.format is not None:
        shown = body.text.format.model_dump(by_alias=True, exclude_none=True)
        if shown["type"] == "json_schema" and "schema" not in shown:
            raise refuse("text.format.schema", "is missing: give the JSON schema that the answer has to fit")
        given["response_format"] = {"type": shown.pop("type"), "json_schema": shown or None}
    return ChatRequest.model_validate(given)


def _tools(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The tools that the model is offered, as the answer says them again."""
    whole: dict[str, Any] = {"type": "function", "description": None, "parameters": {}, "strict": False}
    custom = [tool for tool in body.tools or [] if isinstance(tool, CustomTool)]
    names = {tool.name for tool in custom}
    functions = [call["function"] for call in _functions(body) if call["function"]["name"] not in names]
    out: list[dict[str, Any]] = [{**whole, **function} for function in functions]
    return out + [tool.model_dump(exclude_none=True) for tool in custom]


def wants_logprobs(body: ResponsesRequest) -> bool:
    named = isinstance(body.include, list) and _LOGPROBS in body.include
    return named or body.top_logprobs is not None


def _functions(body: ResponsesRequest) -> list[dict[str, Any]]:
    shown = {"name", "description", "parameters", "strict"}
    made = []
    for tool in body.tools or []:
        if isinstance(tool, FunctionTool):
            made.append(tool.model_dump(include=shown, exclude_none=True))
        elif isinstance(tool, CustomTool):
            made.append(tool.function())
    return [{"type": "function", "function": function} for function in made]


def _choice(choice: str | NamedFunction | NamedCustom | AllowedFunctions | OtherTool | None) -> Any:
    if isinstance(choice, OtherTool):
        raise refuse("tool_choice", f"tools of type {choice.type[:40]!r} are not run here: name a function")
    if isinstance(choice, NamedFunction | NamedCustom):
        return {"type": "function", "function": {"name": choice.name}}
    if isinstance(choice, AllowedFunctions):
        named = [{"type": "function", "function": {"name": tool.name}} for tool in choice.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": named}}
    return choice


def _renamed(error: ApiError) -> ApiError:
    """The error with the field that this API has in the place of the chat's."""
    head, dot, rest = (error.param or "").partition(".")
    if head not in _NAMES:
        return error
    rest = rest.removeprefix("json_schema.")
    param = _NAMES[head] + dot + rest
    message = error.message.replace(f"{error.param}:", f"{param}:", 1)
    return ApiError(error.status, message, param=param, code=error.code, headers=error.headers)


@dataclass(slots=True)
class Output:
    """The items of an answer as they grow, and the events that tell of it."""

    end: str  # of the ids
    custom: frozenset[str] = frozenset()  # names of the tools that get free text
    told: Callable[[TokenLogprob], dict[str, Any]] | None = None  # log probabilities as they are shown
    items: list[dict[str, Any]] = field(default_factory=list)
    entries: list[TokenLogprob] = field(default_factory=list)  # of text that is not shown yet

    def push(self, piece: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """`piece`: what a chat's delta holds."""
        self.entries += piece.get("said", ())
        for kind, name in (("reasoning", "reasoning_content"), ("message", "content")):
            if piece.get(name):
                yield from self._text(kind, piece[name])
        for call in piece.get("tool_calls", ()):
            self.entries.clear()  # they are of no message
            made = call["function"]
            if "name" in made:
                yield from self._begin_call(call["id"], made["name"])
            item = self.items[-1]
            item[_written(item)] += made["arguments"]
            if made["arguments"] and item["type"] == "function_call":
                yield {**self._at("function_call_arguments.delta"), "delta": made["arguments"]}

    def _begin_call(self, call_id: str, name: str) -> Iterator[dict[str, Any]]:
        kind = "custom_tool_call" if name in self.custom else "function_call"
        yield from self._begin(kind, {"call_id": call_id, "name": name, _written({"type": kind}): ""})

    def close(self) -> Iterator[dict[str, Any]]:
        """End the last item; an answer without any is an empty message."""
        if not self.items:
            yield from self._text("message", "")
        item = self.items[-1]
        if item["status"] == "completed":
            return
        item["status"] = "completed"
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._at("function_call_arguments.done") | done
        elif item["type"] == "custom_tool_call":
            item["input"] = _input_of(item["input"])
            yield {**self._at("custom_tool_call_input.delta"), "delta": item["input"]}
            yield {**self._at("custom_tool_call_input.done"), "input": item["input"]}
        else:
            part, name = item["content"][0], _part_name(item)
            likely = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            yield {**self._at(f"{name}.done"), "content_index": 0, "text": part["text"], **likely}
            yield {**self._at("content_part.done"), "content_index": 0, "part": _part(part)}
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": _copy(item)}

    def _text(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if not self.items or self.items[-1]["type"] != kind:
            more: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            yield from self._begin(kind, more | {"content": []})
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            if kind == "message":
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self.items[-1]["content"].append(part)
            yield {**self._at("content_part.added"), "content_index": 0, "part": _part(part)}
        item = self.items[-1]
        item["content"][0]["text"] += text
        likely = self._likely(item["content"][0]) if kind == "message" else {}
        if text:
            name = f"{_part_name(item)}.delta"
            yield {**self._at(name), "content_index": 0, "delta": text, **likely}

    def _likely(self, part: dict[str, Any]) -> dict[str, Any]:
        """The log probabilities of what a message grew by."""
        made = [self.told(entry) for entry in self.entries] if self.told is not None else []
        self.entries.clear()
        part["logprobs"] += made
        return {"logprobs": made}

    def _begin(self, kind: str, more: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self.items:
            yield from self.close()
        prefix = _PREFIXES[kind]
        item = {"id": f"{prefix}_{self.end}{len(self.items)}", "type": kind, "status": "in_progress", **more}
        self.items.append(item)
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": _copy(item)}

    def _at(self, name: str) -> dict[str, Any]:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{name}", **place}


def _part_name(item: dict[str, Any]) -> str:
    return "output_text" if item["type"] == "message" else "reasoning_text"


def _written(item: dict[str, Any]) -> str:
    """The field of a call that grows."""
    return "input" if item["type"] == "custom_tool_call" else "arguments"


def _input_of(arguments: str) -> str:
    """The text that a custom tool gets; arguments that were cut are given as they are."""
    try:
        made = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    value = made.get("input") if isinstance(made, dict) else None
    return value if isinstance(value, str) else arguments


def _part(part: dict[str, Any]) -> dict[str, Any]:
    return part | ({"logprobs": list(part["logprobs"])} if "logprobs" in part else {})


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    return item | {"content": [_part(part) for part in item["content"]]} if "content" in item else dict(item)


@dataclass(slots=True)
class Response:
    """One request of the Responses API, ready to run."""

    chat: Chat
    body: ResponsesRequest
    id: str = field(default_factory=lambda: "resp_" + uuid.uuid4().hex[:24])
    created: int = field(default_factory=lambda: int(time.time()))
    output: Output = field(init=False)

    def __post_init__(self) -> None:
        custom = frozenset(tool.name for tool in self.body.tools or [] if isinstance(tool, CustomTool))
        told = partial(chat_entry, self.chat.room.tokenizer) if wants_logprobs(self.body) else None
        self.output = Output(self.id[-16:], custom, told)
        self.chat.id = self.id  # what the request log names

    async def answer(self) -> dict[str, Any]:
        async for _ in self._events():
            pass
        return self._told()

    async def stream(self) -> AsyncIterator[bytes]:
        """Events as they come; those that are ready together are one piece."""
        number = 0
        out = b""
        async with aclosing(self._events()) as events:  # type: ignore[type-var]
            async for item in events:
                if item is not None:
                    named = b"event: " + item["type"].encode() + b"\n"
                    out += named + event(item | {"sequence_number": number})
                    number += 1
                elif out:
                    yield out
                    out = b""
        yield out

    async def _events(self) -> AsyncIterator[dict[str, Any] | None]:
        """The events, and None where what has come so far is to be sent."""
        begun = False
        async with aclosing(self.chat.pieces()) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                if not begun:  # an error before the first token has its own status
                    yield {"type": "response.created", "response": self._told()}
                    yield {"type": "response.in_progress", "response": self._told()}
                    begun = True
                for event in self.output.push(piece):
                    yield event
                yield None
        for event in self.output.close():
            yield event
        yield {"type": f"response.{self._status()}", "response": self._told()}

    def _status(self) -> str:
        if not self.chat.reason:
            return "in_progress"
        return "incomplete" if self.chat.reason == "length" else "completed"

    def _told(self) -> dict[str, Any]:
        """The response object as it stands."""
        body, params, status = self.body, self.chat.params, self._status()
        ended = status != "in_progress"
        shown = body.text.format if body.text is not None else None
        made = {"type": "text"} if shown is None else shown.model_dump(by_alias=True, exclude_none=True)
        choice = body.tool_choice
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": status, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata if isinstance(body.metadata, dict) else {}, "model": self.chat.body.model,
            "output": [_copy(item) for item in self.output.items],
            "parallel_tool_calls": body.parallel_tool_calls is not False, "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False, "temperature": params.temperature, "text": {"format": made},
            "tool_choice": choice.model_dump() if isinstance(choice, Part) else choice or "auto",
            "tools": _tools(body), "top_logprobs": body.top_logprobs or 0, "top_p": params.top_p,
            "truncation": "disabled", "usage": self._usage() if ended else None,
            **(report(self.chat.stats, params.seed, self.chat.warnings) if ended else {}),
        }  # fmt: skip

    def _usage(self) -> dict[str, Any]:
        counted = self.chat.usage(self.chat.stats)
        thoughts = counted["completion_tokens_details"]["reasoning_tokens"]
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": counted["prompt_tokens_details"]["cached_tokens"]},
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": thoughts},
            "total_tokens": counted["total_tokens"],
        }
