"""Copies that were not worth checking, and whether the text went on as they said: experience that costs nothing.

What a text's copies are worth is learnt from what became of them. One that looks too unsure is not checked, and nothing
would ever be learnt of a text whose copies are better than those of others. But the text shows it by itself: tokens that
it goes on with would have been kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core import Sequence
from paceline.engine.records import RowRecord
from paceline.sampling.shape import is_greedy

MOST = 4  # tokens of a copy that are followed
SURE = 0.8  # confidence from which on it is waited for what becomes of a copy of sampled text, too


@dataclass(slots=True)
class _Copy:
    begin: int  # where in the text it would lie
    tokens: list[int]
    told: RowRecord
    awaited: bool  # the text is looked at as soon as it has shown what becomes of it


class Unchecked:
    """By text, one copy at a time, until it is known what would have become of it."""

    def __init__(self) -> None:
        self._copies: dict[int, _Copy] = {}

    def add(self, sequence: Sequence, kind: str, tokens: list[int], confidence: list[float]) -> None:
        """Unless another one is followed."""
        if sequence.id not in self._copies:
            told = RowRecord(sequence.id, kind, len(tokens[:MOST]), 0, confidence[:MOST], None)
            awaited = is_greedy(sequence) or confidence[0] >= SURE
            self._copies[sequence.id] = _Copy(len(sequence.tokens), tokens[:MOST], told, awaited)

    def __contains__(self, sequence_id: int) -> bool:
        """Whether one is followed."""
        return sequence_id in self._copies

    def awaited(self, sequence_id: int) -> int:
        """The tokens of a copy of which is waited to see what becomes of it; 0 if there is none."""
        copy = self._copies.get(sequence_id)
        return len(copy.tokens) if copy is not None and copy.awaited else 0

    def told(self, sequence: Sequence) -> RowRecord | int:
        """What would have become of the copy; or the tokens until that is known, 0 if there is none."""
        copy = self._copies.get(sequence.id)
        if copy is None:
            return 0
        said = sequence.tokens[copy.begin : copy.begin + len(copy.tokens)]
        same = next((j for j, token in enumerate(said) if token != copy.tokens[j]), len(said))
        if same == len(said) < len(copy.tokens):
            return len(copy.tokens) - same
        del self._copies[sequence.id]
        copy.told.accepted = same
        return copy.told

    def forget(self, sequence_id: int) -> None:
        self._copies.pop(sequence_id, None)
