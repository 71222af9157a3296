"""Mistral's `[TOOL_CALLS]`: a list of JSON objects up to Nemo and Large 2, name and arguments since Small 3.2."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.text.formats.base import EventParser, plain_thoughts
from paceline.text.formats.events import Tools
from paceline.text.formats.hermes import JsonCalls
from paceline.text.formats.lark import Lark, either, literal
from paceline.text.formats.named_calls import Marks, NamedCallParser

OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_HEAD = re.compile(r"\s*(?P<name>[\w.\-]+)\s*(\[CALL_ID\]\s*\w*\s*)?(\[ARGS\])?\s*")


@dataclass(frozen=True, slots=True)
class NamedCalls:
    name: str = "mistral"
    opening: str = OPEN
    closing: str = ""
    joint: str | None = ""
    marks: tuple[str, ...] = (OPEN, ARGS, CALL_ID)

    def parser(self, tools: Tools) -> EventParser:
        return NamedCallParser(tools, Marks(OPEN, _HEAD))

    def unit(self, lark: Lark, tools: Tools, most: int) -> str:
        return either(
            [
                lark.rule(f"{literal(name)} {lark.mark(ARGS)} {lark.arguments(schema)}")
                for name, schema in tools.items()
            ]
        )


OLD = JsonCalls("mistral-list", OPEN, "", None)
NEW = NamedCalls()
THOUGHTS = plain_thoughts("[THINK]", "[/THINK]", "")
