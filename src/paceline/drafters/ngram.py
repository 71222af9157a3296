"""Draft by copying: what followed the longest earlier occurrence of the text's own ending.

The occurrence may lie in the prompt, in what was written so far, or in a reference given with the request (the text
that is being edited). Prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding, with the longest
match instead of a fixed n, and a copy that has reached the end of the text goes on with itself: a text that repeats
goes on repeating. A reference is followed token by token with the replacements that the text makes (alignment.py), and
searched only where the text has left it. Costs no model time and keeps no index: a search takes one to two microseconds
per thousand tokens (ops/search.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core import MAX_DRAFT_TOKENS, Draft, Sequence
from paceline.drafters.alignment import Alignment, Words
from paceline.drafters.base import DraftContext, Drafter
from paceline.ops.search import LENGTHS, Search, search

LONGEST = LENGTHS[-1]  # tokens of a match: a longer one says nothing more


@dataclass(slots=True)
class _Text:
    search: Search
    alignment: Alignment | None  # with its reference
    begun: bool = False  # it has been looked up there
    looked: tuple[int, int] = (0, 0)  # when it had so many tokens, so many at most were
    found: tuple[list[int], int] = ([], 0)


class NgramDrafter(Drafter):
    name = "ngram"
    needs_hidden = False

    def __init__(self, max_tokens: int = MAX_DRAFT_TOKENS, words: Words | None = None) -> None:
        """`words`: the target's, without which a replaced word of several tokens is learnt more slowly."""
        self.max_tokens, self._words = max_tokens, words
        self._texts: dict[int, _Text] = {}

    def match(self, sequence: Sequence, limit: int) -> tuple[list[int], int]:
        """(up to `limit` tokens that followed the best match, its length in tokens); ([], 0) without one."""
        tokens, text = sequence.tokens, self._text(sequence)
        copied, length = self._from_reference(text, tokens, limit) if text.alignment is not None else ([], 0)
        if copied and length == LONGEST:
            return copied, length
        end, best = text.search.in_text(tokens)
        if not best or (copied and length >= best):
            return copied, length
        period = tokens[end : end + limit]
        return period if len(period) == limit else (period * (limit // len(period) + 1))[:limit], best

    def _text(self, sequence: Sequence) -> _Text:
        text = self._texts.get(sequence.id)
        if text is None:
            reference = sequence.reference
            alignment = Alignment(reference, sequence.prompt_len, self._words) if reference else None
            text = self._texts[sequence.id] = _Text(search(reference), alignment)
        return text

    def _from_reference(self, text: _Text, tokens: list[int], limit: int) -> tuple[list[int], int]:
        alignment = text.alignment
        assert alignment is not None
        alignment.follow(tokens)
        if alignment.apart or not text.begun:  # a prompt may end in the middle of it
            end, length = text.search.in_reference(tokens)
            if length > alignment.run or (alignment.apart and length):
                alignment.jump(tokens, end, length)
        text.begun = True
        proposed = alignment.propose(tokens, limit)
        if not proposed:
            return [], 0
        return proposed, 1 if alignment.apart else min(alignment.run, LONGEST)

    def look(self, sequence: Sequence, limit: int) -> tuple[list[int], list[float]]:
        """(what is proposed, with what confidence) for one text."""
        text, at = self._text(sequence), (len(sequence.tokens), limit)
        if text.looked != at:
            text.looked, text.found = at, self.match(sequence, limit)
        tokens, length = text.found
        return list(tokens), _CONFIDENCE[length : length + len(tokens)]

    def draft(self, context: DraftContext) -> Draft:
        out = Draft.empty(len(context.sequences), "no proposal")
        for row, (sequence, limit) in enumerate(zip(context.sequences, context.limits, strict=True)):
            if limit > 0:
                tokens, out.confidence[row] = self.look(sequence, limit)
                if tokens:
                    out.tokens[row], out.drafter[row], out.reasons[row] = tokens, self.name, None
        return out

    def forget(self, sequence_id: int) -> None:
        self._texts.pop(sequence_id, None)


# By tokens for which two texts have agreed: the chance that they agree in the next one, too.
_CONFIDENCE = [length / (length + 2) for length in range(LONGEST + MAX_DRAFT_TOKENS)]
