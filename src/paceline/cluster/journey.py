"""One request's texts on their way over replicas: what was said, how another replica goes on, whether it agrees.

A text is a function of (prompt, parameters, seed). So a replica that is lost can be followed by another one of the same
kind. That one begins a few tokens before the end. What it says again must be what was said, or the request fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from paceline.core import Delta, SamplingParams, Stats
from paceline.errors import RequestFailed
from paceline.text.stream import TextStream
from paceline.text.tokenizer import Tokenizer

AGAIN = 4  # tokens that are said again, to be compared


@dataclass(slots=True)
class _Text:
    tokens: list[int] = field(default_factory=list)  # that were passed on
    text: str = ""
    due: list[int] = field(default_factory=list)  # of them: what has to be said again
    owed: str = ""
    steps: list[Delta] = field(default_factory=list)  # of the replica that is at work, without their tokens
    before: Stats = field(default_factory=Stats)  # what lost replicas did


class Journey:
    def __init__(self, params: SamplingParams, tokenizer: Tokenizer) -> None:
        """`params` with its seed: without one the texts could not be written again."""
        assert params.seed is not None
        self._params, self._tokenizer = params, tokenizer
        self._texts = {index: _Text() for index in range(params.n)}  # without those that have ended
        self._kind: str | None = None  # of the replicas that wrote them

    @property
    def begun(self) -> bool:
        """Whether something was passed on."""
        return len(self._texts) < self._params.n or any(text.tokens for text in self._texts.values())

    @property
    def ended(self) -> bool:
        return not self._texts

    def meet(self, kind: str) -> None:
        """A replica of `kind` has taken the request."""
        self._kind = self._kind if self.begun else kind

    def take(self, delta: Delta) -> Delta | None:
        """What of a replica's delta is to be passed on. Raises RequestFailed if it contradicts what was."""
        text = self._texts[delta.index]
        text.steps.append(delta)
        again, shown = min(len(text.due), len(delta.token_ids)), min(len(text.owed), len(delta.text))
        same = delta.token_ids[:again] == text.due[:again] and delta.text[:shown] == text.owed[:shown]
        ends = delta.finish_reason in ("stop", "length")
        if not same or (ends and (again < len(text.due) or shown < len(text.owed))):
            raise RequestFailed(
                "the replica that wrote this text was lost, and another one goes on otherwise: ask again"
            )
        text.due, text.owed = text.due[again:], text.owed[shown:]
        if again or shown:
            delta = replace(
                delta, text=delta.text[shown:], token_ids=delta.token_ids[again:], origins=delta.origins[again:],
                proposed=[], logprobs=delta.logprobs[again:],
            )  # fmt: skip
        text.tokens += delta.token_ids
        text.text += delta.text
        if delta.finish_reason is None:
            return delta if delta.token_ids or delta.text or not again else None
        del self._texts[delta.index]
        if delta.stats is not None:
            delta = replace(delta, stats=_together(text.before, delta.stats))
        return delta

    def move(self) -> tuple[Mapping[int, list[int]] | None, str | None]:
        """After losing a replica: tokens to resend and the kind required; None means start over anywhere."""
        if not self.begun:
            return None, None
        return {index: self._again(text) for index, text in self._texts.items()}, self._kind

    def _again(self, text: _Text) -> list[int]:
        written = text.tokens[: max(0, len(text.tokens) - AGAIN)]
        shown = TextStream(self._tokenizer, self._params).push(written).text
        text.due, text.owed = text.tokens[len(written) :], text.text[len(shown) :]
        lost = text.before
        for step in text.steps:
            lost.steps += 1
            lost.drafted += len(step.proposed)
            lost.accepted += step.origins.count("draft")
        lost.emitted, text.steps = len(written), []
        return written


def _together(before: Stats, last: Stats) -> Stats:
    """What all replicas did for a text. By position, reason and drafter only the last one is known."""
    return replace(
        last, steps=before.steps + last.steps, drafted=before.drafted + last.drafted,
        accepted=before.accepted + last.accepted, emitted=before.emitted + last.emitted,
    )  # fmt: skip
