"""Messages as a template wants them, where it would refuse or lose what the client's API allows."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from paceline.text.formats.base import Marks, Needs

_SHORT = re.compile(r"[A-Za-z0-9]{9}")


def suited(messages: Iterable[dict[str, Any]], needs: Needs) -> list[dict[str, Any]]:
    """New messages; those given stay as they are."""
    if needs == Needs():
        return list(messages)
    out = [_one(message, needs) for message in messages]
    return list(_single(out)) if needs.single_calls else out


def suited_tools(tools: list[dict[str, Any]] | None, needs: Needs) -> list[dict[str, Any]] | None:
    """Tools as a template wants them."""
    if not tools or not needs.whole_tools:
        return tools
    empty = {"type": "object", "properties": {}}
    made = []
    for tool in tools:
        given = tool.get("function") or {}
        parameters = {**empty, **(given.get("parameters") or {})}
        made.append(tool | {"function": {"description": "", **given, "parameters": parameters}})
    return made


def _one(message: dict[str, Any], needs: Needs) -> dict[str, Any]:
    made = dict(message)
    calls = made.get("tool_calls")
    if calls:
        made["tool_calls"] = [_call(call, needs) for call in calls]
        if needs.calls_as_text is not None:
            made["content"] = _with_calls(made.pop("content", None), calls, needs.calls_as_text)
        if needs.null_content and not made.get("content"):
            made["content"] = None
    if needs.short_ids and made.get("tool_call_id") is not None:
        made["tool_call_id"] = short_id(made["tool_call_id"])
    if needs.thoughts_as != "reasoning_content" and made.get("role") == "assistant":
        _place_thoughts(made, needs.thoughts_as)
    return made


def _with_calls(content: Any, calls: list[dict[str, Any]], marks: Marks) -> Any:
    """The content with the calls behind it, as the model writes them: its template shows no others."""
    before, behind, joint = marks
    texts = []
    for call in calls:
        function = call.get("function") or {}
        name, given = json.dumps(function.get("name"), ensure_ascii=False), function.get("arguments")
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        texts.append(f'{{"name": {name}, "arguments": {arguments}}}')
    joined = f"[{', '.join(texts)}]" if joint is None else f"{behind}{joint}{before}".join(texts)
    text = before + joined + behind
    if isinstance(content, list):
        return [*content, {"type": "text", "text": text}]
    return f"{content}\n{text}" if content else text


def _call(call: dict[str, Any], needs: Needs) -> dict[str, Any]:
    made = dict(call)
    function = dict(call.get("function") or {})
    if needs.text_arguments and not isinstance(function.get("arguments"), str):
        function["arguments"] = json.dumps(function.get("arguments"), ensure_ascii=False)
    if needs.short_ids:
        made["id"] = short_id(call.get("id") or "")
    return made | {"function": function}


def short_id(given: str) -> str:
    """Nine letters and digits, the same for the same id; such an id stays as it is."""
    return given if _SHORT.fullmatch(given) else hashlib.sha256(given.encode()).hexdigest()[:9]


def _place_thoughts(message: dict[str, Any], field: str) -> None:
    thoughts = message.pop("reasoning_content", None)
    if not thoughts:
        return
    content = message.get("content")
    if field == "parts":
        rest = [{"type": "text", "text": content}] if content and isinstance(content, str) else content or []
        message["content"] = [{"type": "thinking", "thinking": thoughts}, *rest]
    elif message.get("tool_calls") and content:  # the template takes one of them, and shows it as a thought
        message["content"] = f"{thoughts}\n\n{content}" if isinstance(content, str) else content
    else:
        message[field] = thoughts


def _single(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One call a message, each with its result behind it."""
    at = 0
    while at < len(messages):
        message, calls = messages[at], messages[at].get("tool_calls") or []
        at += 1
        if len(calls) < 2:
            yield message
            continue
        results = []
        while at < len(messages) and messages[at].get("role") == "tool":
            results.append(messages[at])
            at += 1
        for i, call in enumerate(calls):
            yield (
                message | {"tool_calls": [call]}
                if i == 0
                else {"role": "assistant", "content": "", "tool_calls": [call]}
            )
            answer = next(
                (result for result in results if result.get("tool_call_id") == call.get("id")), None
            )
            if answer is not None:
                results.remove(answer)
                yield answer
        yield from results
