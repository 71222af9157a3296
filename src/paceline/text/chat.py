"""Chat messages to a prompt, by the template that came with the tokenizer.

A template is a program written by whoever made the checkpoint; `sandbox` bounds what it can do, and it runs in a
process of its own, which is killed when it takes too long or too much memory (template_process.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from functools import cached_property
from typing import Any

from paceline.errors import UsageError
from paceline.text.helper import Helper
from paceline.text.template_process import TIMEOUT, limits
from paceline.text.tokenizer import Tokenizer

MOST_CHARACTERS = 2**18  # of a template; the longest known has a fifth of it
_SHOWN = 500  # characters of what a template says is wrong
_GO = re.compile(r"\{\{-?\s*(?:\.[A-Z]|if \.|range |end\b|\$)")
_PROBE = ("first-part-0x7f", "second-part-0x7f")


class TemplateUnusable(UsageError):
    """There is no template, or none that can be used: messages cannot be answered, a text can be gone on with."""


class TemplateRefused(UsageError):
    """A template does not take these messages: others may do."""


class ChatTemplate:
    """A compiled template, with its process. Rendering changes nothing and may be asked for in any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], timeout: float = TIMEOUT) -> None:
        """`special_tokens` are the names that a template may print, e.g. bos_token. Raises UsageError."""
        if len(source) > MOST_CHARACTERS:
            raise UsageError(
                f"the model's chat template has {len(source)} characters, more than the {MOST_CHARACTERS} that are read: "
                "give a prompt instead of messages"
            )
        self.source, self._special_tokens = source, dict(special_tokens)
        self._helper = Helper(
            "paceline.text.template_process", lambda: {"source": source, **limits()}, timeout
        )
        answer = self._helper.greet()
        error = "it takes too long or too much memory" if answer is None else answer["error"]
        if error is not None:
            self._helper.close()
            what = "it is a Go template of Ollama's, no Jinja" if _GO.search(source) else _shown(error)
            raise TemplateUnusable(
                f"the model's chat template cannot be read ({what}): give a prompt instead of messages"
            )

    @classmethod
    def of(cls, tokenizer: Tokenizer, tools: bool = False) -> ChatTemplate:
        """The template of a tokenizer, which keeps it; with `tools` the one for them, if there is. Raises UsageError."""
        if tools and tokenizer.tool_template is not None:
            template = tokenizer.tool_chat
            if not isinstance(template, cls) or template.source != tokenizer.tool_template:
                template = tokenizer.tool_chat = cls(tokenizer.tool_template, tokenizer.special_tokens)
            return template
        if tokenizer.template is None:
            raise TemplateUnusable(
                "this model has no chat template: give a prompt instead of messages, "
                "or put chat_template.jinja beside its tokenizer.json"
            )
        template = tokenizer.chat
        if not isinstance(template, cls) or template.source != tokenizer.template:
            template = tokenizer.chat = cls(tokenizer.template, tokenizer.special_tokens)
        return template

    @staticmethod
    def close_all(tokenizer: Tokenizer) -> None:
        """End the processes of a tokenizer's templates."""
        for template in (tokenizer.chat, tokenizer.tool_chat):
            if isinstance(template, ChatTemplate):
                template.close()

    def close(self) -> None:
        """End the process; the next rendering would start another."""
        self._helper.close()

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the template goes through a content that is a list of parts; others print it as it is, or fail."""
        content = [{"type": "text", "text": text} for text in _PROBE]
        try:
            shown = self.render([{"role": "user", "content": content}])
        except UsageError:
            return False
        printed = "'type'" in shown or '"type"' in shown  # the list itself
        return all(text in shown for text in _PROBE) and not printed

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
            answer = self._helper.ask(values)
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(
                f"messages or tools hold what is no JSON ({error}): give texts, numbers, lists and dicts"
            ) from error
        if answer is None:
            raise UsageError(
                "the model's chat template fails on these messages (it takes too long or too much memory): "
                "check their roles and fields"
            )
        if "refused" in answer:
            raise TemplateRefused(
                f"the model's chat template refuses these messages: {_shown(answer['refused'])}"
            )
        if "failed" in answer:
            raise TemplateRefused(
                f"the model's chat template fails on these messages ({_shown(answer['failed'])}): "
                "check their roles and fields"
            )
        text: str = answer["text"]
        return text


def encode_chat(
    tokenizer: Tokenizer, messages: Seq[Mapping[str, Any]], *, generation_prompt: bool = True
) -> list[int]:
    """Token ids of a rendered chat. Raises UsageError as `ChatTemplate` does."""
    text = ChatTemplate.of(tokenizer).render(messages, add_generation_prompt=generation_prompt)
    return tokenizer.encode(text, add_bos=False)


def _shown(text: str) -> str:
    """What a template says is wrong, in one line."""
    return " ".join(text.split())[:_SHOWN]
