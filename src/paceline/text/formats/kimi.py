"""Kimi K2: a section of calls, each with the name and number of the call before its arguments."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.text.formats.base import EventParser
from paceline.text.formats.events import Tools
from paceline.text.formats.lark import Lark, either, literal
from paceline.text.formats.named_calls import Marks, NamedCallParser

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
OPEN, CLOSE, ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
_HEAD = re.compile(r"\s*(functions\.)?(?P<name>[\w.\-]+?)(:\d+)?\s*<\|tool_call_argument_begin\|>\s*")


@dataclass(frozen=True, slots=True)
class KimiCalls:
    name: str = "kimi"
    opening: str = SECTION
    closing: str = SECTION_END
    joint: str | None = None
    marks: tuple[str, ...] = (SECTION, SECTION_END, OPEN, CLOSE, ARGUMENTS)

    def parser(self, tools: Tools) -> EventParser:
        return NamedCallParser(tools, Marks(OPEN, _HEAD, CLOSE, SECTION, SECTION_END))

    def unit(self, lark: Lark, tools: Tools, most: int) -> str:
        number = lark.rule("/[0-9]{1,2}/", "NUMBER")
        calls = [
            lark.rule(
                f"{lark.mark(OPEN)} {literal(f'functions.{name}:')} {number} {lark.mark(ARGUMENTS)} "
                f"{lark.arguments(schema)} {lark.mark(CLOSE)}"
            )
            for name, schema in tools.items()
        ]
        return f"({either(calls)}){{1,{most}}}"


KIMI = KimiCalls()
