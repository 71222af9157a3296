"""What is asked of a chat, in no API's words."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.errors import UsageError

Message = dict[str, Any]  # in the plain form that messages.py makes
Tool = dict[str, Any]  # {"type": "function", "function": {"name", "description", "parameters", "strict"}}
Kind = Literal["json", "lark", "regex", "gbnf"]
MOST_CALLS = 8  # that a grammar allows in one answer


@dataclass(frozen=True, slots=True)
class Form:
    """What an answer has to look like: a JSON schema, a grammar in Lark or GBNF, or a regular expression."""

    kind: Kind
    source: str


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`names`: the only tools that may be called; None: any of them."""

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A conversation and how its answer is wanted.

    `continues`: the answer goes on with the last message. `variables`: the template's own, set by the client. `budget`:
    soft tokens of a picture that names none. `most_thought`: tokens of a thought, at most. `strict`: messages that the
    template refuses are not repaired.
    """

    messages: Seq[Message]
    tools: Seq[Tool] = ()
    choice: ToolChoice = ToolChoice()
    one_call: bool = False
    form: Form | None = None
    thinking: bool | None = None
    effort: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False
    opens_turn: bool = True
    budget: int | None = None
    most_thought: int | None = None
    strict: bool = False

    @property
    def shown_tools(self) -> list[Tool]:
        """The tools that the template shows."""
        return [] if self.choice.mode == "none" else list(self.tools)

    @property
    def callable(self) -> list[Mapping[str, Any]]:
        """The functions that may be called. Raises UsageError for a choice without its tool."""
        functions = [tool["function"] for tool in self.shown_tools]
        if self.choice.names is None:
            return functions
        known = {function["name"] for function in functions}
        if missing := [name for name in self.choice.names if name not in known]:
            raise UsageError(f"no tool is called {missing[0][:80]!r}")
        return [function for function in functions if function["name"] in self.choice.names]

    @property
    def most_calls(self) -> int:
        named = (
            self.choice.mode == "required" and self.choice.names is not None and len(self.choice.names) == 1
        )
        return 1 if named or self.one_call else MOST_CALLS
