"""Cohere's Command R7B and A: thoughts, a list of calls with numbers, an answer between marks of its own."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.text.formats.base import Thoughts
from paceline.text.formats.events import Tools
from paceline.text.formats.hermes import JsonCalls
from paceline.text.formats.lark import Lark, either, literal
from paceline.text.formats.thoughts import Parted, ThoughtParser
from paceline.text.markers import held

_NUMBERED, _NAMED = literal('{"tool_call_id": "'), '", "tool_name": "{}", "parameters": '
_BREAK = "\n    "  # before each call, as the template writes it


@dataclass(frozen=True, slots=True)
class CohereCalls(JsonCalls):
    """`<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {}}]<|END_ACTION|>`."""

    def unit(self, lark: Lark, tools: Tools, most: int) -> str:
        number = lark.rule("/[0-9]{1,2}/", "NUMBER")
        calls = [
            lark.rule(f'{_NUMBERED} {number} {literal(_NAMED.format(name))} {lark.arguments(schema)} "}}"')
            for name, schema in tools.items()
        ]
        call = lark.rule(either(calls), "call")
        more = f" ({literal(',' + _BREAK)} {call}){{0,{most - 1}}}" if most > 1 else ""
        return f'{literal("[" + _BREAK)} {call}{more} "\\n]"'


class AnswerParser(ThoughtParser):
    """Leaves out the marks around what is said. Without the first of them the last one is text, as in arguments."""

    def __init__(self, marks: tuple[str, str], inside: bool) -> None:
        super().__init__("<|START_THINKING|>", "<|END_THINKING|>", inside)
        self._said, self._at = marks, "before"  # before | inside | behind

    def _behind(self, out: Parted) -> bool:
        opening, closing = self._said
        if self._at == "before":
            text = self._rest.lstrip()
            if opening.startswith(text) and text != opening:
                return False
            self._at = "inside" if text.startswith(opening) else "behind"
            self._rest = text.removeprefix(opening) if self._at == "inside" else self._rest
        if self._at == "inside":
            before, mark, behind = self._rest.partition(closing)
            self._at = "behind" if mark else "inside"
            open_end = 0 if mark else held(before, [closing])
            out.content += before[: len(before) - open_end]
            self._rest = behind if mark else before[len(before) - open_end :]
        if self._at == "behind":
            return super()._behind(out)
        return False


def _thoughts(opening: str, closing: str) -> Thoughts:
    return Thoughts(
        "<|START_THINKING|>", "<|END_THINKING|>", lambda inside: AnswerParser((opening, closing), inside),
        said=opening,
    )  # fmt: skip


CALLS = CohereCalls("cohere", "<|START_ACTION|>", "<|END_ACTION|>", None)
RESPONSE = _thoughts("<|START_RESPONSE|>", "<|END_RESPONSE|>")
TEXT = _thoughts("<|START_TEXT|>", "<|END_TEXT|>")  # since 2026
