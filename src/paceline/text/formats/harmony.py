"""gpt-oss's harmony: messages in channels. analysis is thought, final is said, commentary to a recipient is a call.

A call is `<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from paceline.text.formats.base import EventParser, Needs, Thoughts
from paceline.text.formats.calls import JsonValue
from paceline.text.formats.events import CallArguments, CallStart, Event, Text, Thought, Tools
from paceline.text.formats.lark import Lark, either, literal
from paceline.text.formats.thoughts import ThoughtParser
from paceline.text.markers import first, held

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
ENDS = (RETURN, CALL)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.\-]+)")
_HEADER = 512  # characters: a longer header is none


class HarmonyParser:
    """Feed pieces of any size; the joined results are the same for every way of cutting the text.

    Without `tools` what is said to a recipient is text.
    """

    def __init__(self, inside: bool, tools: Tools | None) -> None:
        self._tools = tools
        self._rest = ""
        self._ended = False
        self._calls = 0
        self._kind = "thought" if inside else "text"
        self._state: Callable[[], bool] = self._body if inside else self._begin
        self._value = JsonValue()
        self._events: list[Event] = []

    @property
    def thinking(self) -> bool:
        return self._kind == "thought" and self._state == self._body

    def feed(self, text: str) -> list[Event]:
        self._rest += text
        while self._state():
            pass
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        self._ended = True
        return self.feed("")

    def _begin(self) -> bool:
        """The beginning of an answer: a header, or text by a model that keeps to no format."""
        leads = (CHANNEL, START, MESSAGE, " to=", "assistant" + CHANNEL)
        if self._rest.startswith(leads):
            self._state = self._header
            return True
        if not self._ended and any(lead.startswith(self._rest) for lead in leads):
            return False
        self._kind, self._state = "text", self._body
        return True

    def _header(self) -> bool:
        at = self._rest.find(MESSAGE)
        if at < 0:
            if len(self._rest) > _HEADER:
                self._kind, self._state = "text", self._body
                return True
            self._rest = "" if self._ended else self._rest
            return False
        header, self._rest = self._rest[:at], self._rest[at + len(MESSAGE) :]
        recipient, channel = _RECIPIENT.search(header), header.partition(CHANNEL)[2].strip()
        self._state = self._body
        if recipient is not None and self._tools is not None:
            self._calls += 1
            self._events.append(CallStart(self._calls - 1, recipient[1]))
            self._value, self._state = JsonValue((CALL, END, RETURN, START)), self._call
        else:
            self._kind = "thought" if channel.startswith("analysis") else "text"
        return True

    def _call(self) -> bool:
        piece, self._rest = self._value.feed(self._rest, self._ended)
        if piece:
            self._events.append(CallArguments(self._calls - 1, piece))
        if self._value.done:
            self._state = self._between
        return self._value.done

    def _body(self) -> bool:
        marks = (END, CALL, RETURN, START, CHANNEL)
        mark = first(self._rest, marks)
        end = mark[0] if mark else len(self._rest) - (0 if self._ended else held(self._rest, marks))
        if end:
            text = self._rest[:end]
            self._events.append(Thought(text) if self._kind == "thought" else Text(text))
        self._rest = self._rest[end:]
        if mark is not None:
            self._state = self._between
        return mark is not None

    def _between(self) -> bool:
        """Behind a message: the marks that end it, then the header of the next one."""
        rest = self._rest.lstrip()
        for mark in (END, CALL, RETURN):
            if rest.startswith(mark):
                self._rest = rest[len(mark) :]
                return True
        if rest.startswith((START, CHANNEL)):
            self._rest, self._state = rest, self._header
            return True
        if any(
            marker.startswith(rest) for marker in (END, CALL, RETURN, START, CHANNEL)
        ):  # nothing, or half a mark
            self._rest = "" if self._ended else self._rest
            return False
        self._kind, self._state = "text", self._body
        return True


@dataclass(frozen=True, slots=True)
class HarmonyCalls:
    """One call an answer. The parser is `HarmonyParser`, which has the thoughts, too."""

    name: str = "harmony"
    opening: str = CHANNEL
    closing: str = ""
    joint: str | None = None
    marks: tuple[str, ...] = (START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN)

    def parser(self, tools: Tools) -> EventParser:
        return HarmonyParser(False, tools)

    def unit(self, lark: Lark, tools: Tools, most: int) -> str:
        return either(
            [
                lark.rule(
                    f'{literal(f"commentary to=functions.{name} ")} {lark.mark(CONSTRAIN)} "json" {lark.mark(MESSAGE)} '
                    f"{lark.arguments(schema)}"
                )
                for name, schema in tools.items()
            ]
        )


CALLS = HarmonyCalls()
THOUGHTS = Thoughts(ANALYSIS, END, lambda inside: ThoughtParser(ANALYSIS, END, inside), next=START + "assistant",
                    said=f"{CHANNEL}final{MESSAGE}")  # fmt: skip
NEEDS = Needs(thoughts_as="thinking", single_calls=True)
