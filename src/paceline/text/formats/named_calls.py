"""Calls written as a name and its arguments as JSON, with marks between them.

Mistral since Small 3.2: `[TOOL_CALLS]f[ARGS]{}`, perhaps with an id. DeepSeek-R1 and V3: all calls of an answer in one
section, `function<｜tool▁sep｜>f`, the arguments in a fence of Markdown. V3.1: `f<｜tool▁sep｜>{}`. Kimi K2 likewise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.text.formats.calls import HEAD, CallParser, JsonValue
from paceline.text.formats.events import Tools


@dataclass(frozen=True, slots=True)
class Marks:
    """`opening` begins a call, `head` is what may stand between it and the arguments, with a group `name`."""

    opening: str
    head: re.Pattern[str]
    closing: str = ""
    section: str = ""  # begins all calls of an answer
    section_end: str = ""
    fillers: tuple[str, ...] = ()


class NamedCallParser(CallParser):
    def __init__(self, tools: Tools, marks: Marks) -> None:
        inside = [mark for mark in (marks.closing, marks.section_end, *marks.fillers) if mark]
        super().__init__(tools, [mark for mark in (marks.section, marks.opening) if mark], inside)
        self._marks, self._taken = marks, ""
        self._closers = [mark for mark in (marks.closing, marks.section_end, marks.opening) if mark]
        self._value = JsonValue()

    def begin(self, marker: str) -> None:
        self._taken = marker if marker != self._marks.section else ""
        self.state = self._head if marker == self._marks.opening else self.between

    def _head(self) -> bool:
        """The name, up to the brace that opens the arguments."""
        at = self.rest.find("{")
        stop = min((place for closer in self._closers if (place := self.rest.find(closer)) >= 0), default=-1)
        if at < 0 and stop < 0 and len(self.rest) <= HEAD and not self.ended:
            return False
        end = at if at >= 0 and not 0 <= stop < at else max(stop, 0)
        head = self._marks.head.fullmatch(self.rest[:end])
        if head is None:
            return self.no_call(self._taken)
        self.call(head["name"])
        self.rest = self.rest[end:]
        if end == stop:
            self.argue("{}")
            self.state = self.between
        else:
            self._value, self.state = JsonValue(self._closers), self._arguments
        return True

    def _arguments(self) -> bool:
        piece, self.rest = self._value.feed(self.rest, self.ended)
        self.argue(piece)
        if self._value.done:
            self.state = self.between
        return self._value.done
