"""The format of a tokenizer's chats: the one that was named, else what its template writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.text.chat import ChatTemplate
from paceline.text.formats.base import ChatFormat
from paceline.text.formats.probe import PLAIN, named, probe
from paceline.text.known_templates import KNOWN, spelled_out
from paceline.text.tokenizer import Tokenizer


def load_tokenizer(path: Path, chat_format: str, chat_template: str | None = None) -> Tokenizer:
    """A model's tokenizer with the format of its chats. `chat_template`: a file, or a known name, in place of its own.

    Raises LoadError, and UsageError for an unknown format and for what is no template.
    """
    tokenizer = Tokenizer.load(path)
    tokenizer.chat_format = chat_format
    if chat_template is not None:
        tokenizer.template, tokenizer.tool_template = _read(chat_template), None
        ChatTemplate.of(tokenizer)
    if chat_format != "auto":
        format_of(tokenizer)
    return tokenizer


def _read(name: str) -> str:
    """The template that a file holds, or that is known by a name. Raises UsageError."""
    if name in KNOWN:
        return KNOWN[name]
    try:
        text = spelled_out(Path(name).expanduser().read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(
            f"chat_template={name!r} cannot be read ({why}): give a file with a template in Jinja, or {', '.join(KNOWN)}"
        ) from error
    if text is None:
        raise UsageError(f"chat_template={name!r} is empty: give a file with a template in Jinja")
    return text


def format_of(tokenizer: Tokenizer) -> ChatFormat:
    """The tokenizer keeps it. Raises UsageError for a name that is unknown."""
    if not isinstance(tokenizer.format, ChatFormat):
        tokenizer.format = _found(tokenizer)
    chosen: ChatFormat = tokenizer.format
    return chosen


def _found(tokenizer: Tokenizer) -> ChatFormat:
    if tokenizer.chat_format != "auto":
        return named(tokenizer.chat_format)
    if tokenizer.template is None:
        return PLAIN
    try:
        template = ChatTemplate.of(tokenizer)
    except UsageError:  # said again, with what to do, to whoever sends messages
        return PLAIN

    def render(
        messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, options: dict[str, Any]
    ) -> str:
        return ChatTemplate.of(tokenizer, bool(tools)).render(messages, tools=tools, options=options)

    return probe(render, template.source + (tokenizer.tool_template or ""))
