"""Messages with pictures -> messages that a chat template renders, and the pictures in order.

Placeholders come from parts only. One that a client has typed is text: a random mark stands for it while the template
renders, and `MediaReader.prompt` then encodes it as ordinary characters.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import PromptError
from paceline.soft_tokens import Kind


@dataclass(frozen=True, slots=True, eq=False)
class MediaItem:
    """A picture or clip as somebody gave it."""

    kind: Kind
    source: Any  # what media/sources.py makes bytes of
    where: str = ""  # which part of a request it is, for messages
    budget: int | None = None  # soft tokens at most; None: the model's default


@dataclass(slots=True)
class Talk:
    messages: list[dict[str, Any]]
    items: list[MediaItem] = field(default_factory=list)
    marks: dict[str, str] = field(default_factory=dict)  # mark -> the placeholder that was typed


def hidden(messages: Seq[Mapping[str, Any]], placeholders: Seq[str]) -> Talk:
    """The messages with marks in place of what looks like a placeholder in any of their texts."""
    pattern = re.compile("|".join(re.escape(text) for text in sorted(placeholders, key=len, reverse=True)))
    talk, nonce = Talk([]), uuid.uuid4().hex

    def mark(match: re.Match[str]) -> str:
        name = f"\ue000{nonce}{len(talk.marks)}\ue001"
        talk.marks[name] = match[0]
        return name

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(mark, value)
        if isinstance(value, Mapping):
            return {walk(key): walk(inner) for key, inner in value.items()}
        return [walk(inner) for inner in value] if isinstance(value, list | tuple) else value

    talk.messages = [walk(message) for message in messages]
    return talk


DETAIL: Mapping[str, int | None] = {"low": 70, "auto": None, "high": 1120}  # OpenAI's words for a budget
_FORMS: Mapping[str, Kind] = {
    "image": "image", "image_url": "image", "input_image": "image", "audio": "audio", "input_audio": "audio",
    "audio_url": "audio",
}  # fmt: skip
_NAMES: Mapping[Kind, tuple[str, ...]] = {
    "image": ("image_url", "image", "url"), "audio": ("input_audio", "audio", "audio_url", "url"),
}  # fmt: skip


def taken(messages: Seq[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[MediaItem]]:
    """The messages with bare parts, {"type": "image"}, in place of those that hold media, and these in order.

    Raises PromptError for a part that is not known.
    """
    out, items = list[dict[str, Any]](), list[MediaItem]()
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            content = [_part(part, f"messages.{i}.content.{j}", items) for j, part in enumerate(content)]
        out.append({**message, "content": content})
    return out, items


def _part(part: Any, where: str, items: list[MediaItem]) -> Mapping[str, Any]:
    kind = str(part.get("type", "text")) if isinstance(part, Mapping) else ""
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind not in _FORMS:
        raise PromptError(f"{where} is no part that can be read: give type text, image or audio")
    if part.get("file_id") is not None:
        raise PromptError(
            f"{where}: no files are stored here: send the bytes as a data URL instead of file_id"
        )
    source = next((part[name] for name in (kind, *_NAMES[_FORMS[kind]]) if part.get(name) is not None), None)
    inner = source if isinstance(source, Mapping) else {}
    if inner:
        source = next((inner[name] for name in ("url", "data") if inner.get(name) is not None), None)
    if source is None:
        raise PromptError(f"{where} has no {_FORMS[kind]}: give it as {kind!r}")
    items.append(MediaItem(_FORMS[kind], source, f"{where}.{kind}", _budget({**inner, **part}, where)))
    return {"type": _FORMS[kind]}


def _budget(part: Mapping[str, Any], where: str) -> int | None:
    most, detail = part.get("max_soft_tokens"), part.get("detail")
    if most is not None:
        if isinstance(most, bool) or not isinstance(most, int):
            raise PromptError(f"{where}: max_soft_tokens is no whole number: give 70, 140, 280, 560 or 1120")
        return most
    if detail is not None and detail not in DETAIL:
        raise PromptError(f"{where}: detail is unknown: give low, auto or high")
    return None if detail is None else DETAIL[detail]
