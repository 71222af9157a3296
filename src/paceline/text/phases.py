"""Constraints that hold for a part of the text only: behind the thinking, in it, or inside the tool calls.

Looking ahead along a draft crosses the borders of the parts as writing does, and leaves the state as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

import numpy as np

from paceline.core import Constraint


class AfterThinking:
    """A constraint that begins behind the thinking part, if there is one.

    Up to two tokens of `gap` (line breaks) may stand between: what follows does not see them.
    """

    def __init__(
        self, inner: Constraint, marks: tuple[int, int], inside: bool, gap: frozenset[int] = frozenset()
    ) -> None:
        """`marks`: the tokens that open and close a thought; `inside`: the prompt has opened one."""
        self._inner, (self._open, self._close), self._gap = inner, marks, gap
        self._state = "inside" if inside else "before"  # before | inside | gap, gap2 | behind

    def masks(self, draft: Seq[int]) -> list[np.ndarray | None]:
        out: list[np.ndarray | None] = []
        state = self._state
        for i in range(len(draft) + 1):
            if state == "behind":
                return out + self._inner.masks(draft[i:])
            if state == "inside":
                out.append(None)
            else:
                passing = i < len(draft) and self._passes(state, draft[i])
                ahead = self._inner.masks([] if passing else draft[i:])
                also = {self._open} if state == "before" else self._gap
                out.append(_with(ahead[0], also))
                if not passing:
                    return out + ahead[1:]
            if i < len(draft):
                state = self._after(state, draft[i])
        return out

    def commit(self, tokens: Seq[int]) -> None:
        for i, token in enumerate(tokens):
            if self._state not in ("inside", "behind") and not self._passes(self._state, token):
                self._state = "behind"
            if self._state == "behind":
                self._inner.commit(tokens[i:])
                return
            self._state = self._after(self._state, token)

    def _passes(self, state: str, token: int) -> bool:
        """Whether a token before the constrained part is none of it."""
        return token == self._open if state == "before" else token in self._gap

    def _after(self, state: str, token: int) -> str:
        if state == "inside":
            return ("gap" if self._gap else "behind") if token == self._close else "inside"
        return {"before": "inside", "gap": "gap2", "gap2": "behind"}[state]


def _with(mask: np.ndarray | None, tokens: Iterable[int]) -> np.ndarray | None:
    if mask is not None:
        mask = mask.copy()
        mask[list(tokens)] = True
    return mask


class BoundedThinking:
    """A thought of so many tokens at most: then only its closing mark may follow. Beside another constraint, if any."""

    def __init__(
        self, inner: Constraint | None, marks: tuple[int, int], inside: bool, most: int, vocab_size: int
    ) -> None:
        """`marks`: the tokens that open and close a thought; `inside`: the prompt has opened one."""
        self._inner, (self._open, self._close), self._most = inner, marks, most
        # tokens that the thought may still have; None: no thought
        self._left: int | None = most if inside else None
        self._only_close = np.zeros(vocab_size, dtype=bool)
        self._only_close[self._close] = True

    def masks(self, draft: Seq[int]) -> list[np.ndarray | None]:
        inner: list[np.ndarray | None] = [None] * (len(draft) + 1)
        out = inner if self._inner is None else list(self._inner.masks(draft))
        left = self._left
        for i in range(len(draft) + 1):
            if left == 0:
                out[i] = self._only_close
            if i < len(draft):
                left = self._after(left, draft[i])
        return out

    def commit(self, tokens: Seq[int]) -> None:
        if self._inner is not None:
            self._inner.commit(tokens)
        for token in tokens:
            self._left = self._after(self._left, token)

    def _after(self, left: int | None, token: int) -> int | None:
        if token == self._open:
            return self._most
        return None if left is None or token == self._close else max(0, left - 1)


class InsideCalls:
    """Anything goes until a call is opened; inside it a fresh constraint holds, up to the closing mark."""

    def __init__(self, make: Callable[[], Constraint], open_id: int, close_id: int) -> None:
        """`make`: the constraint of one call, from behind its opening mark to its closing one."""
        self._make, self._open, self._close = make, open_id, close_id
        self._call: Constraint | None = None

    def masks(self, draft: Seq[int]) -> list[np.ndarray | None]:
        out: list[np.ndarray | None] = []
        call, start = self._call, 0
        while True:
            border = self._open if call is None else self._close
            end = next((i + 1 for i in range(start, len(draft)) if draft[i] == border), None)
            part = draft[start:end]
            masks = [None] * (len(part) + 1) if call is None else call.masks(part)
            if end is None:
                return out + masks
            out += masks[:-1]
            call, start = (self._make() if call is None else None), end

    def commit(self, tokens: Seq[int]) -> None:
        for token in tokens:
            if self._call is not None:
                self._call.commit([token])
                self._call = None if token == self._close else self._call
            elif token == self._open:
                self._call = self._make()
