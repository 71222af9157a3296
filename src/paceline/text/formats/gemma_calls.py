"""Gemma 4's tool calls, parsed on arrival: `<|tool_call>call:NAME{key:value,...}<tool_call|>`.

Strings stand between `<|"|>` marks without any escape, keys are bare, numbers, true, false and null as in JSON.
Arguments leave as pieces of JSON whose types are those of the text. One delta may hold several calls.
"""

from __future__ import annotations

import re

from paceline.text.formats.events import CallArguments, CallStart, Event, Text
from paceline.text.formats.gemma_arguments import CLOSE, ArgumentReader
from paceline.text.markers import first, held

OPEN, RESPONSE = "<|tool_call>", "<|tool_response>"
_NAME = re.compile(r"[A-Za-z_][\w.\-]{0,127}")


class GemmaCallParser:
    """Feed pieces of any size; the joined results are the same for every way of cutting the text."""

    def __init__(self) -> None:
        self.calls = 0
        self._state = "text"  # text | head | body | tail
        self._rest = ""
        self._space = ""  # white space after a call: text only if text follows
        self._arguments = ArgumentReader()
        self._events: list[Event] = []

    def feed(self, text: str) -> list[Event]:
        self._rest += text
        while self._advance():
            pass
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """The text has ended; a call that was cut off keeps the arguments it has."""
        if self._state == "text":
            self._say(self._rest)
        elif self._state == "head":
            self._say(OPEN + self._rest)  # it never came to arguments: nobody else would see it
        elif self._state == "body":
            self._argue(self._arguments.finish())
        self._rest = ""
        events, self._events = self._events, []
        return events

    def _advance(self) -> bool:
        """Take what can be decided; True if there may be more."""
        steps = {"text": self._text, "head": self._head, "body": self._body, "tail": self._tail}
        return steps[self._state]()

    def _say(self, text: str) -> None:
        if self.calls:
            text = self._space + text
            self._space = ""
            if not text.strip():
                self._space = text
                return
        if text:
            self._events.append(Text(text))

    def _argue(self, fragment: str) -> None:
        if fragment:
            self._events.append(CallArguments(self.calls - 1, fragment))

    def _text(self) -> bool:
        mark = first(self._rest, [OPEN, RESPONSE])
        if mark is None:
            end = len(self._rest) - held(self._rest, [OPEN, RESPONSE])
            self._say(self._rest[:end])
            self._rest = self._rest[end:]
            return False
        at, marker = mark
        self._say(self._rest[:at])
        self._rest = self._rest[at + len(marker) :]
        self._state = "head" if marker == OPEN else "text"
        return True

    def _head(self) -> bool:
        """The name, up to the arguments. What is no call after all is text."""
        mark = first(self._rest, ["{", CLOSE])
        end = mark[0] if mark else len(self._rest) - held(self._rest, [CLOSE])
        if mark is None and end <= 256:
            return False
        name = self._rest[:end].strip().removeprefix("call:").strip()
        if mark is None or not self._rest[:end].strip().startswith("call:") or not _NAME.fullmatch(name):
            self._say(OPEN)
            self._state = "text"
            return True
        self.calls += 1
        self._events.append(CallStart(self.calls - 1, name))
        if mark[1] == CLOSE:
            self._argue("{}")
            self._rest = self._rest[end + len(CLOSE) :]
            self._state = "text"
            return True
        self._rest = self._rest[end:]
        self._arguments, self._state = ArgumentReader(), "body"
        return True

    def _body(self) -> bool:
        fragment, self._rest = self._arguments.feed(self._rest)
        self._argue(fragment)
        if self._arguments.done:
            self._state = "tail"
        return self._arguments.done

    def _tail(self) -> bool:
        """The closing marker; without one the call is over too."""
        self._rest = self._rest.lstrip()
        if self._rest.startswith(CLOSE):
            self._rest = self._rest[len(CLOSE) :]
        elif CLOSE.startswith(self._rest):
            return False
        self._state = "text"
        return True
