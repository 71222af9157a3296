"""Fields of other servers' dialects, put into the words of our own before anything else looks at a request.

vLLM's guided_* and structured_outputs, llama.cpp's n_predict, json_schema and grammar, OpenAI's older functions,
OpenRouter's reasoning, Ollama's think. schema.py has refused wrong values of them already.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from paceline.core import SamplingParams
from paceline.options import rows_of
from paceline.server.params import refuse
from paceline.server.schema import (
    ChatRequest,
    FunctionName,
    NamedTool,
    ResponseFormat,
    Sampling,
    Tool,
)

RESERVED = frozenset(
    {"chat_template", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)  # template variables that are not for chat_template_kwargs


_HARMLESS = frozenset({"backend", "disable_any_whitespace", "disable_fallback", "disable_additional_properties",
                       "whitespace_pattern"})  # fmt: skip


_OTHER_NAMES = {
    alias: row.name for row in rows_of(SamplingParams, "request") for alias in row.aliases
}  # all of them fields of `Sampling`


def settle(body: Sampling) -> None:
    """Change `body` so that it has the same meaning without foreign fields. Raises ApiError 400."""
    _settle_format(body)
    if body.seed == -1:
        body.seed = None
    if body.cache_prompt is False:
        body.cache_salt = f"alone/{uuid.uuid4().hex}"
    for other, name in _OTHER_NAMES.items():
        if getattr(body, name) is None:
            setattr(body, name, getattr(body, other))
    if isinstance(body, ChatRequest):
        if body.audio is not None:
            raise refuse("audio", "this server writes text only: leave it out")
        for name in ("max_tokens", "max_completion_tokens"):
            if getattr(body, name) == 0:
                raise refuse(
                    name, "a chat answer has at least one token: give 1 or more, or -1 for all that fit"
                )
        _settle_functions(body)
        _settle_thinking(body)


def _settle_format(body: Sampling) -> None:
    """One response_format out of all the ways to ask for one."""
    if body.response_format is not None:
        body.response_format = _in_our_words(body.response_format)
    made = [f for f in (body.response_format,) if f is not None and f.type != "text"]
    made += _formats(body)
    if len(made) > 1:
        names = [f.said or "response_format" for f in made]
        raise refuse(names[1], f"{names[0]} already says what the answer looks like: give one of them")
    if made:
        body.response_format = made[0]


def _in_our_words(given: ResponseFormat) -> ResponseFormat:
    """A format whose schema or expression stands where other servers have it."""
    where = next((n for n in ("schema_", "value", "pattern") if getattr(given, n) is not None), None)
    if where is None:
        if given.type == "json":
            raise refuse("response_format.schema", "is missing: give the JSON schema")
        return given
    field, value = f"response_format.{where.rstrip('_')}", getattr(given, where)
    if given.type in ("json", "json_object", "json_schema") and given.json_schema is None:
        return _format(field, "json", value)
    if given.type == "regex" and isinstance(value, str) and given.regex is None:
        return _format(field, "regex", value)
    raise refuse(field, f"says nothing beside type {given.type!r}: leave it out, or use another type")


def _formats(body: Sampling) -> list[ResponseFormat]:
    inner = body.structured_outputs
    given: list[tuple[str, str, Any]] = [
        ("guided_json", "json", body.guided_json), ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", body.guided_choice), ("guided_grammar", "grammar", body.guided_grammar),
        ("json_schema", "json", body.json_schema), ("grammar", "grammar", body.grammar or None),
        ("regex", "regex", body.regex), ("ebnf", "grammar", body.ebnf), ("choice", "choice", body.choice),
        ("format", "object" if body.format == "json" else "json", body.format or None),
    ]  # fmt: skip
    if inner is not None:
        for name in set(inner.model_extra or ()) - _HARMLESS:
            raise refuse(
                f"structured_outputs.{name[:40]}", "is not supported: give json, regex, choice or grammar"
            )
        where = "structured_outputs."
        given += [
            (where + "json", "json", inner.json_), (where + "regex", "regex", inner.regex),
            (where + "choice", "choice", inner.choice), (where + "grammar", "grammar", inner.grammar),
            (where + "json_object", "object", inner.json_object or None),
        ]  # fmt: skip
    return [_format(field, kind, value) for field, kind, value in given if value is not None]


def _format(field: str, kind: str, value: Any) -> ResponseFormat:
    if kind == "object":
        return ResponseFormat.of_field(field, "json_object")
    if kind == "json":
        schema = _schema(field, value) if isinstance(value, str) else value
        return ResponseFormat.of_field(field, "json_schema", json_schema={"schema": schema})
    if kind == "regex":
        return ResponseFormat.of_field(field, "regex", regex=value)
    if kind == "choice":
        words = " | ".join(json.dumps(word, ensure_ascii=False).replace("\x7f", "\\u007f") for word in value)
        return ResponseFormat.of_field(field, "grammar", grammar=f"start: {words}")
    return ResponseFormat.of_field(field, "grammar", grammar=value)


def _schema(field: str, text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (
        ValueError,
        RecursionError,
    ) as error:  # a number of thousands of digits is a ValueError of its own
        raise refuse(field, "is not valid JSON", "bad_grammar") from error
    if not isinstance(schema, dict):
        raise refuse(field, "has to be a JSON schema, which is an object", "bad_grammar")
    return schema


def _settle_functions(body: ChatRequest) -> None:
    wanted = body.function_call
    if not body.functions:
        if isinstance(wanted, FunctionName):
            raise refuse("function_call", "needs functions")
        return
    if body.tools:
        raise refuse("functions", "tools are given, too: give one of them")
    body.tools = [
        Tool.model_validate({"type": "function", "function": function}) for function in body.functions
    ]
    body.parallel_tool_calls = False  # an answer holds one function_call
    if isinstance(wanted, FunctionName):
        if all(function.name != wanted.name for function in body.functions):
            raise refuse("function_call", f"no function is called {wanted.name[:80]!r}")
        body.tool_choice = NamedTool(type="function", function=wanted)
    elif wanted is not None:
        body.tool_choice = wanted


def _settle_thinking(body: ChatRequest) -> None:
    """Everything that says whether to think, as reasoning_effort; what is said in our own words wins."""
    options = body.chat_template_kwargs
    for name in (options.model_extra or {}) if options is not None else ():
        if name in RESERVED:
            raise refuse(f"chat_template_kwargs.{name}", "is not for clients to set: leave it out")
    budgets = [
        getattr(body, name)
        for name in ("thinking_token_budget", "thinking_budget_tokens", "reasoning_budget")
    ]
    budgets += [body.thinking and body.thinking.budget_tokens, body.reasoning and body.reasoning.max_tokens]
    if body.thinking_budget is None:
        body.thinking_budget = next((budget for budget in budgets if budget is not None), None)
    if body.reasoning_effort is not None:
        return
    thinks: bool | str | None = body.enable_thinking
    if thinks is None:
        thinks = body.think
    if thinks is None and body.thinking is not None and body.thinking.type in ("enabled", "disabled"):
        thinks = body.thinking.type == "enabled"
    if thinks is None and body.reasoning is not None:
        thinks = body.reasoning.effort if body.reasoning.effort is not None else body.reasoning.enabled
    if thinks is not None:
        body.reasoning_effort = thinks if isinstance(thinks, str) else "medium" if thinks else "none"
