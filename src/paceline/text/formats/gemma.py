"""Gemma 4: thoughts in a channel, calls in a notation of its own with strings between marks."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.text.formats.base import ChatFormat, EventParser, Thoughts
from paceline.text.formats.events import Tools
from paceline.text.formats.gemma_arguments import CLOSE, QUOTE
from paceline.text.formats.gemma_calls import OPEN, RESPONSE, GemmaCallParser
from paceline.text.formats.gemma_grammar import opened_calls
from paceline.text.formats.gemma_thoughts import CLOSE as THOUGHT_CLOSE
from paceline.text.formats.gemma_thoughts import OPEN as THOUGHT_OPEN
from paceline.text.formats.gemma_thoughts import GemmaThoughtParser
from paceline.text.formats.lark import Lark


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    name: str = "gemma"
    opening: str = OPEN
    closing: str = CLOSE
    joint: str | None = ""
    marks: tuple[str, ...] = (OPEN, CLOSE, QUOTE, RESPONSE)

    def parser(self, tools: Tools) -> EventParser:
        return GemmaCallParser()

    def unit(self, lark: Lark, tools: Tools, most: int) -> str:
        return opened_calls(lark, tools)


THOUGHTS = Thoughts(THOUGHT_OPEN, THOUGHT_CLOSE, GemmaThoughtParser)
CALLS = GemmaCalls()
GEMMA = ChatFormat(name="gemma", thoughts=THOUGHTS, calls=CALLS, switches=True, tools_shown=True)
