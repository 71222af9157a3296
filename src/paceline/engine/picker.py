"""Draws the tokens of a draft for the drafters that score tokens, as each row's request samples.

Under `match` a draft token is drawn with the very noise that the target will use at its position, so that equal laws
give equal tokens (arXiv 2408.07978). Under `reject` and `block` it must be drawn with noise of its own, and the law
it was drawn from goes with it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from paceline.core import Draft
from paceline.engine.budget import Controller
from paceline.engine.live import Live
from paceline.ops.base import Rule
from paceline.sampling import noise
from paceline.sampling.choose import choose_candidates, rule_of
from paceline.sampling.shape import LogitRow, is_edited


def logit_rows(live: Live, draft: list[int], *, masks: bool = True) -> list[LogitRow]:
    """What shapes the logits after the text, after its first draft token, ..., after all of `draft`."""
    s = live.sequence
    if not draft and s.constraint is None and not s.params.min_tokens:
        return [LogitRow(s.params, s.seed, len(s.tokens), live.counts)]
    known = s.constraint.masks(draft) if s.constraint is not None and masks else None
    stop = tuple(live.stop_ids) if s.output_len < s.params.min_tokens else ()
    return [
        LogitRow(
            params=s.params,
            seed=s.seed,
            position=len(s.tokens) + j,
            history=live.counts if j == 0 else live.counts.with_draft(draft[:j]),
            mask=known[j] if known is not None else None,
            stop_ids=stop if s.output_len + j < s.params.min_tokens else (),
        )
        for j in range(len(draft) + 1)
    ]


class StepPicker:
    """Picks for one draft round. Rows count from 0 in the order of `lives`."""

    def __init__(self, lives: list[Live], controller: Controller, vocab_size: int) -> None:
        self._lives, self._controller, self._vocab_size = lives, controller, vocab_size
        self._tokens: list[list[int]] = [[] for _ in lives]
        self._confidence: list[list[float]] = [[] for _ in lives]
        self._q: list[list[torch.Tensor | None] | None] = [
            None if live.rule == "match" else [] for live in lives
        ]

    def pick(
        self, rows: Seq[int], step: int, logits: torch.Tensor, ids: torch.Tensor | None = None
    ) -> list[int]:
        """Tokens for `rows` at draft position `step`; logits [b, V], or [b, C] of the candidates `ids` [b, C]."""
        shaping = [logit_rows(self._lives[r], self._tokens[r])[-1] for r in rows]
        plain = [self._lives[r].rule == "match" for r in rows]
        picked: list[int] = [0] * len(rows)
        for own in (shaping[i] for i, match in enumerate(plain) if not match):
            own.position -= step  # the round's first: see noise.draft_purpose
        for purpose, wanted in ((noise.TARGET, True), (noise.draft_purpose(step), False)):
            part = [i for i, match in enumerate(plain) if match is wanted]
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
                self._tokens[row].append(drawn.tokens[j])
                self._confidence[row].append(drawn.confidence[j])
                law = self._q[row]
                if law is not None:
                    law.append(drawn.q[j])
        return picked

    def rules(self, rows: Seq[int]) -> list[Rule] | None:
        shaping = [logit_rows(self._lives[r], [])[0] for r in rows]
        if any(self._lives[r].rule != "match" for r in rows) or any(is_edited(row) for row in shaping):
            return None
        return [rule_of(row) for row in shaping]

    def take(self, row: int, tokens: list[int], confidence: list[float]) -> None:
        for step, (token, sure) in enumerate(zip(tokens, confidence, strict=True)):
            if token < 0:
                return
            self._tokens[row].append(token)
            self._confidence[row].append(sure)
            if not self.go_on(row, step):
                return

    def go_on(self, row: int, step: int) -> bool:
        return self._controller.go_on(self._lives[row].sequence.id, step, self._confidence[row][step])

    def draft(self, drafter: str) -> Draft:
        reasons = [None if tokens else "no proposal" for tokens in self._tokens]
        return Draft(self._tokens, self._confidence, self._q, list(reasons), [drafter] * len(self._lives))
