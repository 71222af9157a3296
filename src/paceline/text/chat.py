"""Chat messages to a prompt, by the template that came with the tokenizer.

A template is a program written by whoever made the checkpoint; `sandbox` bounds what it can do.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from jinja2 import TemplateError

from paceline.errors import UsageError
from paceline.text.sandbox import MessagesRefused, Sandbox
from paceline.text.tokenizer import Tokenizer


class ChatTemplate:
    """A compiled template. Rendering changes nothing and may run in any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are the names that a template may print, e.g. bos_token. Raises UsageError."""
        self._special_tokens = dict(special_tokens)
        try:
            self._code = Sandbox().compile(source)
        except (TemplateError, RecursionError) as error:
            raise UsageError(
                f"the model's chat template cannot be read ({error}): give a prompt instead of messages"
            ) from error

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
        """The prompt text. It holds its own <bos>, which `Tokenizer.encode` does not write a second time.

        `options` are the template's own switches, e.g. enable_thinking. Raises UsageError with what the
        template says if it refuses the messages, fails on them, or exceeds a bound.
        """
        if not messages:
            raise UsageError("messages is empty: give at least one message")
        values = {
            **self._special_tokens,
            **(options or {}),
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return Sandbox().run(self._code, values)
        except MessagesRefused as error:
            raise UsageError(f"the model's chat template refuses these messages: {error}") from error
        except _FAILURES as error:
            what = str(error) or type(error).__name__
            raise UsageError(
                f"the model's chat template fails on these messages ({what}): check their roles and fields"
            ) from error


_FAILURES = (
    TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError,
    MemoryError,
)  # fmt: skip


def encode_chat(
    tokenizer: Tokenizer, messages: Seq[Mapping[str, Any]], *, generation_prompt: bool = True
) -> list[int]:
    """Token ids of a rendered chat. Raises UsageError as `ChatTemplate` does."""
    text = ChatTemplate.of(tokenizer).render(messages, add_generation_prompt=generation_prompt)
    return tokenizer.encode(text, add_bos=False)
