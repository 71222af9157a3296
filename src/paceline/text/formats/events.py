"""What a chat answer is made of, as parsers say it while the text arrives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Tools = Mapping[str, Mapping[str, Any]]  # name -> JSON schema of the arguments


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON of the call's arguments."""

    index: int
    json: str


Event = Text | Thought | CallStart | CallArguments


class AnswerParser(Protocol):
    """Feed pieces of any size; the joined results are the same for every way of cutting the text."""

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends inside a thought."""
        ...

    def feed(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """The text has ended: what was kept back is what it looks like."""
        ...
