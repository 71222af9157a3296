"""What a text has used so far, kept so that no step costs time in the length of the text.

The engine owns one `Counts` per sequence and adds tokens only when they are kept. A draft is looked at
through `with_draft`, which changes nothing, so refused tokens are never counted. Nothing is counted before somebody
asks: most texts have no penalties.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np


class Counts:
    """Distinct tokens of prompt and output, and how often each stands in the output."""

    __slots__ = ("_counts", "_draft", "_ids", "_index", "_output_len", "_text", "_tokens", "_uncounted")

    def __init__(self, prompt: Iterable[int] = (), output: Seq[int] = ()) -> None:
        self._tokens = [*prompt, *output]
        distinct = list(dict.fromkeys(self._tokens[: len(self._tokens) - len(output)]))
        self._index = {token: i for i, token in enumerate(distinct)}
        self._ids = np.array(distinct, dtype=np.int64)  # [capacity], the first len(_index) are in use
        self._counts = np.zeros(len(distinct), dtype=np.float32)  # [capacity], occurrences in the output
        self._text: Counts | None = None  # that a draft is seen behind
        self._draft: tuple[int, ...] = ()
        self._uncounted: list[int] = list(output)
        self._output_len = len(output)

    @property
    def output_len(self) -> int:
        """Tokens of the output, the viewed draft included."""
        return self._output_len + len(self._draft)

    def add(self, tokens: Seq[int]) -> None:
        """Record tokens that were kept."""
        assert self._text is None, "a view of a draft is read only"
        self._tokens += tokens
        self._uncounted += tokens
        self._output_len += len(tokens)

    def with_draft(self, draft: Seq[int]) -> Counts:
        """A cheap view as if `draft` had been kept, good until the next `add`."""
        view = object.__new__(Counts)
        view._text = self._text or self
        view._output_len, view._draft = self._output_len, (*self._draft, *draft)
        return view

    def last(self, count: int) -> list[int]:
        """The last tokens of prompt, output and the viewed draft, as many as there are of `count`; negative: all."""
        tokens = (self._text or self)._tokens
        if count < 0:
            return [*tokens, *self._draft]
        settled = max(0, count - len(self._draft))
        return [*tokens[max(0, len(tokens) - settled) :], *self._draft[max(0, len(self._draft) - count) :]]

    def window(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """`table` of the last `count` tokens; of those of the prompt among them none is counted."""
        tokens = self.last(count)
        ids = np.array(list(dict.fromkeys(tokens)), dtype=np.int64)
        written = np.array(tokens[max(0, len(tokens) - self.output_len) :], dtype=np.int64)
        return ids, (written[None, :] == ids[:, None]).sum(1).astype(np.float32)

    def table(self) -> tuple[np.ndarray, np.ndarray]:
        """(distinct ids int64 [n], their occurrences in the output float32 [n]); read only."""
        if self._text is not None:
            return self._behind(*self._text.table(), self._text._index)
        for token in self._uncounted:
            slot = self._slot(token)  # may replace the arrays
            self._counts[slot] += 1
        self._uncounted.clear()
        size = len(self._index)
        return self._ids[:size], self._counts[:size]

    def _behind(
        self, ids: np.ndarray, counts: np.ndarray, index: dict[int, int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The table with the draft behind what the text has."""
        new = [t for t in dict.fromkeys(self._draft) if t not in index]
        place = {t: len(ids) + i for i, t in enumerate(new)}
        counts = np.concatenate([counts, np.zeros(len(new), dtype=np.float32)])
        for token in self._draft:
            counts[index.get(token, place.get(token, -1))] += 1
        return np.concatenate([ids, np.array(new, dtype=np.int64)]), counts

    def _slot(self, token: int) -> int:
        slot = self._index.setdefault(token, len(self._index))
        if slot >= len(self._ids):
            extra = max(64, len(self._ids))
            self._ids = np.concatenate([self._ids, np.zeros(extra, dtype=np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(extra, dtype=np.float32)])
        self._ids[slot] = token
        return slot
