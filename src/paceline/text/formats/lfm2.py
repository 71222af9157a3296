"""LFM2's calls, as Python writes them: `<|tool_call_start|>[f(key="value", other=1), g()]<|tool_call_end|>`.

LFM2.5's template puts texts between quotes without any escape. Lists of JSON objects between the marks are read, too.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.text.formats.base import EventParser, Marks
from paceline.text.formats.calls import HEAD, quoted
from paceline.text.formats.events import Tools
from paceline.text.formats.json_calls import JsonCallParser
from paceline.text.formats.kinds import kinds_of
from paceline.text.formats.lark import Lark, either, literal
from paceline.text.formats.tagged_calls import typed
from paceline.text.formats.values import properties_of, value

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_CALL, _HALF_CALL = re.compile(r"([\w.\-]+)\s*\("), re.compile(r"[\w.\-]*\s*")
_KEY, _HALF_KEY = re.compile(r"(\w+)\s*=\s*(?=\S)"), re.compile(r"\w*\s*=?\s*")
_BEHIND = re.compile(r"\s*(?:,\s*\w+\s*=|\)\s*[,\]<])")  # what follows the quote that ends an argument
_HALF_BEHIND = re.compile(r"\s*(?:,\s*(?:\w+\s*)?|\)\s*)?")


class PythonCallParser(JsonCallParser):
    def __init__(self, tools: Tools) -> None:
        super().__init__(tools, OPEN, CLOSE)
        self._schema: Mapping[str, Any] = {}
        self._name, self._keys, self._at, self._quote, self._depth = "", 0, 0, "", 0

    def _head(self) -> bool:
        rest = self.rest.lstrip().removeprefix("[").lstrip()
        if rest.startswith(("{", "[")) or (not rest and self.ended):
            return super()._head()
        match = _CALL.match(rest)
        if match is None:
            waits = not self.ended and len(rest) <= HEAD and _HALF_CALL.fullmatch(rest)
            return False if waits else self.no_call(self._taken)
        return self._calls(rest, match)

    def between(self) -> bool:
        rest = self.rest.lstrip(" \n,;")
        if not self._closed and (match := _CALL.match(rest)):
            return self._calls(rest, match)
        if not (self._closed or self.ended) and len(rest) <= HEAD and _HALF_CALL.fullmatch(rest):
            return False
        self._closed = self._closed or rest.startswith("]")
        return super().between()

    def _calls(self, rest: str, match: re.Match[str]) -> bool:
        self.call(match[1])
        self._schema, self._keys = self.tools.get(match[1], {}), 0
        self.rest, self.state = rest[match.end() :], self._next
        return True

    def _next(self) -> bool:
        """A key, or the end of the call."""
        rest = self.rest.lstrip(" \n,")
        match = _KEY.match(rest)
        if match is not None:
            self.argue(("{" if self._keys == 0 else ", ") + f'"{match[1]}": ')
            self._name, self._keys, self.rest = match[1], self._keys + 1, rest[match.end() :]
            self._at, self._quote, self._depth, self.state = 0, "", 0, self._argument
            return True
        if _HALF_KEY.fullmatch(rest) and len(rest) <= HEAD:
            return False
        self.argue("}" if self._keys else "{}")
        self.rest, self.state = rest.removeprefix(")"), self.between
        return True

    def _argument(self) -> bool:
        while self._at < len(self.rest):
            char = self.rest[self._at]
            if self._quote:
                if char == "\\" and self._at + 1 == len(self.rest) and not self.ended:
                    return False
                if char == self._quote and self._depth == 0:
                    behind = self.rest[self._at + 1 :]
                    if not self.ended and _HALF_BEHIND.fullmatch(behind):
                        return False
                    ends = _BEHIND.match(behind) or (self.ended and behind.strip() in ("", ")"))
                    self._quote = "" if ends else self._quote
                elif char == self._quote:
                    self._quote = ""
                self._at += char == "\\"
            elif char in "\"'":
                self._quote = char
            elif self._depth == 0 and char in ",)":
                self.argue(_json(self.rest[: self._at].strip(), kinds_of(self._schema, self._name)))
                self.rest, self.state = self.rest[self._at :], self._next
                return True
            else:
                self._depth += (char in "([{") - (char in ")]}")
            self._at += 1
        if self.ended:
            quote = self.rest[:1] in ('"', "'")
            self.argue('"' + quoted(self.rest[1:]) if quote else self.rest)
            self.rest = ""
        return False


def _json(text: str, kinds: frozenset[str]) -> str:
    """An argument as JSON of one of `kinds`."""
    if len(text) < 2 or text[0] not in "\"'" or text[-1] != text[0]:
        return typed(text, kinds)
    inner = text[1:-1]
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text.replace("\n", "\\n"))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        inner = value if isinstance(value, str) else inner
        break
    return f'"{quoted(inner)}"' if "string" in kinds else typed(inner, kinds)


@dataclass(frozen=True, slots=True)
class PythonCalls:
    name: str = "lfm2"
    opening: str = OPEN
    closing: str = CLOSE
    joint: str | None = None
    marks: tuple[str, ...] = (OPEN, CLOSE)

    @property
    def told(self) -> Marks:
        """Earlier calls as JSON, where a template shows none."""
        return Marks(OPEN, CLOSE, None)

    def parser(self, tools: Tools) -> EventParser:
        return PythonCallParser(tools)

    def unit(self, lark: Lark, tools: Tools, most: int) -> str:
        call = lark.rule(either([self._call(lark, name, schema) for name, schema in tools.items()]), "call")
        return f'"[" {call} (", " {call}){{0,{most - 1}}} "]"' if most > 1 else f'"[" {call} "]"'

    def _call(self, lark: Lark, name: str, schema: Mapping[str, Any]) -> str:
        properties, required = properties_of(schema)
        first = more = '""'  # what may follow at the beginning, and behind an argument
        for key in reversed(properties):
            argument = lark.rule(f"{literal(key + '=')} {self._value(lark, schema, key, properties[key])}")
            behind = more
            more = lark.rule(
                f'", " {argument} {behind}' if key in required else f'(", " {argument})? {behind}'
            )
            first = lark.rule(
                f"{argument} {behind}" if key in required else f"({argument} {behind} | {first})"
            )
        if (
            not properties
            and (inner := schema.get("additionalProperties", "properties" not in schema)) is not False
        ):
            key = lark.rule("/[A-Za-z_][A-Za-z0-9_]{0,63}/", "KEY")
            text = value(lark, {**schema, "properties": {"": inner}}, "", "", json_only=True)
            argument = lark.rule(f'{key} "=" {text}')
            first = f'({argument} (", " {argument})*)?'
        return lark.rule(f'{literal(name + "(")} {first} ")"')

    def _value(self, lark: Lark, schema: Mapping[str, Any], key: str, inner: Any) -> str:
        """Python's words for a boolean of its own; all else as JSON, whose texts are Python's, too."""
        free = isinstance(inner, Mapping) and not {"const", "enum"} & inner.keys()
        if free and kinds_of(schema, key) == {"boolean"}:
            return '("True" | "False")'
        return value(lark, schema, key, "", json_only=True)


CALLS = PythonCalls()
