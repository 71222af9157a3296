"""Calls written as JSON objects with a name and arguments, between marks or without any.

Hermes 2, Qwen 2.5 and 3, Granite 4: `<tool_call>`, a line {"name": "f", "arguments": {}}, `</tool_call>`.
Mistral before Small 3.2: `[TOOL_CALLS][{"name": "f", "arguments": {}}, ...]`. Llama 3: {"name": "f", "parameters": {}}.
Cohere: {"tool_call_id": "0", "tool_name": "f", "parameters": {}}.
Qwen2.5-Coder forgets its marks and puts the object into a fence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from paceline.text.formats.calls import HEAD, CallParser, JsonValue, begins
from paceline.text.formats.events import Tools

_NAMES, _ARGUMENTS = ("name", "function", "tool_name"), ("arguments", "parameters")
_KEYS = (*_NAMES, *_ARGUMENTS, "type", "id")
_KEY = re.compile(r'"((?:[^"\\]|\\.)*)"\s*:\s*(?=\S)')
SPACE = " \t\r\n"
FENCES = ("```json", "```")


class JsonCallParser(CallParser):
    """Without an opening mark an answer that begins with an object is a call if that names one of the tools."""

    def __init__(
        self, tools: Tools, opening: str, closing: str, also: Sequence[str] = (), forgotten: bool = False
    ) -> None:
        """`opening` and `closing` stand around a call, or a list of them; `also`: further marks that may open one.

        `forgotten`: the marks may be missing around a call that an answer begins with, also in a fence.
        """
        openers = [mark for mark in (opening, *also) if mark]
        super().__init__(tools, openers, [mark for mark in (closing, ",", "]", ";", "```") if mark])
        self._bare, self._closing, self._closed = not opening, closing, False
        self._strict = self._bare  # whether the call that is read has to name one of the tools
        self._fences = FENCES if forgotten else ()
        self._closers = [mark for mark in (closing, *openers) if mark]
        self._reset("")
        if self._bare or forgotten:
            self.state = self._first

    def begin(self, marker: str) -> None:
        self._reset(marker)
        self._strict = self._bare or (self._strict and not marker)
        self._closed = False
        self.state = self._head

    def between(self) -> bool:
        rest = self.rest.lstrip(SPACE + ",;")
        if rest.startswith("{") and not self._closed:  # two calls joined
            self.rest = rest
            self.begin("")
            return True
        self._closed = self._closed or (bool(self._closing) and rest.startswith(self._closing))
        return super().between()

    def _reset(self, taken: str) -> None:
        self._taken = taken  # all of the call so far, should it be none
        self._nested = 0  # depth of "function": {...}
        self._started = self._argued = self._listed = False
        self._key = self._buffer = ""
        self._streams: bool | None = None  # whether the value that is read is shown as it comes
        self._waiting: str | None = None  # arguments that came before the name
        self._value = JsonValue()

    def _take(self, size: int) -> None:
        self._taken += self.rest[:size]
        self.rest = self.rest[size:]

    def _first(self) -> bool:
        """The beginning of an answer where a call may have no marks."""
        rest = self.rest.lstrip()
        if not self.ended and any(begins(rest, fence) for fence in self._fences):
            return False
        fence = next((fence for fence in self._fences if rest.startswith(fence)), "")
        inside = rest[len(fence) :].lstrip()
        if not inside and not self.ended:
            return False
        self.state = self.text
        if inside.startswith("{"):
            self._strict = True
            self.begin("")
            self._take(len(self.rest) - len(inside))
        return True

    def _head(self) -> bool:
        """The object's opening brace, perhaps behind that of a list."""
        rest = self.rest.lstrip()
        if not rest and not self.ended:
            return False
        if rest[:1] not in ("{", "[") or (rest[0] == "[" and self._listed):
            return self.no_call(self._taken)
        self._listed = self._listed or rest[0] == "["
        self.state = self._head if rest[0] == "[" else self._member
        self._take(len(self.rest) - len(rest) + 1)
        return True

    def _member(self) -> bool:
        """A key with its colon, or the end of an object."""
        rest = self.rest.lstrip(SPACE + ",")
        lead = len(self.rest) - len(rest)
        if rest.startswith("}"):
            self._take(lead + 1)
            self._nested -= 1
            return True if self._nested >= 0 else self._ends()
        match = _KEY.match(rest)
        if match is None and self.ended and self._started and rest.startswith('"'):
            self.rest = ""  # half a key, cut off
        if match is None:
            unfit = bool(rest) and not rest.startswith('"')
            return self._ends() if self.ended or unfit or len(rest) > HEAD else False
        self._key, self._buffer, self._streams = match[1], "", None
        if self._strict and self._key not in _KEYS:
            return self._ends()
        self._take(lead + match.end())
        if self._key == "function" and self.rest.startswith("{"):
            self._take(1)
            self._nested += 1
            return True
        self._value, self.state = JsonValue(self._closers), self._read
        return True

    def _read(self) -> bool:
        """The value of a key, of which the name and the arguments count."""
        before = self.rest
        piece, self.rest = self._value.feed(before, self.ended)
        if not self._started:
            self._taken += before[: len(before) - len(self.rest)]
        if self._streams is None and piece.strip():
            self._streams = self._started and self._key in _ARGUMENTS and piece.lstrip()[0] == "{"
        if self._streams:
            self._argued = True
            self.argue(piece)
        else:
            self._buffer += piece
        if self._value.done:
            self.state = self._member
            return self._value_ends()
        if self.ended and self._started and self._key in _ARGUMENTS and not self._streams:
            self.argue(_object(self._buffer))
        return self._ends() if self.ended else False

    def _value_ends(self) -> bool:
        if self._key in _NAMES and not self._started:
            name = _decoded(self._buffer)
            if not name or (self._strict and name not in self.tools):
                return self._ends()
            self.call(name)
            self._started = True
            if self._waiting is not None:
                self._argued = True
                self.argue(_object(self._waiting))
        elif self._key in _ARGUMENTS and not self._streams:
            if self._started:
                self._argued = True
                self.argue(_object(self._buffer))
            else:
                self._waiting = self._buffer
        return True

    def _ends(self) -> bool:
        """The object has ended, or cannot be read any further: it was a call if that has begun, else text."""
        if not self._started:
            return self.no_call(self._taken)
        if not self._argued and not (self.ended and not self.rest):
            self.argue("{}")
        self.state = self.between
        return bool(self.rest)


def _decoded(text: str) -> str:
    """A string of JSON; what is none is no text."""
    try:
        decoded = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    return decoded if isinstance(decoded, str) else ""


def _object(text: str) -> str:
    """Arguments as clients expect them: some models put them into a string."""
    text = text.strip()
    if text.startswith('"'):
        return _decoded(text) or _decoded(text + '"') or "{}"
    return "{}" if text in ("", "null") else text
