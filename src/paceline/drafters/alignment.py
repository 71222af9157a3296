"""Where a text stands in the reference that it rewrites, and what it replaces on the way.

A text that edits its reference copies it, and does to a name at each place what it has done to it before. After a
difference the text is taken up again where the reference first goes on with the same two tokens; what lay between
them in both is a replacement, which later proposals make by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

SAME = 2  # equal tokens that show that text and reference go on together
NEAR = 64  # tokens of the reference in which a text goes on after a difference
LONGEST_CHANGE = 16  # tokens of a replacement, on either side
MOST_CHANGES = 32  # replacements that are remembered, the latest ones

Tokens = tuple[int, ...]


class Alignment:
    """Follows one text through one reference. The text is expected to begin where the reference does."""

    def __init__(self, reference: Seq[int], begin: int) -> None:
        """`begin`: the text's first token that may be of the reference."""
        self._reference = tuple(reference)
        self._text, self._at = begin, 0  # tokens before these stand for each other
        self.run = 1  # tokens for which both have gone on together; the beginning is a guess
        self.lost = False  # the text is somewhere else
        self._changes: dict[Tokens, Tokens] = {}
        self._first: frozenset[int] = frozenset()  # first tokens of what was changed

    def follow(self, text: Seq[int]) -> None:
        """Take notice of what was written since the last call."""
        while self._walk(text) and (self._step_over_change(text) or self._take_up(text)):
            pass
        self.lost = self._text < len(text) and self._unfinished(text) is None

    def propose(self, text: Seq[int], limit: int) -> list[int]:
        """Up to `limit` tokens of what the text may go on with; none while it is lost."""
        change = self._unfinished(text)
        if self.lost or change is None:
            return []
        old, new = change
        out, at = list(new[len(text) - self._text :]), self._at + len(old)
        while len(out) < limit and at < len(self._reference):
            found = self._change_at(at)
            old, new = found if found is not None else ((0,), (self._reference[at],))
            out += new
            at += len(old)
        return out[:limit]

    def jump(self, text: Seq[int], at: int, run: int) -> None:
        """The last `run` tokens of the text have been found before `at` of the reference."""
        self._text, self._at, self.run, self.lost = len(text), at, run, False

    def _walk(self, text: Seq[int]) -> bool:
        """Go on while both are equal; True if the text differs then."""
        begin = self._text
        while self._text < len(text) and self._at < len(self._reference):
            if text[self._text] != self._reference[self._at]:
                break
            self._text, self._at = self._text + 1, self._at + 1
        self.run += self._text - begin
        return self._text < len(text)

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
        near = self._reference[self._at : self._at + NEAR]
        for length in range(min(gap - SAME, LONGEST_CHANGE) + 1):
            skipped = _find(near, tuple(text[self._text + length : self._text + length + SAME]))
            if skipped is None:
                continue
            if 0 < skipped <= LONGEST_CHANGE:
                self._remember(near[:skipped], tuple(text[self._text : self._text + length]))
            self._text, self._at, self.run = self._text + length, self._at + skipped, 0
            return True
        return False

    def _remember(self, old: Tokens, new: Tokens) -> None:
        self._changes.pop(old, None)
        self._changes[old] = new
        if len(self._changes) > MOST_CHANGES:
            del self._changes[next(iter(self._changes))]
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
        written = tuple(text[self._text :])
        if not written:
            return (), ()
        change = self._change_at(self._at)
        return change if change is not None and change[1][: len(written)] == written else None


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
