"""`<tool_call>` around one JSON object a call: Hermes 2 and 3, Qwen 2.5 and 3, Granite 4, SmolLM3 and many others.

Granite 3 writes one list behind `<|tool_call|>`.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.text.formats.base import EventParser, Marks
from paceline.text.formats.events import Tools
from paceline.text.formats.json_calls import JsonCallParser
from paceline.text.formats.lark import Lark, either, literal


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Calls as JSON objects. `list_`: all of an answer in one list; `argument_key`: what the arguments are called."""

    name: str
    opening: str
    closing: str
    joint: str | None
    around: tuple[str, str] = ("", "")  # white space inside of the marks
    argument_key: str = "arguments"
    also: tuple[str, ...] = ()  # further marks that may open a call
    forgotten: bool = False  # models leave the marks out at times

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(mark for mark in (self.opening, self.closing, *self.also) if mark)

    @property
    def told(self) -> Marks:
        """What stands before, behind and between calls; without a joint they are one list."""
        return Marks(self.opening + self.around[0], self.around[1] + self.closing, self.joint)

    def parser(self, tools: Tools) -> EventParser:
        return JsonCallParser(tools, self.opening, self.closing, self.also, self.forgotten)

    def unit(self, lark: Lark, tools: Tools, most: int) -> str:
        before, after = map(literal, self.around)
        call = lark.rule(either([self._call(lark, name, schema) for name, schema in tools.items()]), "call")
        if self.joint is not None:
            return f"{before} {call} {after}"
        more = f' (", " {call}){{0,{most - 1}}}' if most > 1 else ""
        return f'{before} "[" {call}{more} "]" {after}'

    def _call(self, lark: Lark, name: str, schema: object) -> str:
        head = f'{{"name": {literal(name)}, "{self.argument_key}": '
        assert isinstance(schema, dict)
        return lark.rule(f'{literal(head)} {lark.arguments(schema)} "}}"')


HERMES = JsonCalls("hermes", "<tool_call>", "</tool_call>", "\n", ("\n", "\n"), forgotten=True)
GRANITE = JsonCalls("granite", "<|tool_call|>", "", None)  # 3.0 to 3.3
