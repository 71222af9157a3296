"""Draws the tokens of a draft for the drafters that score tokens, as each row's request samples.

Under `match` a draft token is drawn with the very noise that the target will use at its position: equal distributions
give equal tokens (arXiv 2408.07978). Under `reject` and `block` it must be drawn with noise of its own, and comes with
the distribution that it was drawn from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import numpy as np
import torch

from paceline.control.allocation import should_continue
from paceline.control.confidence import worth_of
from paceline.core import OWN_NOISE, Constraint, Draft
from paceline.engine.request import RequestState
from paceline.ops.base import Rule, Stop
from paceline.sampling import noise
from paceline.sampling.choose import choose_candidates, rule_of
from paceline.sampling.shape import LogitRow, is_edited


class ConstraintFailed(Exception):
    """A request's constraint raised, or its answer is none. It ends its own text only: see verify.py."""


def logit_rows(request: RequestState, draft: list[int]) -> list[LogitRow]:
    """What shapes the logits after the text, after its first draft token, ..., after all of `draft`.

    Raises ConstraintFailed.
    """
    s = request.sequence
    if not draft and s.constraint is None and not s.params.min_tokens:
        return [LogitRow(s.params, s.seed, len(s.tokens), request.counts)]
    masks = _masks(s.constraint, draft) if s.constraint is not None else [None] * (len(draft) + 1)
    params, seed, first, counts = s.params, s.seed, len(s.tokens), request.counts
    stop = tuple(request.stop_ids) if s.output_len < params.min_tokens else ()
    if not (params.edits or stop):  # nobody asks what stands before a token
        return [LogitRow(params, seed, first + j, counts, mask) for j, mask in enumerate(masks)]
    return [
        LogitRow(
            params,
            seed,
            first + j,
            counts.with_draft(draft[:j]) if j else counts,
            mask,
            stop if s.output_len + j < params.min_tokens else (),
        )
        for j, mask in enumerate(masks)
    ]


def _masks(constraint: Constraint, draft: list[int]) -> list[np.ndarray | None]:
    try:
        known = constraint.masks(draft)
        right = len(known) == len(draft) + 1 and all(mask is None or _is_mask(mask) for mask in known)
    except Exception as error:  # a constraint is a stranger, as a drafter is
        raise ConstraintFailed(str(error) or type(error).__name__) from error
    if not right:
        raise ConstraintFailed(
            f"its masks after {len(draft)} draft tokens are not {len(draft) + 1} bool arrays [V]"
        )
    return known


def _is_mask(mask: np.ndarray) -> bool:
    return mask.ndim == 1 and mask.size > 0 and mask.dtype.kind in "biu"


class StepPicker:
    """Picks for one draft round. Rows count from 0 in the order of `requests`."""

    def __init__(self, requests: list[RequestState], stops: list[Stop], vocab_size: int) -> None:
        self._lives, self._stops, self._vocab_size = requests, stops, vocab_size
        self._tokens: list[list[int]] = [[] for _ in requests]
        self._confidence: list[list[float]] = [[] for _ in requests]
        self._q: list[list[torch.Tensor | None] | None] = [
            None if request.rule in OWN_NOISE else [] for request in requests
        ]
        self._alive = [1.0] * len(
            requests
        )  # chance that all of a row's draft is kept, as far as its stop asks
        self._ended: set[int] = set()  # rows whose constraint failed: nothing is drafted for them any more

    def pick(
        self, rows: Seq[int], step: int, logits: torch.Tensor, ids: torch.Tensor | None = None
    ) -> list[int]:
        """Tokens for `rows` at draft position `step`; logits [b, V], or [b, C] of the candidates `ids` [b, C]."""
        shaping = [self._last_row(r) for r in rows]
        plain = [self._lives[r].rule in OWN_NOISE for r in rows]
        picked: list[int] = [0] * len(rows)
        for own in (shaping[i] for i, own_noise in enumerate(plain) if not own_noise):
            own.position -= step  # the round's first: see noise.draft_purpose
        for purpose, wanted in ((noise.TARGET, True), (noise.draft_purpose(step), False)):
            part = [i for i, own_noise in enumerate(plain) if own_noise is wanted]
            if not part:
                continue
            whole = len(part) == len(rows)
            drawn = choose_candidates(
                logits if whole else logits[part],
                ids if whole or ids is None else ids[part],
                [shaping[i] for i in part],
                purpose,
                None if wanted else self._vocab_size,
            )
            for j, i in enumerate(part):
                row = rows[i]
                picked[i] = drawn.tokens[j]
                if row in self._ended:
                    continue
                self._tokens[row].append(drawn.tokens[j])
                self._confidence[row].append(drawn.confidence[j])
                distribution = self._q[row]
                if distribution is not None:
                    distribution.append(drawn.q[j])
        return picked

    def _last_row(self, row: int) -> LogitRow:
        """What shapes the logits of the next draft token. A constraint that fails stops its own row, not the round."""
        request = self._lives[row]
        if row not in self._ended:
            try:
                return logit_rows(request, self._tokens[row])[-1]
            except ConstraintFailed:
                self._ended.add(row)
        s = request.sequence
        return LogitRow(s.params, s.seed, len(s.tokens) + len(self._tokens[row]), request.counts)

    def rules(self, rows: Seq[int]) -> list[Rule] | None:
        shaping = [self._last_row(r) for r in rows]
        other = any(self._lives[r].rule not in OWN_NOISE for r in rows)
        if other or self._ended or any(map(is_edited, shaping)):
            return None
        return [rule_of(row) for row in shaping]

    def take(self, row: int, tokens: list[int], confidence: list[float]) -> None:
        self._tokens[row] += tokens
        self._confidence[row] += confidence

    def stop(self, row: int) -> Stop:
        stop, picked = self._stops[row], len(self._tokens[row])
        if not picked:
            return stop
        chance = tuple([self._alive[row] * chance for chance in stop.chance[picked:]])
        most = stop.most - picked if chance or not stop.chance else min(stop.most - picked, 1)
        return stop._replace(most=most, chance=chance)

    def go_on(self, rows: Seq[int], step: int) -> list[int]:
        call = max([self._stops[row].step for row in rows], default=0.0)
        on = should_continue([self._gain(row, step) for row in rows], call)
        return [row for row, more in zip(rows, on, strict=True) if more]

    def _gain(self, row: int, step: int) -> float:
        """Tokens that another one gains after that of `step`, net of its price."""
        most, chance, worth, price, _ = self._stops[row]
        if row in self._ended or step + 1 >= most:
            return -math.inf
        if not chance:
            return math.inf
        self._alive[row] *= worth_of(worth, self._confidence[row][step])
        return self._alive[row] * chance[step] - price if step < len(chance) else -math.inf

    def draft(self, drafter: str) -> Draft:
        reasons = [None if tokens else "no proposal" for tokens in self._tokens]
        return Draft(self._tokens, self._confidence, self._q, list(reasons), [drafter] * len(self._lives))
