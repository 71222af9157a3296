"""Log probabilities of given text, by making the engine write it: each next token is the only one allowed.

No second way through the model is needed, and with the text as the n-gram drafter's reference many tokens are
scored per step. The raw log probabilities do not know of the constraint.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial

import numpy as np

from paceline.core import MAX_DRAFT_TOKENS, SamplingParams
from paceline.server.service import Room


class Forced:
    """A constraint that allows one given token after the other."""

    def __init__(self, tokens: Seq[int], vocab_size: int) -> None:
        self._tokens, self._at, self._vocab_size = tokens, 0, vocab_size

    def masks(self, draft: Seq[int]) -> list[np.ndarray | None]:
        out: list[np.ndarray | None] = []
        for j in range(self._at, self._at + len(draft) + 1):
            mask = np.zeros(self._vocab_size, dtype=bool)
            mask[self._tokens[min(j, len(self._tokens) - 1)]] = True
            out.append(mask)
        return out

    def commit(self, tokens: Seq[int]) -> None:
        self._at += len(tokens)


def scoring_jobs(
    prompts: list[list[int]], logprobs: int, room: Room
) -> tuple[list[tuple[list[int], SamplingParams]], list[int]]:
    """One job per prompt of two tokens or more, and which prompt each belongs to."""
    jobs, owners = [], []
    for i, prompt in enumerate(prompts):
        rest = tuple(prompt[1:])
        if not rest:
            continue
        fast = {"drafter": "ngram", "draft_tokens": MAX_DRAFT_TOKENS} if "ngram" in room.drafters else {}
        params = SamplingParams(
            max_tokens=len(rest),
            ignore_eos=True,
            logprobs=logprobs,
            reference=tuple(prompt),
            constraint=partial(Forced, rest, room.vocab_size),
            **fast,  # type: ignore[arg-type]
        )
        jobs.append((prompt[:1], params))
        owners.append(i)
    return jobs, owners
