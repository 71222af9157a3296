"""The vocabulary as llguidance wants it, here and in the process that compiles grammars."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import llguidance


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What llguidance has to know: the text of tokenizer.json, the model's width, and what ends a text."""

    tokenizer_json: str
    size: int
    end_ids: tuple[int, ...]

    def load(self) -> Any:
        return llguidance.LLTokenizer(self.tokenizer_json, n_vocab=self.size, eos_token=list(self.end_ids))
