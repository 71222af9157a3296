"""Draft by copying: what followed the longest earlier occurrence of the text's own ending.

The occurrence may lie in the prompt, in what was written so far, or in a reference given with the request (the text
that is being edited). Prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding, with the longest
match instead of a fixed n, and a copy that has reached the end of the text goes on with itself: a text that repeats
goes on repeating. A reference is followed token by token with the replacements that the text makes (alignment.py), and
searched only where the text has left it. Costs no model time and keeps no index: a search through the tokens' bytes
takes about a microsecond per thousand of them.
"""

from __future__ import annotations

from array import array

from paceline.core import MAX_DRAFT_TOKENS, Draft, Sequence
from paceline.drafters.alignment import Alignment, Words
from paceline.drafters.base import DraftContext

LENGTHS = (
    2,
    3,
    4,
    6,
    8,
    12,
    16,
    24,
    32,
)  # of the ending that is looked for; a longer match says nothing more
BYTES = array("i").itemsize  # of a token


class NgramDrafter:
    name = "ngram"
    needs_hidden = False

    def __init__(self, max_tokens: int = MAX_DRAFT_TOKENS, words: Words | None = None) -> None:
        """`words`: the target's, without which a replaced word of several tokens is learnt more slowly."""
        self.max_tokens, self._words = max_tokens, words
        self._own: dict[int, bytearray] = {}
        self._references: dict[int, tuple[bytes, Alignment]] = {}

    def peek(self, sequence: Sequence) -> bool:
        """Whether `match` may find something, at the price of one search."""
        tokens, known = sequence.tokens, self._references.get(sequence.id)
        if sequence.reference and (known is None or not known[1].lost):
            return True
        own = _extended(self._own.setdefault(sequence.id, bytearray()), tokens)
        ending = bytes(own[-LENGTHS[0] * BYTES :])
        if known is not None and _latest(known[0], ending, len(sequence.reference)):
            return True
        return bool(_latest(own, ending, len(tokens) - 1))

    def match(self, sequence: Sequence, limit: int) -> tuple[list[int], int]:
        """(up to `limit` tokens that followed the best match, its length in tokens); ([], 0) without one."""
        tokens = sequence.tokens
        own = _extended(self._own.setdefault(sequence.id, bytearray()), tokens)
        end, best = _longest(own, own, len(tokens) - 1)
        copied, length = self._from_reference(sequence, own, limit) if sequence.reference else ([], 0)
        if copied and length >= best:
            return copied, length
        period = tokens[end : end + limit] if best else []
        return [period[j % len(period)] for j in range(limit)] if best else [], best

    def _from_reference(self, sequence: Sequence, own: bytearray, limit: int) -> tuple[list[int], int]:
        known = self._references.get(sequence.id)
        new = known is None
        if known is None:
            data = array("i", sequence.reference).tobytes()
            known = self._references[sequence.id] = (
                data,
                Alignment(sequence.reference, sequence.prompt_len, self._words),
            )
        data, alignment = known
        alignment.follow(sequence.tokens)
        if alignment.apart or new:  # a prompt may end in the middle of it
            end, length = _longest(own, data, len(sequence.reference))
            if length > alignment.run or (alignment.apart and length):
                alignment.jump(sequence.tokens, end, length)
        tokens = alignment.propose(sequence.tokens, limit)
        if not tokens:
            return [], 0
        return tokens, 1 if alignment.apart else min(alignment.run, LENGTHS[-1])

    def draft(self, context: DraftContext) -> Draft:
        out = Draft.empty(len(context.sequences), "no proposal")
        for row, (sequence, limit) in enumerate(zip(context.sequences, context.limits, strict=True)):
            if limit > 0:
                tokens, length = self.match(sequence, limit)
                out.tokens[row] = tokens
                out.confidence[row] = [_confidence(length + j) for j in range(len(tokens))]
                out.drafter[row] = self.name
                out.reasons[row] = None if tokens else "no proposal"
        return out

    def forget(self, sequence_id: int) -> None:
        self._own.pop(sequence_id, None)
        self._references.pop(sequence_id, None)


def _confidence(length: int) -> float:
    """Chance that two texts which have agreed for so many tokens agree in the next one, too."""
    return length / (length + 2)


def _extended(known: bytearray, tokens: list[int]) -> bytearray:
    """`known` with the bytes of those of `tokens` that it does not have yet."""
    if len(known) < BYTES * len(tokens):
        known += array("i", tokens[len(known) // BYTES :]).tobytes()
    return known


def _longest(text: bytearray, source: bytes | bytearray, stop: int) -> tuple[int, int]:
    """(end, length): where in `source`, at token `stop` at most, the longest match of the end of `text` ends.

    The latest among equals, lengths compared as steps of LENGTHS. (0, 0) without a match.
    """
    end, length = 0, 0
    for tokens in LENGTHS:
        if tokens * BYTES > len(text):
            break
        found = _latest(source, bytes(text[-tokens * BYTES :]), stop)
        if not found:
            break
        end, length = found, tokens
    return end, length


def _latest(source: bytes | bytearray, pattern: bytes, stop: int) -> int:
    """The token after the latest occurrence of `pattern` that ends at token `stop` or before; 0 without one."""
    at = source.rfind(pattern, 0, stop * BYTES)
    while at > 0 and at % BYTES:  # it began in the middle of a token
        at = source.rfind(pattern, 0, at + len(pattern) - 1)
    return (at + len(pattern)) // BYTES if at >= 0 else 0
