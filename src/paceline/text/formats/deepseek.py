"""DeepSeek's calls: one section of an answer, arguments in a fence of Markdown (R1, V3) or bare (V3.1)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.text.formats.base import EventParser
from paceline.text.formats.events import Tools
from paceline.text.formats.lark import Lark, either, literal
from paceline.text.formats.named_calls import Marks, NamedCallParser

SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
OPEN, CLOSE, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_FENCED = re.compile(r"\s*(function)?<｜tool▁sep｜>(?P<name>[\w.\-]+)\s*(```(json)?)?\s*")
_BARE = re.compile(r"\s*(?P<name>[\w.\-]+)\s*<｜tool▁sep｜>\s*(```(json)?)?\s*")


@dataclass(frozen=True, slots=True)
class DeepSeekCalls:
    name: str
    fenced: bool
    opening: str = SECTION
    closing: str = SECTION_END
    joint: str | None = None
    marks: tuple[str, ...] = (SECTION, SECTION_END, OPEN, CLOSE, SEPARATOR)

    def parser(self, tools: Tools) -> EventParser:
        head = _FENCED if self.fenced else _BARE
        return NamedCallParser(tools, Marks(OPEN, head, CLOSE, SECTION, SECTION_END, ("```",)))

    def unit(self, lark: Lark, tools: Tools, most: int) -> str:
        call = lark.rule(either([self._call(lark, name, schema) for name, schema in tools.items()]), "call")
        joint = '"\\n" ' if self.fenced else ""
        return call + (f" ({joint}{call}){{0,{most - 1}}}" if most > 1 else "")

    def _call(self, lark: Lark, name: str, schema: object) -> str:
        assert isinstance(schema, dict)
        separator, arguments = lark.mark(SEPARATOR), lark.arguments(schema)
        if self.fenced:
            inner = (
                f'"function" {separator} {literal(name + chr(10) + "```json" + chr(10))} {arguments} "\\n```"'
            )
        else:
            inner = f"{literal(name)} {separator} {arguments}"
        return lark.rule(f"{lark.mark(OPEN)} {inner} {lark.mark(CLOSE)}")


V3 = DeepSeekCalls("deepseek", True)
V31 = DeepSeekCalls("deepseek-v3.1", False)
