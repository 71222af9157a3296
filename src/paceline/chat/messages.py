"""Messages as chat templates expect them: arguments of earlier calls as objects, older forms in today's.

What an earlier turn has wrong is no reason to refuse every later one: arguments that are no JSON are carried as text.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from paceline.chat.asked import Message
from paceline.errors import UsageError, shown

Given = Mapping[str, Any]  # a message of OpenAI's API, or of one that is near to it
A_MESSAGE = "{'role': 'user', 'content': '...'}"
_MOVED = frozenset(  # they get another name or place here, or say nothing to a template
    {"role", "content", "refusal", "reasoning", "thinking", "reasoning_content", "tool_calls", "function_call",
     "tool_name", "reasoning_details", "cache_control", "provider_specific_fields", "audio", "annotations"}
)  # fmt: skip


def plain(messages: Seq[Given], parts: bool = False, template: str | None = None) -> list[Message]:
    """New dicts; content in parts stays so if the template takes `parts`, else they are joined.

    A call that has no id gets one, and a result that names none that of the call it answers: the first of its name that
    waits. A developer speaks as the system unless `template` has a role of that name. Raises UsageError for what is no
    message.
    """
    out: list[Message] = []
    waiting: list[tuple[str, str]] = []  # (id, name) of calls without a result
    roles = {"function": "tool"} | ({} if "developer" in (template or "") else {"developer": "system"})
    for index, message in enumerate(messages):
        _check(index, message)
        refusal = message.get("refusal")
        content = message.get("content") or (refusal if isinstance(refusal, str) else None)
        role = roles.get(message["role"], message["role"])
        made: Message = {"role": role, "content": _content(content, parts)}
        made |= {name: value for name, value in message.items() if name not in _MOVED and value is not None}
        if message.get("tool_name") is not None:
            made.setdefault("name", message["tool_name"])
        if role == "tool":
            _answers(made, waiting)
        thoughts = (message.get(name) for name in ("reasoning_content", "reasoning", "thinking"))
        if (
            thought := next((thought_part for thought_part in thoughts if thought_part is not None), None)
        ) is not None:
            made["reasoning_content"] = thought
        older = message.get("function_call")
        calls = message.get("tool_calls") or ([] if older is None else [{"function": older}])
        if calls:
            made["tool_calls"] = [_call(call, index, k) for k, call in enumerate(calls)]
            waiting += [(call["id"], call["function"]["name"]) for call in made["tool_calls"]]
        out.append(made)
    return out


def _check(index: int, message: object) -> None:
    role = message.get("role") if isinstance(message, Mapping) else None
    content = message.get("content", 0) if isinstance(message, Mapping) else 0
    missing = content == 0 and isinstance(message, Mapping) and any(
        message.get(name) for name in ("tool_calls", "function_call", "refusal")
    )  # fmt: skip
    if not isinstance(role, str) or not (isinstance(content, str | list | Mapping | None) or missing):
        raise UsageError(f"messages[{index}]={shown(message)} is no message: give {A_MESSAGE}")


def _content(content: Any, parts: bool) -> Any:
    """Texts in parts are joined where the template does not go through them, and no part is anything else."""
    if not isinstance(content, list):
        return "" if content is None else content
    texts = [_text(part) for part in content]
    if not content:
        return ""
    if None in texts or (parts and len(texts) > 1):  # one text is a text, in a list or not
        return [
            part if text is None else {"type": "text", "text": text}
            for part, text in zip(content, texts, strict=True)
        ]
    return "".join(text or "" for text in texts)


def _text(part: object) -> str | None:
    """The text of a part of any API; None for a part of another kind."""
    if not isinstance(part, Mapping):
        return None
    kind = part.get("type", "text")
    if kind == "refusal":
        return str(part.get("refusal") or part.get("text") or "")
    text = part.get("text") or ""
    return text if kind in ("text", "input_text", "output_text") and isinstance(text, str) else None


def text_of(content: Any) -> str:
    """The texts of a content, joined."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    return "".join(_text(part) or "" for part in content)


def _answers(result: Message, waiting: list[tuple[str, str]]) -> None:
    """Let a result name its call, which is taken off `waiting`."""
    given, name = result.get("tool_call_id"), result.get("name")
    fits = [
        i for i, (id_, called) in enumerate(waiting) if (id_ == given if given else name in (None, called))
    ]
    if fits:
        result["tool_call_id"] = waiting.pop(fits[0])[0]


def _call(call: Given, index: int, place: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError(
            f"messages[{index}]: tool_calls has {shown(call)}: give {{'function': {{'name': ..., 'arguments': ...}}}}"
        )
    arguments = _arguments(function.get("arguments"))
    made = {"name": function["name"], "arguments": arguments}
    return {"id": call.get("id") or f"call_{index}_{place}", "type": "function", "function": made}


def _arguments(given: Any) -> Any:
    """An object; else what it says, as text."""
    value = given
    if isinstance(given, str):
        try:
            value = json.loads(given or "{}")
        except (ValueError, RecursionError):  # a number of thousands of digits is a ValueError, too
            return given
    if value is None:
        return {}
    return value if isinstance(value, dict) else given


def can_continue(message: Given) -> bool:
    """Whether an answer can go on with this message."""
    return (
        message.get("role") == "assistant"
        and not message.get("tool_calls")
        and not message.get("function_call")
    )


def unfinished(render: Callable[[list[Message]], str], messages: list[Message]) -> str:
    """The prompt up to the end of the last message's content. Raises UsageError if it does not show it."""
    mark = uuid.uuid4().hex  # whatever the template does to the content's end, the mark shows where that is
    *earlier, last = messages
    content = last["content"]
    if isinstance(content, list):
        marked: Any = [*content[:-1], content[-1] | {"text": content[-1]["text"] + mark}]
    else:
        marked = content + mark
    text = render([*earlier, last | {"content": marked}])
    before, mark_found, _ = text.rpartition(mark)
    if not mark_found:
        raise UsageError(
            f"messages.{len(earlier)}: the chat template does not show this message's content: it cannot be continued"
        )
    return before
