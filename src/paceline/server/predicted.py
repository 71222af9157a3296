"""How many drafted tokens came from a request's prediction: those in a run that the prediction has, too.

The n-gram drafter also copies from the text itself, so what was drafted says nothing of where it came from; OpenAI's
words for the counts are tokens of the prediction that appeared in the answer.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from paceline.core import Delta

_BEGIN = -1  # no token
RUN = 3  # equal tokens, one after the other, that are no accident


class Predicted:
    """Counts over all texts of one request."""

    def __init__(self, prediction: Seq[int]) -> None:
        self.accepted = self.rejected = 0
        self._run = min(RUN, len(prediction))
        self._start = [_BEGIN] * (self._run - 1)  # both begin there, so their first tokens are a run, too
        tokens = [*self._start, *prediction]
        self._runs = (
            {tuple(tokens[i : i + self._run]) for i in range(len(prediction))} if self._run else set()
        )
        self._ends: dict[tuple[int, int], list[int]] = {}  # (prompt, text) -> its last tokens

    def push(self, text: tuple[int, int], delta: Delta) -> None:
        """A step of one text, whose draft is `delta.proposed`."""
        if not self._runs:
            return
        context = self._ends.get(text, self._start)
        accepted = delta.origins.count("draft")
        for j in self._of_prediction(context, delta.proposed):
            self.accepted += j < accepted
            self.rejected += j >= accepted
        after = [*context, *delta.token_ids]
        self._ends[text] = after[len(after) - len(self._start) :]

    def _of_prediction(self, context: list[int], draft: list[int]) -> set[int]:
        """Places of the draft that stand in a run of the prediction, which may begin in the text before it."""
        tokens, out = context + draft, set[int]()
        for i in range(len(tokens) - self._run + 1):
            if tuple(tokens[i : i + self._run]) in self._runs:
                out.update(range(i - len(context), i - len(context) + self._run))
        return {j for j in out if j >= 0}
