"""How a model's chats are written: thoughts, tool calls, and what templates ask of messages.

A format is chosen by what the chat template writes (probe.py). Each notation has a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from paceline.text.formats.events import AnswerParser, Event, Text, Thought, Tools
from paceline.text.formats.lark import Lark
from paceline.text.formats.thoughts import Parted, ThoughtParser

SWITCHES = ("enable_thinking", "thinking", "reasoning")  # what templates call thinking on or off


class Calls(Protocol):
    """A notation of tool calls. An answer has units, each from `opening` to `closing`; both may be empty."""

    @property
    def name(self) -> str: ...
    @property
    def opening(self) -> str: ...
    @property
    def closing(self) -> str: ...
    @property
    def joint(self) -> str | None:
        """What stands between two units; None: one unit has all the calls."""
        ...

    @property
    def marks(self) -> tuple[str, ...]:
        """Every mark of the notation, for vocabularies where it is a token."""
        ...

    def parser(self, tools: Tools) -> EventParser: ...

    def unit(self, lark: Lark, tools: Tools, most: int) -> str:
        """Lark for what stands between `opening` and `closing`."""
        ...


class EventParser(Protocol):
    def feed(self, text: str) -> list[Event]: ...
    def finish(self) -> list[Event]: ...


class Parting(Protocol):
    """Parts thoughts from what is said."""

    @property
    def thinking(self) -> bool: ...
    def feed(self, text: str) -> Parted: ...
    def finish(self) -> Parted: ...


@dataclass(frozen=True, slots=True)
class Thoughts:
    """Marks around thoughts. `make`: the parser, told whether the prompt has opened a thought."""

    opening: str
    closing: str
    make: Callable[[bool], Parting]
    gap: str = ""  # line breaks that models write between a thought and what is said
    next: str = ""  # what has to stand between a thought and whatever follows
    said: str = ""  # what has to stand before what is said


def plain_thoughts(opening: str, closing: str, gap: str = "\n\n") -> Thoughts:
    return Thoughts(opening, closing, lambda inside: ThoughtParser(opening, closing, inside), gap)


class Marks(NamedTuple):
    """What stands around calls as text."""

    before: str
    behind: str
    joint: str | None  # between calls that have marks of their own; None: one list has them all


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a template asks of messages, and would refuse or lose otherwise."""

    text_arguments: bool = False  # arguments of earlier calls as JSON text, not as an object
    null_content: bool = False  # content of a message with calls as null where it is empty
    short_ids: bool = False  # ids of calls of nine letters and digits
    single_calls: bool = False  # one call a message
    whole_tools: bool = False  # tools with a description and parameters, were they empty
    calls_as_text: Marks | None = None  # earlier calls are shown as text alone: see `JsonCalls.told`
    thoughts_as: str = "reasoning_content"  # the field for earlier thoughts; "parts": in the content


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    name: str
    thoughts: Thoughts | None = None
    calls: Calls | None = None
    needs: Needs = Needs()
    ends: tuple[str, ...] = ()  # tokens that end a turn, should the model's files not say so
    thinks_unasked: bool = False  # whether a model thinks where nobody says so
    switches: bool = False  # whether the template can switch thinking on and off
    tools_shown: bool = False  # whether the template shows tools to the model
    note: str = ""  # why it is not more, where that is to be said
    whole: Callable[[bool, Tools | None], AnswerParser] | None = None  # a parser of its own for everything
    extra_marks: tuple[str, ...] = ()

    @property
    def described(self) -> str:
        """In one line: its name, and what of thoughts and calls it has, or why it has neither."""
        if self.note:
            return f"taken for plain chat: {self.note}"
        parts = [what for what, has in (("thoughts", self.thoughts), ("tool calls", self.calls)) if has]
        return f"format {self.name}" + (f" ({', '.join(parts)})" if parts else "")

    @property
    def marks(self) -> tuple[str, ...]:
        """What the parsers have to see of an answer, although the vocabulary may have it as special tokens."""
        calls = self.calls.marks if self.calls is not None else ()
        own = self.thoughts
        thoughts = (own.opening, own.closing, own.said) if own is not None else ()
        return tuple(dict.fromkeys(mark for mark in (*calls, *thoughts, *self.extra_marks) if mark))

    def parser(self, inside: bool = False, tools: Tools | None = None) -> AnswerParser:
        """`inside`: the prompt has opened a thought. Without `tools` calls are text."""
        if self.whole is not None:
            return self.whole(inside, tools)
        parting = self.thoughts.make(inside) if self.thoughts is not None else None
        return PartedParser(parting, self.calls.parser(tools) if self.calls and tools is not None else None)

    def opened_by(self, prompt: str, begun: str | None = None) -> bool:
        """Whether a rendered prompt ends inside a thought. `begun`: the answer that it is to go on with."""
        if self.thoughts is None:
            return False
        opening, closing = self.thoughts.opening, self.thoughts.closing
        if begun:
            return opening in begun and begun.rfind(opening) > begun.rfind(closing)
        tail = prompt[prompt.rfind(opening) :] if opening in prompt else ""
        return bool(tail) and closing not in tail and len(tail.strip()) <= len(opening) + _NAMED

    def closed_by(self, prompt: str) -> bool:
        """Whether a rendered prompt ends behind an empty thought, so that none follows."""
        return self.thoughts is not None and prompt.rstrip().endswith(self.thoughts.closing)


_NAMED = len("thought")  # Gemma's channels have a name behind the mark


class PartedParser:
    """Thoughts first, calls in what is left."""

    def __init__(self, thoughts: Parting | None, calls: EventParser | None) -> None:
        self._thoughts, self._calls = thoughts, calls

    @property
    def thinking(self) -> bool:
        return self._thoughts is not None and self._thoughts.thinking

    def feed(self, text: str) -> list[Event]:
        return self._events(Parted(content=text) if self._thoughts is None else self._thoughts.feed(text))

    def finish(self) -> list[Event]:
        events = self._events(Parted() if self._thoughts is None else self._thoughts.finish())
        return events if self._calls is None else events + self._calls.finish()

    def _events(self, parted: Parted) -> list[Event]:
        out: list[Event] = [Thought(parted.reasoning)] if parted.reasoning else []
        if parted.content:
            out += [Text(parted.content)] if self._calls is None else self._calls.feed(parted.content)
        return out
