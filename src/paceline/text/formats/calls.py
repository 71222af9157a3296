"""What parsers of all notations share: finding calls in text, passing JSON through, what stands between calls."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from paceline.text.formats.events import CallArguments, CallStart, Event, Text, Tools
from paceline.text.markers import first, held

HEAD = 512  # characters: a longer head of a call is none


class CallParser(ABC):
    """Feed pieces of any size; the joined results are the same for every way of cutting the text.

    `openers` begin a call, `fillers` may stand behind one and say nothing. A state is a method that takes what can be
    decided and says whether there may be more; once `ended` is set it has to decide.
    """

    def __init__(self, tools: Tools, openers: Sequence[str], fillers: Sequence[str] = ()) -> None:
        self.calls = 0
        self.ended = False
        self.rest = ""
        self.state: Callable[[], bool] = self.text
        self.tools, self.openers, self.fillers = tools, list(openers), list(fillers)
        self._blank, self._space = True, ""  # white space around calls is text only if text follows
        self._events: list[Event] = []

    def feed(self, text: str) -> list[Event]:
        self.rest += text
        while self.state():
            pass
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """The text has ended; a call that was cut off keeps the arguments it has."""
        self.ended = True
        events = self.feed("")
        return events if self.calls or not self._space else [*events, Text(self._space)]

    @abstractmethod
    def begin(self, marker: str) -> None:
        """A marker of `openers` was taken from the text: go into the state that reads what follows."""

    def text(self) -> bool:
        opener = first(self.rest, self.openers)
        if opener is None:
            end = len(self.rest) - (0 if self.ended else held(self.rest, self.openers))
            self.say(self.rest[:end])
            self.rest = self.rest[end:]
            return False
        at, marker = opener
        self.say(self.rest[:at])
        self.rest = self.rest[at + len(marker) :]
        self.begin(marker)
        return True

    def between(self) -> bool:
        """Behind a call: drop what says nothing, such as a mark that is cut off at the end of the text."""
        rest = self.rest.lstrip()
        if self.ended and rest and any(begins(rest, marker) for marker in (*self.fillers, *self.openers)):
            self.rest = ""
            return False
        filler = max((marker for marker in self.fillers if rest.startswith(marker)), key=len, default="")
        if filler and (self.ended or not any(begins(rest, marker) for marker in self.fillers)):
            self.rest = rest[len(filler) :]
            return True
        if not self.ended and any(begins(rest, marker) for marker in (*self.fillers, *self.openers)):
            return False
        if rest.startswith(tuple(self.openers)):
            self.rest = rest
        self.state = self.text
        return True

    def say(self, text: str) -> None:
        if self._blank:
            text, self._space = self._space + text, ""
            if not text.strip():
                self._space = text
                return
            self._blank = False
        if text:
            self._events.append(Text(text))

    def call(self, name: str) -> None:
        self.calls += 1
        self._blank, self._space = True, ""
        self._events.append(CallStart(self.calls - 1, name))

    def argue(self, fragment: str) -> None:
        if fragment:
            self._events.append(CallArguments(self.calls - 1, fragment))

    def no_call(self, taken: str) -> bool:
        """What was `taken` for the head of a call is text after all."""
        self.say(taken)
        self.state = self.text
        return True


class JsonValue:
    """One JSON value passed through as it is written, up to its end. Feed text that begins at the value.

    `closers`: marks that end a value which is broken, where they stand outside of strings, or in one behind a line break,
    which no string of JSON may hold. What is open then is closed. Control characters in strings become escapes.
    """

    def __init__(self, closers: Sequence[str] = ()) -> None:
        self.done = False
        self._closers, self._firsts = tuple(closers), {closer[0] for closer in closers}
        self._stack: list[str] = []  # what closes the open containers
        self._string = self._escape = self._scalar = False
        self._last = ""

    def feed(self, text: str, ended: bool = False) -> tuple[str, str]:
        """(what is the value's, what is left: behind the value once it is `done`, else to be given again with more)."""
        out: list[str] = []
        for at, char in enumerate(text):
            if char in self._firsts and (not self._string or self._last == "\n"):
                if text.startswith(self._closers, at):
                    return "".join(out) + self._close(), text[at:]
                if not ended and any(begins(text[at:], closer) for closer in self._closers):
                    return "".join(out), text[at:]
            if self._ends_before(char):
                self.done = True
                return "".join(out), text[at:]
            out.append(quoted(char) if self._string and char < " " else char)
            self._last = char
            self.done = self._ends_with(char)
            if self.done:
                return "".join(out), text[at + 1 :]
        return "".join(out), ""

    def _ends_before(self, char: str) -> bool:
        """Numbers and words end before what separates them; so does a value that is missing."""
        if self._string or self._stack:
            return False
        return char in ",}]" or (self._scalar and (char.isspace() or char in self._firsts))

    def _ends_with(self, char: str) -> bool:
        if self._string:
            ends = char == '"' and not self._escape
            self._escape = char == "\\" and not self._escape
            self._string = not ends
            return ends and not self._stack
        if char == '"':
            self._string = True
        elif char in "{[":
            self._stack.append("}" if char == "{" else "]")
        elif char in "}]":
            self._stack.pop()
            return not self._stack
        elif not char.isspace() and not self._stack:
            self._scalar = True
        return False

    def _close(self) -> str:
        self.done = True
        return ('"' if self._string else "") + "".join(reversed(self._stack))


def begins(text: str, marker: str) -> bool:
    """Whether `text` is a beginning of `marker`, but not the whole."""
    return len(text) < len(marker) and marker.startswith(text)


def quoted(text: str) -> str:
    """Text inside a string of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
