"""Where a text stands in the reference that it rewrites, and what it replaces on the way.

A text that edits its reference copies it, and does to a name at each place what it has done to it before. After a
difference the text is taken up again where the reference first goes on with the same two tokens; what lay between
them in both is a replacement, which later proposals make by themselves, with and without the space before a word. Until
then it is guessed that a word was replaced, and that what has been written is the new one.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

SAME = 2  # equal tokens that show that text and reference go on together
NEAR = 64  # tokens of the reference in which a text goes on after a difference
LONGEST_CHANGE = 16  # tokens of a replacement, on either side
FOLLOWED = 8  # tokens for which a text must have followed until one of its words is guessed to be a new one
LONGEST_GUESS = 6  # tokens of a new word that is not yet known to have ended
MOST_CHANGES = 32  # replacements that are remembered, the latest ones

Tokens = tuple[int, ...]


class Words(Protocol):
    """What an alignment may know of the tokens' text: see `Words` in text/tokenizer.py."""

    def respaced(self, tokens: Tokens) -> Tokens | None:
        """The tokens of the same text without its first space, or with one if it has none; None if it is no word."""
        ...

    def goes_on(self, token: int) -> bool:
        """Whether `token` goes on with the word before it."""
        ...


class Alignment:
    """Follows an edited text through its reference. Both are expected to begin alike."""

    def __init__(self, reference: Seq[int], begin: int, words: Words | None = None) -> None:
        """`begin`: the text's first token that may be of the reference. Without `words` each token is one."""
        self._reference = tuple(reference)
        self._words = words
        self._text, self._at = begin, 0  # tokens before these stand for each other
        self.run = 1  # tokens for which both have gone on together; the beginning is a guess
        self.apart = False  # the text is in the middle of a difference that was not seen before
        self.lost = False  # it is somewhere else
        self._changes: dict[Tokens, Tokens] = {}
        self._first: frozenset[int] = frozenset()  # first tokens of what was changed
        self._left = (0, 0)  # (text, at) where a way on was looked for last,
        self._tried = 0  # and the lengths of a replacement, from 0 on, that did not lead there

    def follow(self, text: Seq[int]) -> None:
        """Take notice of what was written since the last call."""
        while self._walk(text) and (self._step_over_change(text) or self._take_up(text)):
            pass
        gap = len(text) - self._text
        self.apart = gap > 0 and self._unfinished(text) is None
        self.lost = self.apart and (gap > LONGEST_GUESS or self.run < FOLLOWED)

    def propose(self, text: Seq[int], limit: int) -> list[int]:
        """Up to `limit` tokens of what the text may go on with; none while it is lost."""
        if self.lost:
            return []
        change, begun = self._unfinished(text), []
        if change is None:
            at = self._end_of_word(text)
        else:
            old, new = change
            at, begun = self._at + len(old), list(new[len(text) - self._text :])
        return (begun + self._copy(at, limit - len(begun)))[:limit]

    def jump(self, text: Seq[int], at: int, run: int) -> None:
        """The last `run` tokens of the text have been found before `at` of the reference."""
        self._text, self._at, self.run = len(text), at, run
        self.apart = self.lost = False

    def _copy(self, at: int, limit: int) -> list[int]:
        """The reference from `at` on, with what was changed before changed again; some tokens more than `limit`."""
        reference, first = self._reference, self._first
        out: list[int] = []
        while len(out) < limit and at < len(reference):
            token = reference[at]
            change = self._change_at(at) if token in first else None
            if change is None:
                out.append(token)
                at += 1
            else:
                out += change[1]
                at += len(change[0])
        return out

    def _end_of_word(self, text: Seq[int]) -> int:
        """Where the reference goes on after the word that the text has left it for; behind the token that both have."""
        at = self._at + 1
        while (
            at < len(self._reference) and self._words is not None and self._words.goes_on(self._reference[at])
        ):
            at += 1
        return at + (self._reference[at : at + 1] == tuple(text[-1:]))

    def _walk(self, text: Seq[int]) -> bool:
        """Go on while both are equal; True if the text differs then."""
        begin = self._text
        while self._text < len(text) and self._at < len(self._reference):
            if text[self._text] != self._reference[self._at]:
                break
            self._text, self._at = self._text + 1, self._at + 1
        self.run += self._text - begin
        if not self._first.isdisjoint(text[begin : self._text]):
            self._forget(self._at - (self._text - begin))
        return self._text < len(text)

    def _forget(self, begin: int) -> None:
        """What was changed before and was not from `begin` of the reference to here will not be, either."""
        for at in range(begin, self._at):
            change = self._change_at(at)
            if change is not None and at + len(change[0]) <= self._at:
                self._without(change[0])

    def _step_over_change(self, text: Seq[int]) -> bool:
        change = self._change_at(self._at)
        if change is None:
            return False
        old, new = change
        if tuple(text[self._text : self._text + len(new)]) != new:
            return False
        self._text, self._at = self._text + len(new), self._at + len(old)
        return True

    def _take_up(self, text: Seq[int]) -> bool:
        """Find where both go on together after a difference, and remember it as a change."""
        gap = len(text) - self._text
        if gap > LONGEST_CHANGE + NEAR:
            return False  # it has gone elsewhere
        if self._left != (self._text, self._at):
            self._left, self._tried = (self._text, self._at), 0
        begin, self._tried = self._tried, max(self._tried, min(gap - SAME, LONGEST_CHANGE) + 1)
        near = self._reference[self._at : self._at + NEAR]
        for length in range(begin, self._tried):
            skipped = _find(near, tuple(text[self._text + length : self._text + length + SAME]))
            if skipped is None:
                continue
            if 0 < skipped <= LONGEST_CHANGE:
                self._remember(near[:skipped], tuple(text[self._text : self._text + length]))
            self._text, self._at, self.run = self._text + length, self._at + skipped, 0
            return True
        return False

    def _remember(self, old: Tokens, new: Tokens) -> None:
        pairs = [(old, new)]
        if self._words is not None:
            both = self._words.respaced(old), self._words.respaced(new)
            if both[0] is not None and both[1] is not None:
                pairs.insert(0, both)  # type: ignore[arg-type]
        for was, becomes in pairs:
            self._changes.pop(was, None)
            self._changes[was] = becomes
        for was in list(self._changes)[:-MOST_CHANGES]:
            del self._changes[was]
        self._first = frozenset([change[0] for change in self._changes])

    def _without(self, old: Tokens) -> None:
        del self._changes[old]
        self._first = frozenset([change[0] for change in self._changes])

    def _change_at(self, at: int) -> tuple[Tokens, Tokens] | None:
        """The latest change of what the reference has at `at`."""
        if at >= len(self._reference) or self._reference[at] not in self._first:
            return None
        for old in reversed(self._changes):
            if self._reference[at : at + len(old)] == old:
                return old, self._changes[old]
        return None

    def _unfinished(self, text: Seq[int]) -> tuple[Tokens, Tokens] | None:
        """The change in whose middle the text stands, (() , ()) if it stands in none, None if it has left its way."""
        gap = len(text) - self._text
        if not gap:
            return (), ()
        change = self._change_at(self._at)
        if change is None or len(change[1]) < gap:
            return None
        return change if change[1][:gap] == tuple(text[self._text :]) else None


def _find(tokens: Tokens, wanted: Tokens) -> int | None:
    """Where `wanted`, of SAME tokens, begins first."""
    at = -1
    try:
        while True:
            at = tokens.index(wanted[0], at + 1)
            if tokens[at : at + SAME] == wanted:
                return at
    except ValueError:
        return None
