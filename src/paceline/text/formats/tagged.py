"""Notations with a tag for each argument: Qwen3-Coder, Qwen3.5, GLM-4.5 to 4.7, MiniMax M2, Seed-OSS, DeepSeek V3.2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.text.formats.base import EventParser
from paceline.text.formats.events import Tools
from paceline.text.formats.kinds import kinds_of
from paceline.text.formats.lark import Lark, either
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
    inner: tuple[str, ...] = ()  # marks inside of the marks

    @property
    def opening(self) -> str:
        return self.tags.opening

    @property
    def closing(self) -> str:
        return self.tags.closing

    @property
    def marks(self) -> tuple[str, ...]:
        every = (self.tags.opening, self.tags.closing, *self.tags.key, *self.tags.value)
        return tuple(mark for mark in every if mark.startswith("<") and mark.endswith(">")) + self.inner

    def parser(self, tools: Tools) -> EventParser:
        return TaggedCallParser(tools, self.tags)

    def unit(self, lark: Lark, tools: Tools, most: int) -> str:
        return either([self._call(lark, name, schema) for name, schema in tools.items()])

    def _call(self, lark: Lark, name: str, schema: Mapping[str, Any]) -> str:
        properties, required = properties_of(schema)
        parts = []
        for key in properties:
            argument = lark.rule(self._argument(lark, schema, key))
            parts.append(argument if key in required else f"({argument})?")
        more = schema.get("additionalProperties", "properties" not in schema)
        if not parts and more is not False:
            parts.append(f"{self._any(lark, schema, more)}*")
        head = self.tags.lead + name + self.behind_name
        head = ("\n" + head) if self.tags.lead else head
        return lark.rule(f"{lark.spelled(head)} {' '.join(parts)} {lark.spelled(self.tail)}")

    def _argument(self, lark: Lark, schema: Mapping[str, Any], key: str) -> str:
        lead, tags = f"{self.tags.key[0]}{key}{self.before_value}", self.tags
        if not tags.kinds:
            return f"{lark.spelled(lead)} {value(lark, schema, key, self.behind_value)}"
        text = kinds_of(schema, key) == {"string"}  # whatever may be something else is written as JSON
        written = value(lark, schema, key, self.behind_value, json_only=not text)
        return f"{lark.spelled(lead + tags.kinds[not text])} {written}"

    def _any(self, lark: Lark, schema: Mapping[str, Any], inner: Any) -> str:
        """An argument of a tool that does not name its arguments; `inner`: what they have to be."""
        key = lark.rule("/[A-Za-z_][A-Za-z0-9_]{0,63}/", "KEY")
        text = value(lark, {**schema, "properties": {"": inner}}, "", self.behind_value)
        return lark.rule(f"{lark.spelled(self.tags.key[0])} {key} {lark.spelled(self.before_value)} {text}")


DSML = "｜DSML｜"


def _deepseek(name: str, section: str) -> TaggedCalls:
    """DeepSeek V3.2 and V4 say of each argument whether it is a string; their marks have a token inside."""
    return TaggedCalls(
        name,
        Tags(
            f"<{DSML}{section}>", f'<{DSML}invoke name="', ('">',), (f'<{DSML}parameter name="', '"'),
            ("", f"</{DSML}parameter>"), f"</{DSML}invoke>", f"</{DSML}{section}>", False,
            (' string="true">', ' string="false">'),
        ),
        '">\n', '"', f"</{DSML}parameter>\n", f"</{DSML}invoke>\n", inner=(DSML,),
    )  # fmt: skip


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
SEED = replace(
    QWEN,
    name="seed",
    tags=replace(QWEN.tags, opening="<seed:tool_call>", closing="</seed:tool_call>", trim=False),
    before_value=">",
    behind_value="</parameter>\n",
)
DEEPSEEK_V32, DEEPSEEK_V4 = (
    _deepseek("deepseek-v3.2", "function_calls"),
    _deepseek("deepseek-v4", "tool_calls"),
)
