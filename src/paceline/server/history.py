"""A conversation as chat templates expect it: arguments of earlier calls as objects, older forms in today's."""

from __future__ import annotations

import json
from typing import Any

from paceline.server.params import refuse, text_of
from paceline.server.schema import FunctionCall, Message


def history(messages: list[Message]) -> list[dict[str, Any]]:
    """Plain dicts. An id is invented for a call that has none, and for the answer of a `function`. ApiError 400."""
    out: list[dict[str, Any]] = []
    last_call = ""
    for index, message in enumerate(messages):
        role = "tool" if message.role == "function" else message.role
        plain: dict[str, Any] = {"role": role, "content": text_of(message.content)}
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
        field = "tool_calls"
        if not calls and message.function_call is not None:
            last_call, field = f"call_{index}", "function_call"
            calls = [(last_call, message.function_call)]
        if calls:
            plain["tool_calls"] = [_call(id_, call, f"messages.{index}.{field}") for id_, call in calls]
        out.append(plain)
    return out


def _call(id_: str | None, call: FunctionCall, where: str) -> dict[str, Any]:
    given: Any = call.arguments
    if isinstance(given, str):
        try:
            given = json.loads(given or "{}")
        except RecursionError as error:
            raise refuse(where, "the arguments are nested too deep") from error
        except ValueError as error:  # also for a number of thousands of digits
            raise refuse(where, f"the arguments are not valid JSON ({_why(error)})") from error
    return {"id": id_, "type": "function", "function": {"name": call.name, "arguments": given}}


def _why(error: ValueError) -> str:
    return str(error) if isinstance(error, json.JSONDecodeError) else "a number has too many digits"
