"""What shapes the logits of each row of a step: the request's parameters, what stands before the row, its constraint."""

from __future__ import annotations

import numpy as np

from paceline.core import Constraint
from paceline.engine.request import RequestState
from paceline.sampling.shape import LogitRow
from paceline.tree import branches


class ConstraintFailed(Exception):
    """A request's constraint raised, or its answer is none. It ends its own text only: see verify.py."""


def logit_rows(request: RequestState, draft: list[int]) -> list[LogitRow]:
    """What shapes the logits after the text, after its first draft token, ..., after all of `draft`.

    Raises ConstraintFailed.
    """
    s = request.sequence
    if not draft and s.constraint is None and not s.params.min_tokens:
        row = LogitRow(s.params, s.seed, len(s.tokens), request.counts, breakers=request.breakers)
        row.banned, row.mu = request.banned, request.mu
        return [row]
    masks = _masks(s.constraint, draft) if s.constraint is not None else [None] * (len(draft) + 1)
    params, seed, first, counts = s.params, s.seed, len(s.tokens), request.counts
    stop = tuple(request.stop_ids) if s.output_len < params.min_tokens else ()
    rows = [LogitRow(params, seed, first + j, counts, mask, mu=request.mu) for j, mask in enumerate(masks)]
    if params.edits or stop:  # else nobody asks what stands before a token
        for j, row in enumerate(rows):
            row.history = counts.with_draft(draft[:j]) if j else counts
            row.breakers, row.banned = request.breakers, request.banned
            row.stop_ids = stop if s.output_len + j < params.min_tokens else ()
    return rows


def tree_rows(request: RequestState, draft: list[int], parents: list[int]) -> list[LogitRow]:
    """As `logit_rows` of a tree: what shapes the logits after the text, then after each token of `draft`."""
    rows: list[LogitRow | None] = [None] * (len(draft) + 1)
    for path in branches(parents):
        for place, row in zip([-1, *path], logit_rows(request, [draft[j] for j in path]), strict=True):
            rows[place + 1] = rows[place + 1] or row
    return [row for row in rows if row is not None]


def _masks(constraint: Constraint, draft: list[int]) -> list[np.ndarray | None]:
    try:
        known = constraint.masks(draft)
        right = len(known) == len(draft) + 1 and all(mask is None or _is_mask(mask) for mask in known)
    except Exception as error:  # a constraint is third-party code, as a drafter may be
        raise ConstraintFailed(str(error) or type(error).__name__) from error
    if not right:
        raise ConstraintFailed(
            f"its masks after {len(draft)} draft tokens are not {len(draft) + 1} bool arrays [V]"
        )
    return known


def _is_mask(mask: np.ndarray) -> bool:
    return mask.ndim == 1 and mask.size > 0 and mask.dtype.kind in "biu"
