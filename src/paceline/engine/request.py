"""What the engine keeps for one text while it is written, beside the shared `Sequence`."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

from paceline.core import Completion, FinishReason, Sequence, Stats, TokenLogprob, VerifyRule
from paceline.engine.pooling import Pool
from paceline.sampling.repeats import Breakers
from paceline.sampling.shape import Banned, Counts
from paceline.text.stream import TextStream

Origin = Literal["draft", "target"]


@dataclass(slots=True, eq=False)
class RequestState:
    sequence: Sequence
    request_id: str
    index: int  # which of the request's n texts
    rule: VerifyRule
    drafter: str  # what is asked for this text: a network drafter, "ngram", both joined by "+", or "none"
    counts: Counts
    stream: TextStream | None
    stop_ids: frozenset[int]  # tokens that end the text
    stats: Stats = field(default_factory=Stats)
    submitted: float = field(default_factory=time.perf_counter)
    admitted: float = 0.0
    parked: dict[str, str] = field(default_factory=dict)  # drafters that are not asked any more, and why
    breakers: Breakers = ()  # of DRY, in tokens
    banned: Banned | None = None
    mu: float | None = None  # the threshold of Mirostat after the text; None = as at its beginning
    pool: Pool | None = None  # what its embedding is made of, where that is asked for and no text
    text: str = ""
    origins: list[Origin] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    network: str | None = field(init=False)  # of `drafter`, what is not n-gram lookup, if one is asked for
    copies: bool = field(init=False)  # whether n-gram lookup is asked for

    def __post_init__(self) -> None:
        names = self.drafter.split("+")
        self.network = None if names[0] in ("none", "ngram") else names[0]
        self.copies = "ngram" in names

    def room(self, max_len: int) -> int:
        """How many tokens may still be emitted."""
        s = self.sequence
        return min(s.params.max_tokens - s.output_len, max_len - len(s.tokens))

    def record(self, drafted: Seq[int], accepted: int, reason: str | None, drafter: str) -> None:
        """Count one step that emitted for this text; `drafted`: the positions of the tokens in the draft, from 1."""
        stats = self.stats
        stats.steps += 1
        if not drafted:
            reason = reason or "no proposal"
            stats.reasons[reason] = stats.reasons.get(reason, 0) + 1
            return
        stats.drafted += len(drafted)
        stats.accepted += accepted
        stats.drafters[drafter] = stats.drafters.get(drafter, 0) + 1
        _count(stats.drafted_by_position, drafted)
        _count(stats.accepted_by_position, range(1, accepted + 1))

    def completion(self, finish_reason: FinishReason, error: str | None = None) -> Completion:
        s = self.sequence
        return Completion(
            request=self.request_id,
            index=self.index,
            text=self.text,
            token_ids=s.tokens[s.prompt_len :],
            prompt_token_ids=s.tokens[: s.prompt_len],
            finish_reason=finish_reason,
            stats=self.stats,
            seed=s.seed,
            origins=self.origins,
            logprobs=self.logprobs if s.params.logprobs is not None else None,
            error=error,
            embedding=self.pool.vector() if self.pool is not None and finish_reason == "stop" else None,
        )


def _count(counts: list[int], positions: Seq[int]) -> None:
    """Count each of some positions, from 1, once; `counts` grows with them."""
    deepest = max(positions, default=0)
    if deepest > len(counts):
        counts += [0] * (deepest - len(counts))
    for position in positions:
        counts[position - 1] += 1
