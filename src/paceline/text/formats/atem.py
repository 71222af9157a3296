"""Muse Glimmer's ATEM: messages to a recipient. One to `self` is a thought, one to `user` is said, one to a tool a call.

A call is ` to=f<|message|><atem:function_calls>`, then `<atem:invoke name="f">` with a tag for each argument.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from paceline.text.formats.base import Thoughts
from paceline.text.formats.events import Event, Text, Thought, Tools
from paceline.text.formats.lark import Lark, either
from paceline.text.formats.tagged import TaggedCalls
from paceline.text.formats.tagged_calls import TaggedCallParser, Tags
from paceline.text.formats.thoughts import ThoughtParser
from paceline.text.markers import first, held

START, MESSAGE, NEXT, LAST = "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"
MARKS = (NEXT, LAST, START)  # that end a message
SELF, USER = f" to=self{MESSAGE}", f" to=user{MESSAGE}"
_RECIPIENT = re.compile(r"to=([\w.\-]+)")
_HEADER = 512  # characters: a longer header is none
_TAGS = Tags(
    "<atem:function_calls>", '<atem:invoke name="', ('">',), ('<atem:parameter name="', '">'),
    ("", "</atem:parameter>"), "</atem:invoke>", "</atem:function_calls>", False,
)  # fmt: skip


class AtemParser:
    """Feed pieces of any size; the joined results are the same for every way of cutting the text.

    Without `tools` what is said to a tool is text.
    """

    def __init__(self, inside: bool, tools: Tools | None) -> None:
        self._calls = None if tools is None else TaggedCallParser(tools, _TAGS)
        self._rest, self._ended = "", False
        self._to = "self" if inside else "user"
        self._state: Callable[[], bool] = self._body if inside else self._begin
        self._events: list[Event] = []

    @property
    def thinking(self) -> bool:
        return self._to == "self" and self._state == self._body

    def feed(self, text: str) -> list[Event]:
        self._rest += text
        while self._state():
            pass
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        self._ended = True
        events = self.feed("")
        return events if self._calls is None else events + self._calls.finish()

    def _begin(self) -> bool:
        """The beginning of an answer: a header, or text by a model that keeps to no format."""
        leads = (" to=", START, MESSAGE)
        if self._rest.startswith(leads):
            self._state = self._header
            return True
        if not self._ended and any(lead.startswith(self._rest) for lead in leads):
            return False
        self._to, self._state = "user", self._body
        return True

    def _header(self) -> bool:
        header, mark, behind = self._rest.partition(MESSAGE)
        if not mark:
            if len(self._rest) > _HEADER:
                self._to, self._state = "user", self._body
                return True
            self._rest = "" if self._ended else self._rest
            return False
        recipient = _RECIPIENT.search(header)
        self._to = recipient[1] if recipient is not None else "user"
        self._rest, self._state = behind, self._body
        return True

    def _body(self) -> bool:
        mark = first(self._rest, MARKS)
        end = mark[0] if mark else len(self._rest) - (0 if self._ended else held(self._rest, MARKS))
        if text := self._rest[:end]:
            self._events += self._read(text)
        self._rest = self._rest[end:]
        if mark is not None:
            self._state = self._between
        return mark is not None

    def _read(self, text: str) -> list[Event]:
        if self._to == "self":
            return [Thought(text)]
        return [Text(text)] if self._to == "user" or self._calls is None else self._calls.feed(text)

    def _between(self) -> bool:
        """Behind a message: the mark that ends it, then the header of the next one."""
        rest = self._rest.lstrip()
        for mark in (NEXT, LAST):
            if rest.startswith(mark):
                self._rest = rest[len(mark) :]
                return True
        if rest.startswith(START):
            self._rest, self._state = rest, self._header
            return True
        if any(marker.startswith(rest) for marker in MARKS):  # nothing, or half a mark
            self._rest = "" if self._ended else self._rest
            return False
        self._to, self._state = "user", self._body
        return True


@dataclass(frozen=True, slots=True)
class AtemCalls(TaggedCalls):
    """Each call is a message of its own. The parser of an answer is `AtemParser`, which has the thoughts, too."""

    @property
    def opening(self) -> str:
        return " to="

    @property
    def marks(self) -> tuple[str, ...]:
        return START, MESSAGE, NEXT, LAST

    def unit(self, lark: Lark, tools: Tools, most: int) -> str:
        return either(
            [
                lark.rule(f"{lark.spelled(name + MESSAGE + _TAGS.opening)} {self._call(lark, name, schema)}")
                for name, schema in tools.items()
            ]
        )


CALLS = AtemCalls(
    "atem", _TAGS, '">\n', '">', "</atem:parameter>\n", "</atem:invoke>\n", joint=f"{NEXT}{START}assistant"
)
THOUGHTS = Thoughts(
    SELF, NEXT, lambda inside: ThoughtParser(SELF, NEXT, inside), next=f"{START}assistant", said=USER
)
