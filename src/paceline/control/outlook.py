"""What drafting would bring by given prices and chances: for people, before anything is written."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from paceline.control.allocation import Batch, Option, allocate, break_even
from paceline.control.cost_model import CostModel, CostTable, DraftCost, table_of
from paceline.core import MAX_DRAFT_TOKENS

ROW = 0.06  # what a further row adds to a step, in steps, where nothing was measured


class Outlook(NamedTuple):
    tokens: int  # drafted in each step of one text,
    gain: float  # and the speed then, over plain


def outlook(table: CostTable, drafter: str, acceptance: Seq[float]) -> Outlook:
    """`acceptance`: by position, given that all before were kept; the last one goes on."""
    costs, batch = CostModel(table), Batch(1, 1)
    chances = [acceptance[min(j, len(acceptance) - 1)] for j in range(MAX_DRAFT_TOKENS)]
    best = allocate([Option(0, drafter, list(accumulate(chances, mul)))], batch, costs)
    _, length = best.taken.get(0, (None, 0))
    return Outlook(length, best.rate * costs.step_seconds(1, False))


def by_bytes(share: float) -> CostTable:
    """Prices of a pair whose draft model has `share` of the target's bytes, if a step takes as long as they are read."""
    rows = (1, 2, 3, 5, 9, 17)
    return table_of(rows, [1.0 + ROW * (n - 1) for n in rows], {"model": DraftCost(0.0, share, 0.0)})


def pays_from(table: CostTable, drafter: str) -> float:
    """The share of first tokens that must be kept for drafts to pay; above 1 none can."""
    low, high = 0.0, 1.0
    if break_even(drafter, Batch(1, 1), 1, CostModel(table)) > 1.0:
        return 1.01
    for _ in range(12):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if outlook(table, drafter, [middle]).tokens else (middle, high)
    return high
