"""For requests with `speculation: {trace: true}`: where each token came from, and what had been proposed."""

from __future__ import annotations

from typing import Any

from paceline.core import Delta
from paceline.text.stream import Detokenizer
from paceline.text.tokenizer import Tokenizer


class Trace:
    """One choice's tokens with their text; a character split over tokens belongs to the last of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._characters = Detokenizer(tokenizer, skip_special=False, begins=False)

    def of(self, delta: Delta) -> dict[str, Any]:
        """The field `paceline` of the chunk that carries this delta."""
        return {
            "tokens": delta.token_ids,
            "pieces": [self._characters.push(token) for token in delta.token_ids],
            "origins": delta.origins,
            "proposed": delta.proposed,
            "proposed_pieces": [self._tokenizer.token_text(token) for token in delta.proposed],
        }
