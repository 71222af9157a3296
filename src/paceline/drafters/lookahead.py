"""Lookahead without a network: what the target said itself, also behind drafts that it refused, is guessed again.

Each verified row says what the target writes after some tokens, whether they became text or not. These n-grams make the
pool of a text, and the longest that ends a draft says how it goes on. Where none does, the target's tokens of the last
round are drafted for their places, which is an iteration of Jacobi's; at the beginning, the last token over and over.
So there is always a guess to improve. Lookahead decoding, arXiv 2402.02057; Jacobi decoding, arXiv 2305.10427.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from paceline.core import MAX_DRAFT_TOKENS, Draft, Sequence
from paceline.drafters.base import DraftContext, Drafter, Seen

LONGEST = 4  # tokens of an n-gram before the one that it says
MOST = 2**16  # n-grams of a text, the latest ones
TRAJECTORY, NOTHING = LONGEST + 1, 0  # sources of a guess, beside an n-gram of 1 to LONGEST
PRIOR = (0.05, 0.25, 0.5, 0.65, 0.75, 0.3)  # chance that a guess is right, by its source,
WEIGHT = 4.0  # as if seen in so many


@dataclass(slots=True)
class _Text:
    pool: dict[tuple[int, ...], int] = field(default_factory=dict)
    read: int = 0  # tokens of the text that are in it
    at: int = 0  # the place of the first token of the last round,
    trajectory: Seq[int] = ()  # and what the target said there and after
    sources: list[int] = field(default_factory=list)  # of the last draft,
    drafted: tuple[int, ...] = ()  # which is this
    hits: list[float] = field(default_factory=lambda: [WEIGHT * chance for chance in PRIOR])
    tries: list[float] = field(default_factory=lambda: [WEIGHT] * len(PRIOR))

    def rate(self, source: int) -> float:
        """The share of guesses of a source that were right in this text, those before them being right."""
        return self.hits[source] / self.tries[source]

    def remember(self, before: Seq[int], token: int) -> None:
        """The target said `token` after the tokens `before`."""
        for n in range(1, min(len(before), LONGEST) + 1):
            key = tuple(before[-n:])
            self.pool.pop(key, None)  # the latest are last
            self.pool[key] = token
        while len(self.pool) > MOST:
            del self.pool[next(iter(self.pool))]

    def guess(self, before: Seq[int], at: int) -> tuple[int, int]:
        """(token at a place, its source), the most promising one."""
        best = before[-1], NOTHING
        if 0 <= at - self.at < len(self.trajectory):
            best = self.trajectory[at - self.at], TRAJECTORY
        for n in range(min(len(before), LONGEST), 0, -1):
            continuation = self.pool.get(tuple(before[-n:]))
            if continuation is not None:
                return (continuation, n) if self.rate(n) >= self.rate(best[1]) else best
        return best


class LookaheadDrafter(Drafter):
    """What it knows of a text is of that text alone."""

    name = "lookahead"
    max_tokens = MAX_DRAFT_TOKENS
    needs_hidden = False
    observes = True

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}

    def draft(self, context: DraftContext) -> Draft:
        out = Draft.empty(len(context.sequences), "no proposal")
        for row, (sequence, limit) in enumerate(zip(context.sequences, context.limits, strict=True)):
            if limit > 0:
                out.tokens[row], out.confidence[row] = self._guess(sequence, limit)
                out.drafter[row], out.reasons[row] = self.name, None
        return out

    def _guess(self, sequence: Sequence, limit: int) -> tuple[list[int], list[float]]:
        text, tokens = self._texts.setdefault(sequence.id, _Text()), sequence.tokens
        for end in range(max(text.read, sequence.prompt_len), len(tokens)):
            text.remember(tokens[max(end - LONGEST, 0) : end], tokens[end])
        text.read, text.sources = len(tokens), []
        line = list(tokens[-LONGEST:])
        begin = len(line)
        for at in range(len(tokens), len(tokens) + limit):
            token, source = text.guess(line, at)
            line.append(token)
            text.sources.append(source)
        text.drafted = tuple(line[begin:])
        return line[begin:], [text.rate(source) for source in text.sources]

    def on_verify(self, seen: list[Seen]) -> None:
        for item in seen:
            text = self._texts.setdefault(item.sequence.id, _Text())
            line = [*item.sequence.tokens[max(item.first - LONGEST, 0) : item.first], *item.drafted]
            begin = len(line) - len(item.drafted)
            for j, token in enumerate(item.chosen):
                text.remember(line[max(begin + j - LONGEST, 0) : begin + j], token)
            text.at, text.trajectory = item.first, item.chosen
            if item.drafted != text.drafted[: len(item.drafted)]:
                continue  # another's draft
            for source, guess, token in zip(text.sources, item.drafted, item.chosen, strict=False):
                text.tries[source] += 1
                text.hits[source] += guess == token
                if guess != token:
                    break

    def forget(self, sequence_id: int) -> None:
        self._texts.pop(sequence_id, None)
