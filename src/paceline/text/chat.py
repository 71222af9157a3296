"""Chat messages to a prompt, by the template that came with the tokenizer.

A template is a program from whoever made the checkpoint. It runs in jinja2's immutable sandbox, in which it can
reach no file and no attribute of Python, with bounds on ranges, loops, repetition and output, and on time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.errors import UsageError
from paceline.text.tokenizer import Tokenizer

MAX_OUTPUT = 16 * 2**20  # characters
MAX_STRING = 16 * 2**20  # characters, of one value
MAX_RANGE = 100_000
MAX_SECONDS = 5.0
_BROKEN = "the model's chat template"


class TemplateRefused(jinja2.TemplateError):
    """`raise_exception` of a template: the messages are not what it was made for."""


class ChatTemplate:
    """A compiled template. Rendering keeps nothing and may run in any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises UsageError if `source` is no template."""
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise UsageError(f"{_BROKEN} cannot be read ({error}): give a prompt instead of messages") from error

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplate:
        """The template of a tokenizer. Raises UsageError if it has none."""
        if tokenizer.template is None:
            raise UsageError(
                "this model has no chat template: give a prompt instead of messages, "
                "or put chat_template.jinja beside its tokenizer.json"
            )
        return cls(tokenizer.template, tokenizer.special_tokens)

    def render(
        self,
        messages: Seq[Mapping[str, Any]],
        *,
        tools: Seq[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text for `messages`; it holds its own <bos>, which `Tokenizer.encode` does not double.

        `options` are the template's own switches, e.g. enable_thinking. Raises UsageError with what the template
        says if it refuses the messages, fails, or exceeds its bounds.
        """
        if not messages:
            raise UsageError("messages is empty: give at least one message")
        values = {
            **self._special_tokens,
            **(options or {}),
            "messages": [dict(m) for m in messages],
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._run(values)
        except TemplateRefused as error:
            raise UsageError(f"{_BROKEN} refuses these messages: {error}") from error
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError,
                RecursionError) as error:  # fmt: skip
            reason = str(error) or type(error).__name__
            raise UsageError(f"{_BROKEN} fails on these messages: {reason}; check their roles and fields") from error

    def _run(self, values: dict[str, Any]) -> str:
        context = self._template.new_context(values)
        watch = _Watch()
        context.vars[_WATCH] = watch
        context.parent[_WATCH] = watch
        parts, size = [], 0
        for part in self._template.root_render_func(context):
            size += len(part)
            if size > MAX_OUTPUT:
                raise jinja2.TemplateError(f"its output exceeds {MAX_OUTPUT} characters")
            watch.tick()
            parts.append(part)
        return "".join(parts)


def encode_chat(
    tokenizer: Tokenizer,
    messages: Seq[Mapping[str, Any]],
    *,
    tools: Seq[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of the prompt for `messages`. Raises UsageError as `ChatTemplate.render` does."""
    return tokenizer.encode(ChatTemplate.of(tokenizer).render(messages, tools=tools, options=options))
