"""Copies that were not worth checking, and whether the text went on as they said: experience that costs nothing.

What a text's copies are worth is learnt from what became of them. One that looks too unsure is not checked, and nothing
would ever be learnt of a text whose copies are better than those of others. But the text shows it by itself: tokens that
it goes on with would have been kept.
"""

from __future__ import annotations

from paceline.core import Sequence
from paceline.engine.records import RowRecord

MOST = 4  # tokens of a copy that are followed


class Unchecked:
    """By text, the last copy that was not checked, until it is known what would have become of it."""

    def __init__(self) -> None:
        self._copies: dict[
            int, tuple[int, RowRecord, list[int]]
        ] = {}  # (where it begins, what is known, its tokens)

    def add(self, sequence: Sequence, kind: str, tokens: list[int], confidence: list[float]) -> None:
        told = RowRecord(sequence.id, kind, len(tokens[:MOST]), 0, confidence[:MOST], None)
        self._copies[sequence.id] = len(sequence.tokens), told, tokens[:MOST]

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._copies

    def told(self, sequence: Sequence) -> RowRecord | int:
        """What would have become of the copy; or the tokens that are still to be written until that is known, 0 if
        there is none.
        """
        if sequence.id not in self._copies:
            return 0
        begin, told, tokens = self._copies[sequence.id]
        said = sequence.tokens[begin : begin + len(tokens)]
        same = next((j for j, token in enumerate(said) if token != tokens[j]), len(said))
        if same == len(said) < len(tokens):
            return len(tokens) - same
        del self._copies[sequence.id]
        told.accepted = same
        return told

    def forget(self, sequence_id: int) -> None:
        self._copies.pop(sequence_id, None)
