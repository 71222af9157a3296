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

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return self.tokenizer.template is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain text, with bos if the tokenizer writes one."""
        return self.tokenizer.encode(text)

    def render(self, messages: Seq[dict[str, str]], *, generation_prompt: bool) -> str:
        """The text of a chat. Raises UsageError if the model has no chat template."""
        if self._template is None:
            if not self.chats:
                raise UsageError(
                    "the data holds chats and this target has no chat template: give texts, or put "
                    "chat_template.jinja beside its tokenizer.json"
                )
            self._template = ChatTemplate.of(self.tokenizer)
        return self._template.render(messages, add_generation_prompt=generation_prompt)

    def encode_chat(self, messages: Seq[dict[str, str]], *, generation_prompt: bool) -> list[int]:
        """Token ids of a rendered chat, which holds its own bos. Raises UsageError as `render`."""
        rendered = self.render(messages, generation_prompt=generation_prompt)
        return self.tokenizer.encode(rendered, add_bos=False)
