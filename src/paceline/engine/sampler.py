"""Draws draft tokens from a drafter's scores, as each row's request samples.

Under `match` a draft token is drawn with the very noise that the target will use at its position: equal distributions
give equal tokens (arXiv 2408.07978). Under `reject` and `block` it must be drawn with noise of its own, and comes with
the distribution that it was drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from paceline.core import OWN_NOISE
from paceline.engine.request import RequestState
from paceline.engine.shaping import ConstraintFailed, logit_rows
from paceline.ops.base import Rule
from paceline.sampling import noise
from paceline.sampling.choose import Proposal, choose_candidates, rule_of
from paceline.sampling.shape import LogitRow, is_edited, is_truncated


class DraftSampler:
    """Of one draft round. Rows count from 0 in the order of `requests`."""

    def __init__(self, requests: list[RequestState], vocab_size: int) -> None:
        self.requests, self._vocab_size = requests, vocab_size
        self.ended: set[int] = set()  # rows whose constraint failed: nothing is drafted for them any more

    def draw(
        self,
        rows: Seq[int],
        shaping: list[LogitRow],
        step: int,
        logits: torch.Tensor,
        ids: torch.Tensor | None,
    ) -> Proposal:
        """A token from each row of logits, with the noise that the rule of its row of the round allows."""
        plain = [self.requests[r].rule in OWN_NOISE for r in rows]
        if all(plain):
            return choose_candidates(logits, ids, shaping, noise.TARGET)
        out = Proposal([0] * len(rows), [0.0] * len(rows), [None] * len(rows))
        for wanted in (True, False):
            part = [i for i, own_noise in enumerate(plain) if own_noise is wanted]
            if not part:
                continue
            if not wanted:  # the round's first position: see noise.draft_purpose
                for i in part:
                    shaping[i] = replace(shaping[i], position=len(self.requests[rows[i]].sequence.tokens))
            drawn = choose_candidates(
                logits[part],
                None if ids is None else ids[part],
                [shaping[i] for i in part],
                noise.TARGET if wanted else noise.draft_purpose(step),
                None if wanted else self._vocab_size,
            )
            for i, token, confidence, q in zip(part, drawn.tokens, drawn.confidence, drawn.q, strict=True):
                out.tokens[i], out.confidence[i], out.q[i] = token, confidence, q
        return out

    def row_after(self, row: int, tokens: list[int]) -> LogitRow:
        """What shapes the logits after the draft `tokens`. A constraint that fails ends its own row, not the round."""
        request = self.requests[row]
        if row not in self.ended:
            try:
                return logit_rows(request, tokens)[-1]
            except ConstraintFailed:
                self.ended.add(row)
        s = request.sequence
        return LogitRow(s.params, s.seed, len(s.tokens) + len(tokens), request.counts)

    def rules(self, rows: Seq[int], drafted: Seq[list[int]]) -> list[Rule] | None:
        """As `Picker.rules`, after the draft tokens `drafted` [rows]."""
        shaping = [self.row_after(row, tokens) for row, tokens in zip(rows, drafted, strict=True)]
        other = any(self.requests[row].rule not in OWN_NOISE for row in rows)
        if other or self.ended or any(is_edited(row) or is_truncated(row) for row in shaping):
            return None
        return [rule_of(row) for row in shaping]
