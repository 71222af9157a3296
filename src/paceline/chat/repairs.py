"""A conversation that the chat template refuses, or of which it leaves something out, put into a form that it takes.

Templates of Mistral, Llama 2 and Gemma 3 want one system message at the beginning, or none at all, and turns that
alternate. Clients send other histories. Nothing is changed where the template takes the messages as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import combinations
from typing import Any

from paceline.text.chat import TemplateRefused

Message = dict[str, Any]
Render = Callable[[list[Message]], str]
Repair = Callable[[list[Message]], list[Message]]
_JOINT = "\n\n"
_LOOKED_AT = 2**14  # characters of a result
_WORDS = "messages: the chat template takes no"


def rendered(render: Render, messages: list[Message], strict: bool = False) -> tuple[str, list[str]]:
    """(prompt, what was changed to get it). Raises what the template says of the messages as they are.

    `strict`: nothing is changed, so what the template refuses is an error.
    """
    text: str | None = None
    refusal: TemplateRefused | None = None
    try:
        text = render(messages)
        if not _lost(messages, text):
            return text, []
    except TemplateRefused as error:
        if strict:
            raise
        refusal = error
    singles = [[repair] for repair in _REPAIRS]
    for chosen in [] if strict else [*singles, *([*pair] for pair in combinations(_REPAIRS, 2)), [*_REPAIRS]]:
        rendering = _try(render, messages, chosen)
        if rendering is not None:
            return rendering
    if text is None:
        assert refusal is not None
        raise refusal
    return text, [
        f"messages.{i}: the chat template does not show this {messages[i]['role']} message"
        for i in _lost(messages, text)
    ]


def _try(
    render: Render, messages: list[Message], chosen: list[tuple[Repair, str]]
) -> tuple[str, list[str]] | None:
    changed, repairs = messages, []
    for repair, warning in chosen:
        after = repair(changed)
        if after != changed:
            changed = after
            repairs.append(warning)
    if len(repairs) < min(len(chosen), 2):  # the same as with fewer of them
        return None
    try:
        text = render(changed)
    except TemplateRefused:
        return None
    return None if _lost(messages, text) else (text, repairs)


def _lost(messages: list[Message], text: str) -> list[int]:
    """Which system messages the prompt does not hold, and which results of calls if it holds none of them."""
    system = [
        i for i, message in enumerate(messages) if message["role"] == "system" and _text(message) not in text
    ]
    results = [i for i, message in enumerate(messages) if message["role"] == "tool" and _text(message)]
    hidden = [i for i in results if _word(_text(messages[i])) not in text]
    return system + (hidden if len(hidden) == len(results) else [])


def _word(text: str) -> str:
    """The longest run of letters and digits: templates may write a result as JSON or in lines."""
    return max(re.findall(r"[A-Za-z0-9]+", text[:_LOOKED_AT]), key=len, default="")


def _text(message: Message) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content.strip()
    parts = content if isinstance(content, list) else []
    return next((part["text"].strip() for part in parts if part.get("text", "").strip()), "")


def _joined(*messages: Message) -> Message:
    """Messages of one role as one."""
    contents = [message["content"] for message in messages]
    if all(isinstance(content, str) for content in contents):
        content: Any = _JOINT.join(text for text in contents if text)
    else:
        content = [part for content_part in contents for part in _parts(content_part)]
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    made: Message = {}
    for message in messages:
        made |= message
    return made | {"content": content} | ({"tool_calls": calls} if calls else {})


def _parts(content: Any) -> list[dict[str, Any]]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _system_first(messages: list[Message]) -> list[Message]:
    system = [message for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    return [_joined(*system), *others] if system else others


def _alternating(messages: list[Message]) -> list[Message]:
    groups: list[list[Message]] = []
    for message in messages:
        same = bool(groups) and groups[-1][0]["role"] == message["role"] in ("user", "assistant")
        if same:
            groups[-1].append(message)
        else:
            groups.append([message])
    return [_joined(*group) if len(group) > 1 else group[0] for group in groups]


def _in_user(messages: list[Message]) -> list[Message]:
    """What the system says before the first message of the user."""
    first, *others = _system_first(messages)
    if first["role"] != "system":
        return messages
    at = next((i for i, message in enumerate(others) if message["role"] == "user"), None)
    if at is None:
        return [first | {"role": "user"}, *others]
    return [*others[:at], _joined(first | {"role": "user"}, others[at]), *others[at + 1 :]]


def _user_first(messages: list[Message]) -> list[Message]:
    at = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if at < len(messages) and messages[at]["role"] == "user":
        return messages
    return [*messages[:at], {"role": "user", "content": ""}, *messages[at:]]


def _results_by_user(messages: list[Message]) -> list[Message]:
    """Results of calls as turns of the user."""
    return [
        {"role": "user", "content": message["content"]} if message["role"] == "tool" else message
        for message in messages
    ]


def _object_arguments(messages: list[Message]) -> list[Message]:
    """Arguments that are no object, as one with their text."""

    def whole(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        given = function["arguments"]
        if isinstance(given, dict):
            return call
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        return call | {"function": function | {"arguments": {"arguments": text}}}

    return [
        message | {"tool_calls": [whole(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


_REPAIRS: tuple[tuple[Repair, str], ...] = (
    (_object_arguments, f"{_WORDS} arguments of a call that are no object: they stand in one, as text"),
    (_results_by_user, f"{_WORDS} results of calls: they were given as the user's"),
    (_system_first, f"{_WORDS} system message there: all of them were put first, as one"),
    (_in_user, f"{_WORDS} system message: it was put before the first message of the user"),
    (_alternating, f"{_WORDS} two turns of one role in a row: they were joined"),
    (_user_first, f"{_WORDS} conversation that the user does not begin: an empty turn was put first"),
)
