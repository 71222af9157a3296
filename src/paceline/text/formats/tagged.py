"""Notations with a tag for each argument: Qwen3-Coder and Qwen3.5, GLM-4.5 to 4.7, MiniMax M2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.text.formats.base import EventParser
from paceline.text.formats.events import Tools
from paceline.text.formats.lark import Lark, either, literal
from paceline.text.formats.tagged_calls import TaggedCallParser, Tags
from paceline.text.formats.values import properties_of, value


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """`written`: what stands behind the name, before and behind a key and a value, as templates write it."""

    name: str
    tags: Tags
    behind_name: str
    before_value: str
    behind_value: str
    tail: str
    joint: str | None = "\n"

    @property
    def opening(self) -> str:
        return self.tags.opening

    @property
    def closing(self) -> str:
        return self.tags.closing

    @property
    def marks(self) -> tuple[str, ...]:
        every = (self.tags.opening, self.tags.closing, *self.tags.key, *self.tags.value)
        return tuple(one for one in every if one.startswith("<") and one.endswith(">"))

    def parser(self, tools: Tools) -> EventParser:
        return TaggedCallParser(tools, self.tags)

    def unit(self, lark: Lark, tools: Tools, most: int) -> str:
        return either([self._call(lark, name, schema) for name, schema in tools.items()])

    def _call(self, lark: Lark, name: str, schema: Mapping[str, Any]) -> str:
        properties, required = properties_of(schema)
        parts = []
        for key in properties:
            opening = lark.spelled(f"{self.tags.key[0]}{key}{self.before_value}")
            one = lark.rule(f"{opening} {value(lark, schema, key, self.behind_value)}")
            parts.append(one if key in required else f"({one})?")
        more = schema.get("additionalProperties", "properties" not in schema)
        if not parts and more is not False:
            parts.append(f"{self._any(lark, schema, more)}*")
        head = self.tags.lead + name + self.behind_name
        head = ("\n" + head) if self.tags.lead else head
        return lark.rule(f"{literal(head)} {' '.join(parts)} {literal(self.tail)}")

    def _any(self, lark: Lark, schema: Mapping[str, Any], inner: Any) -> str:
        """An argument of a tool that does not name its arguments; `inner`: what they have to be."""
        key = lark.rule("/[A-Za-z_][A-Za-z0-9_]{0,63}/", "KEY")
        text = value(lark, {**schema, "properties": {"": inner}}, "", self.behind_value)
        return lark.rule(f"{lark.spelled(self.tags.key[0])} {key} {lark.spelled(self.before_value)} {text}")


QWEN = TaggedCalls(
    "qwen-xml",
    Tags(
        "<tool_call>", "<function=", (">",), ("<parameter=", ">"), ("", "</parameter>"), "</function>", "</tool_call>",
        True,
    ),
    ">\n", ">\n", "\n</parameter>\n", "</function>\n",
)  # fmt: skip
GLM = TaggedCalls(
    "glm",
    Tags(
        "<tool_call>", "", ("\n", "<arg_key>", "</tool_call>"), ("<arg_key>", "</arg_key>"),
        ("<arg_value>", "</arg_value>"), "</tool_call>", "</tool_call>", False,
    ),
    "\n", "</arg_key>\n<arg_value>", "</arg_value>\n", "",
)  # fmt: skip
GLM_COMPACT = replace(
    GLM,
    name="glm-4.7",
    behind_name="",
    before_value="</arg_key><arg_value>",
    behind_value="</arg_value>",
    joint="",
)
MINIMAX = TaggedCalls(
    "minimax",
    Tags(
        "<minimax:tool_call>", '<invoke name="', ('">',), ('<parameter name="', '">'), ("", "</parameter>"),
        "</invoke>", "</minimax:tool_call>", False,
    ),
    '">\n', '">', "</parameter>\n", "</invoke>\n",
)  # fmt: skip
