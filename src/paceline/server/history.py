"""A conversation as chat templates expect it: arguments of earlier calls as objects, older forms in today's.

What an earlier turn has wrong is no reason to refuse every later one: arguments that are no JSON are carried as text.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any

from paceline.server.params import refuse, text_of
from paceline.server.schema import ChatRequest, Content, FunctionCall, Message


def history(
    messages: list[Message], parts: bool = False, template: str | None = None
) -> list[dict[str, Any]]:
    """Plain dicts; content in parts stays so if the template takes `parts`, else they are joined.

    An id is invented for a call that has none, and for the answer of a `function`. A developer speaks as the system
    unless `template` has a role of that name.
    """
    out: list[dict[str, Any]] = []
    last_call = ""
    roles = {"function": "tool"} | ({} if "developer" in (template or "") else {"developer": "system"})
    for index, message in enumerate(messages):
        role = roles.get(message.role, message.role)
        content = message.content or (message.refusal if isinstance(message.refusal, str) else None)
        plain: dict[str, Any] = {"role": role, "content": _content(content, parts)}
        for name in ("name", "tool_call_id"):
            value = getattr(message, name)
            if value is not None:
                plain[name] = value
        if message.role == "function" and last_call:
            plain.setdefault("tool_call_id", last_call)
        thoughts = message.reasoning_content if message.reasoning_content is not None else message.reasoning
        if thoughts is not None:
            plain["reasoning_content"] = thoughts
        calls = [(call.id, call.function) for call in message.tool_calls or []]
        if not calls and message.function_call is not None:
            last_call = f"call_{index}"
            calls = [(last_call, message.function_call)]
        if calls:
            plain["tool_calls"] = [_call(id_, call) for id_, call in calls]
        out.append(plain)
    return out


def _content(content: Content | None, parts: bool) -> str | list[dict[str, Any]]:
    seen = isinstance(content, list) and any(part.media is not None for part in content)
    if not isinstance(content, list) or not content or not (parts or seen):
        return text_of(content)
    return [part.media or {"type": "text", "text": part.text or ""} for part in content]


def continues(body: ChatRequest) -> bool:
    """Whether the answer goes on with the last message, not with a turn of its own. Raises ApiError 400."""
    last, field = body.messages[-1], "continue_final_message"
    if body.continue_final_message and body.add_generation_prompt:
        raise refuse(field, "and add_generation_prompt exclude each other: give one of them")
    if body.continue_final_message is False or body.add_generation_prompt:
        return False
    possible = last.role == "assistant" and not last.tool_calls and last.function_call is None
    if body.continue_final_message and not possible:
        raise refuse(field, "the last message has to be the assistant's, without tool calls")
    return possible


def unfinished(
    render: Callable[[list[dict[str, Any]]], str], messages: list[dict[str, Any]], where: str
) -> str:
    """The prompt up to the end of the last message's content. Raises ApiError 400 if it does not show it."""
    mark = uuid.uuid4().hex  # whatever the template does to the content's end, the mark shows where that is
    *earlier, last = messages
    content = last["content"]
    if isinstance(content, list):
        marked: Any = [*content[:-1], content[-1] | {"text": content[-1]["text"] + mark}]
    else:
        marked = content + mark
    text = render([*earlier, last | {"content": marked}])
    before, found, _ = text.rpartition(mark)
    if not found:
        raise refuse(where, "the chat template does not show this message's content: it cannot be continued")
    return before


def _call(id_: str | None, call: FunctionCall) -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": call.name, "arguments": _arguments(call)}}


def _arguments(call: FunctionCall) -> Any:
    """An object; else what it says, as text."""
    given: Any = call.arguments
    if isinstance(given, str):
        try:
            given = json.loads(given or "{}")
        except (ValueError, RecursionError):  # a number of thousands of digits is a ValueError, too
            return given
    if given is None:
        return {}
    return given if isinstance(given, dict) else call.arguments
