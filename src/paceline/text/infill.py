"""Prompts of models that were taught to write what stands between two texts, in each model's own tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.text.tokenizer import Tokenizer

# before what comes first, before what comes last, before what is to be written: order of the prompt
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
)
_FILE = ("<|file_sep|>", "<file_sep>")
_REPOSITORY = ("<|repo_name|>", "<repo_name>", "<reponame>")


@dataclass(frozen=True, slots=True)
class Infill:
    """The tokens of one model. `ends`: those after which what is written is over."""

    tokenizer: Tokenizer
    before: int
    behind: int
    middle: int
    file: int | None
    repository: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Infill | None:
        """None for a model that has no such tokens."""
        for marks in _MARKS:
            before, behind, middle = (tokenizer.token_id(mark) for mark in marks)
            if before is not None and behind is not None and middle is not None:
                return cls(
                    tokenizer,
                    before,
                    behind,
                    middle,
                    _first(tokenizer, _FILE),
                    _first(tokenizer, _REPOSITORY),
                )
        return None

    @property
    def ends(self) -> tuple[int, ...]:
        own = (self.before, self.behind, self.middle, self.file, self.repository)
        return tuple(end for end in own if end is not None)

    def prompt(self, before: str, behind: str, files: Mapping[str, str] | None = None) -> list[int]:
        """Token ids. `files`: name -> text of other files, shown first by models that know files. Raises PromptError."""
        ids = [] if not self.tokenizer.adds_bos or self.tokenizer.bos_id is None else [self.tokenizer.bos_id]
        if files and self.file is not None:
            if self.repository is not None:
                ids += [self.repository, *self._text("project\n")]
            for name, text in files.items():
                ids += [self.file, *self._text(f"{name}\n{text}\n")]
            ids += [self.file, *self._text("current\n")]
        return [*ids, self.before, *self._text(before), self.behind, *self._text(behind), self.middle]

    def _text(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_bos=False, marks=False)


def _first(tokenizer: Tokenizer, marks: tuple[str, ...]) -> int | None:
    return next((token for mark in marks if (token := tokenizer.token_id(mark)) is not None), None)
