"""One row's logits addressed by token id: of the whole vocabulary, or of candidates in any order.

Written once for numpy (on the host, where a small array costs a tenth of a small tensor) and torch (on a GPU).
Tokens that have no cell here are ignored, as a drafter's vocabulary may be smaller.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from paceline.ops.uploads import to_device


@dataclass(slots=True)
class Cells:
    x: Any  # [C] float32, changed in place
    ids: Any  # [C] int64, or None: cell i is token i
    lib: ModuleType  # numpy or torch, as x is

    def ban(self, tokens: Seq[int] | np.ndarray) -> None:
        self.x[self._find(np.array(tokens, dtype=np.int64))[0]] = -np.inf

    def allow(self, tokens: Seq[int]) -> None:
        """Refuse all others."""
        columns, _ = self._find(np.array(tokens, dtype=np.int64))
        allowed = self.x[columns]
        self.x[:] = -np.inf
        self.x[columns] = allowed

    def restrict(self, mask: np.ndarray) -> None:
        """Refuse what `mask` refuses, and tokens beyond its end (vocabulary padding)."""
        allowed = self._here(np.ascontiguousarray(mask, dtype=bool))
        if self.ids is None:
            width = min(len(allowed), len(self.x))
            self.x[:width][~allowed[:width]] = -np.inf
            self.x[width:] = -np.inf
        else:
            inside = self.ids < len(allowed)
            self.x[~(inside & allowed[self.lib.clip(self.ids, None, len(allowed) - 1)])] = -np.inf

    def add(self, tokens: Seq[int] | np.ndarray, values: Seq[float] | np.ndarray) -> None:
        """Add values [n] to the logits of distinct tokens [n]."""
        columns, which = self._find(np.asarray(tokens, dtype=np.int64))
        self.x[columns] += self._here(np.asarray(values, dtype=np.float32))[which]

    def penalise(self, tokens: np.ndarray, factor: float) -> None:
        """Divide positive logits of distinct tokens [n] by `factor`, multiply the others by it."""
        if factor != 1:
            columns, _ = self._find(tokens)
            x = self.x[columns]
            self.x[columns] = self.lib.where(x > 0, x / factor, x * factor)

    def _find(self, tokens: np.ndarray) -> tuple[Any, Any]:
        """(columns, which of `tokens` they belong to), of those that have a cell."""
        if self.ids is None:
            which = np.flatnonzero(tokens < len(self.x))
            return self._here(tokens[which]), self._here(which)
        here = self._here(tokens)
        order = self.ids.argsort()
        place = self.lib.searchsorted(self.ids[order], here)
        columns = order[self.lib.clip(place, None, len(order) - 1)]
        hits = self.ids[columns] == here
        return columns[hits], hits

    def _here(self, values: np.ndarray) -> Any:
        return values if self.lib is np else to_device(self.lib.as_tensor(values), self.x.device)
