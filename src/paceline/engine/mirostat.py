"""Mirostat 2 over the rows of a draft: its threshold at a row follows from the tokens before it, drafted ones too.

A row after a draft token counts only if that token is kept. So the threshold there is the one that follows from taking
the draft token at the row before, and no draw has to be waited for: the text is that of plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from paceline.core import Sequence, Verdict
from paceline.sampling.shape import LogitRow, is_greedy, shape
from paceline.sampling.truncation import next_mu


def follows(sequence: Sequence) -> bool:
    return sequence.params.mirostat > 0 and not is_greedy(sequence)


def settle(logits: torch.Tensor, rows: Seq[LogitRow], draft: Seq[int], parents: Seq[int] | None) -> None:
    """Set the thresholds of the rows [k + 1] of a text's draft [k], from the first one on. logits [k + 1, V]."""
    shaped: dict[int, np.ndarray] = {}
    for j, token in enumerate(draft):
        before = (j - 1 if parents is None else parents[j]) + 1
        if before not in shaped:
            shaped[before] = _shaped(logits, rows, before)
        rows[j + 1].mu = next_mu(shaped[before], token, _mu(rows[before]), rows[before].params)


def threshold_after(logits: torch.Tensor, rows: Seq[LogitRow], verdict: Verdict) -> float:
    """The threshold after what a verdict keeps and the token that it adds."""
    row = verdict.places[-1] + 1 if len(verdict.places) else 0
    return next_mu(_shaped(logits, rows, row), verdict.next_token, _mu(rows[row]), rows[row].params)


def _shaped(logits: torch.Tensor, rows: Seq[LogitRow], row: int) -> np.ndarray:
    made: np.ndarray = shape(logits[row : row + 1], [rows[row]])[0].cpu().numpy()
    return made


def _mu(row: LogitRow) -> float:
    return 2 * row.params.mirostat_tau if row.mu is None else row.mu
