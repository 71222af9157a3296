"""Draft by copying: what followed the longest earlier occurrence of the text's own ending.

The occurrence may lie in the prompt, in what was written so far, or in a reference given with the request (the text
that is being edited). Prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding, with the longest
match instead of a fixed n. Costs no model time; it keeps an index of each text's bigrams.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from paceline.core import MAX_DRAFT_TOKENS, Draft, Sequence
from paceline.drafters.base import DraftContext

MIN_MATCH = 2
MAX_MATCH = 32  # a longer match says nothing more
CANDIDATES = 16  # most recent occurrences that are compared


@dataclass(slots=True)
class _Index:
    """Where each bigram ended: position of the token after it, oldest first."""

    after: defaultdict[tuple[int, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    seen: int = 0

    def extend(self, text: list[int] | tuple[int, ...]) -> None:
        for end in range(max(self.seen, MIN_MATCH), len(text)):
            self.after[text[end - 2], text[end - 1]].append(end)
        self.seen = max(self.seen, len(text))


class NgramDrafter:
    name = "ngram"
    needs_hidden = False

    def __init__(self, max_tokens: int = MAX_DRAFT_TOKENS) -> None:
        self.max_tokens = max_tokens
        self._own: dict[int, _Index] = {}
        self._reference: dict[int, _Index] = {}

    def match(self, sequence: Sequence, limit: int) -> tuple[list[int], int]:
        """(up to `limit` tokens that followed the best match, its length in tokens); ([], 0) without one."""
        own = self._own.setdefault(sequence.id, _Index())
        own.extend(sequence.tokens)
        best: tuple[int, list[int]] = (0, [])
        sources: list[tuple[list[int] | tuple[int, ...], _Index]] = [(sequence.tokens, own)]
        if sequence.reference:
            index = self._reference.setdefault(sequence.id, _Index())
            index.extend(sequence.reference)
            sources.append((sequence.reference, index))
        for source, index in sources:
            length, end = _longest(sequence.tokens, source, index)
            if length > best[0]:
                best = (length, list(source[end : end + limit]))
        return best[1], best[0]

    def draft(self, context: DraftContext) -> Draft:
        out = Draft.empty(len(context.sequences), "no proposal")
        for row, (sequence, limit) in enumerate(zip(context.sequences, context.limits, strict=True)):
            if limit > 0:
                tokens, length = self.match(sequence, limit)
                out.tokens[row] = tokens
                out.confidence[row] = [1.0 - 0.5 ** min(length, 8)] * len(tokens)
                out.drafter[row] = self.name
                out.reasons[row] = None if tokens else "no proposal"
        return out

    def forget(self, sequence_id: int) -> None:
        self._own.pop(sequence_id, None)
        self._reference.pop(sequence_id, None)


def _longest(text: list[int], source: list[int] | tuple[int, ...], index: _Index) -> tuple[int, int]:
    """(length, end) of the longest match of the end of `text` within `source`, the most recent among equals."""
    best, best_end = 0, 0
    if len(text) < MIN_MATCH:
        return best, best_end
    for end in reversed(index.after.get((text[-2], text[-1]), [])[-CANDIDATES:]):
        length = MIN_MATCH
        limit = min(MAX_MATCH, end, len(text))
        while length < limit and source[end - 1 - length] == text[-1 - length]:
            length += 1
        if length > best:
            best, best_end = length, end
            if length == MAX_MATCH:
                break
    return best, best_end
