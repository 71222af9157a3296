"""The target's tokenizer and chat template, as training data needs them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

from paceline.errors import UsageError
from paceline.text.chat import ChatTemplate
from paceline.text.tokenizer import Tokenizer


class TargetEncoder:
    """Encodes texts and chats as the target reads them. The template is compiled at the first chat."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.load(folder)
        self._template: ChatTemplate | None = None

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain text, with bos if the tokenizer writes one."""
        return self.tokenizer.encode(text)

    def encode_chat(self, messages: Seq[dict[str, str]], *, generation_prompt: bool) -> list[int]:
        """Token ids of a rendered chat. Raises UsageError if the model has no chat template."""
        if self._template is None:
            if self.tokenizer.template is None:
                raise UsageError(
                    "the data holds chats and this target has no chat template: give texts, or put "
                    "chat_template.jinja beside its tokenizer.json"
                )
            self._template = ChatTemplate.of(self.tokenizer)
        rendered = self._template.render(messages, add_generation_prompt=generation_prompt)
        return self.tokenizer.encode(rendered)
