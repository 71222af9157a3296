"""What a grammar holds of an answer: the form that is asked for, calls that must be made, or calls as they begin."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, Literal, Protocol

from paceline.chat.asked import Asked, Form
from paceline.chat.forms import FormError
from paceline.core import Constraint
from paceline.errors import UsageError
from paceline.text.formats.base import ChatFormat

Lead = Literal["bare", "none", "may", "open"]  # as text/grammar.py has it, which loads llguidance
Make = Callable[[], Constraint]
Schemas = dict[str, dict[str, Any]]  # name of a tool -> JSON schema of its arguments


class Grammars(Protocol):
    """Compiles a grammar, in bounded time, to a maker of constraints (text/grammar.py)."""

    def hold(self, schemas: dict[str, Any], arguments: bool = False) -> dict[str, Any]: ...
    def compile(self, kind: str, source: str, lead: Lead = "bare") -> Make: ...
    def compile_call(self, tools: Schemas, most: int, lead: Lead = "none") -> Make: ...
    def compile_either(
        self, kind: str, source: str, tools: Schemas, most: int, lead: Lead = "none"
    ) -> Make: ...
    def compile_strict(self, tools: Schemas, lead: Lead = "none") -> Make: ...
    def close(self) -> None: ...


def needed(asked: Asked) -> bool:
    """Whether anything has to be compiled."""
    functions = asked.callable
    limited = asked.choice.mode == "required" or asked.choice.names is not None
    return asked.form is not None or limited or any(function.get("strict") for function in functions)


def compiled(grammars: Grammars, asked: Asked, lead: Lead) -> Make | None:
    """A maker of what `asked` needs. Raises FormError, and UsageError with the name of a tool that is at fault."""
    functions, form, most = asked.callable, asked.form, asked.most_calls
    answer = None if form is None else _of_form(grammars, form, lead)
    if asked.choice.mode == "required":
        if not functions:
            raise UsageError("a call is required but there are no tools")
        every = {f["name"]: f.get("parameters") or {} for f in functions}
        return grammars.compile_call(grammars.hold(every, arguments=True), most, lead)
    if answer is not None and not functions:
        return answer
    if not functions or not needed(asked):
        return None
    strict = grammars.hold(_strict(functions), arguments=True)
    if form is None:
        return grammars.compile_strict(strict, lead)
    return grammars.compile_either(form.kind, held_source(grammars, form), strict, most, lead)


def _of_form(grammars: Grammars, form: Form, lead: Lead) -> Make:
    try:
        return grammars.compile(form.kind, held_source(grammars, form), lead)
    except UsageError as error:
        raise FormError("", str(error)) from error


def held_source(grammars: Grammars, form: Form) -> str:
    """A form's source; a JSON schema in the words that a grammar holds, by the compiler's process. Raises UsageError."""
    if form.kind != "json":
        return form.source
    return json.dumps(grammars.hold({"": json.loads(form.source)})[""])


def lead_of(asked: Asked, chat: ChatFormat, prompt: str, inside: bool) -> Lead:
    """What comes before the part of an answer that a grammar holds."""
    if inside:
        return "open"
    may = chat.thinks_unasked if asked.thinking is None else asked.thinking
    return "may" if may and not chat.closed_by(prompt) else "none"


def _strict(functions: Seq[Mapping[str, Any]]) -> Schemas:
    """Every tool that may be called; one that is not strict takes any arguments."""
    return {f["name"]: (f.get("parameters") or {}) if f.get("strict") else {} for f in functions}
