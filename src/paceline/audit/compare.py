"""Two answers side by side: where they part, and whether arithmetic alone explains it. Pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from paceline.audit.client import Answer

Kind = Literal["near-tie", "fault", "unknown"]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where two texts part. `gap`: nats of the lesser token below the best, None if unknown."""

    prompt: int
    at: int  # token, or character where there are no tokens
    first: str
    second: str
    gap: float | None
    kind: Kind


def divergence(prompt: int, one: Answer, other: Answer, near_tie: float) -> Divergence | None:
    """None if the texts are equal. A near-tie: both sides hold both tokens within `near_tie` of their best one.

    Rounding can turn a near-tie over, whatever drafts; it cannot turn over a clear choice.
    """
    if one.tokens and other.tokens:
        for i, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)):
            if a.text != b.text:
                return _parted(prompt, i, (one, other), near_tie)
        if len(one.tokens) == len(other.tokens) and one.text == other.text:
            return None
        at = min(len(one.tokens), len(other.tokens))
        return Divergence(prompt, at, _token(one, at), _token(other, at), None, "unknown")
    if one.text == other.text:
        return None
    at = next(
        (i for i, (a, b) in enumerate(zip(one.text, other.text, strict=False)) if a != b),
        min(len(one.text), len(other.text)),
    )
    return Divergence(prompt, at, one.text[at : at + 12], other.text[at : at + 12], None, "unknown")


def _token(answer: Answer, at: int) -> str:
    return answer.tokens[at].text if at < len(answer.tokens) else "(end)"


def _parted(prompt: int, at: int, pair: tuple[Answer, Answer], near_tie: float) -> Divergence:
    first, second = pair[0].tokens[at], pair[1].tokens[at]
    gaps = []
    for side in (first, second):
        if side.top:  # a token that is not among the most likely is at least as far away as the last of them
            best, last = max(side.top.values()), min(side.top.values())
            gaps.append(max(best - side.top.get(token.text, last) for token in (first, second)))
    known = [gap for gap in gaps if not math.isnan(gap)]
    gap = max(known) if known else None
    kind: Kind = "unknown" if gap is None else "near-tie" if gap <= near_tie else "fault"
    return Divergence(prompt, at, first.text, second.text, gap, kind)


def logprob_gap(one: Answer, other: Answer) -> float | None:
    """Largest difference of the emitted tokens' log probabilities, as far as the texts agree; None if not given."""
    gap: float | None = None
    for a, b in zip(one.tokens, other.tokens, strict=False):
        if a.text != b.text:
            break
        if not math.isnan(a.logprob) and not math.isnan(b.logprob):
            gap = max(gap or 0.0, abs(a.logprob - b.logprob))
    return gap


def certain(answer: Answer) -> int:
    """Tokens whose log probability is exactly 0: some engines report that for drafted tokens."""
    return sum(token.logprob == 0.0 for token in answer.tokens)
