"""What drafts brought for one text: it is written without them, then with them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.core import SamplingParams, Stats
    from paceline.llm import LLM

WARM = 16  # tokens written first: the first ones on a machine are slower, with drafts and without
LITTLE = 1.05  # times as fast: below it nothing is claimed


@dataclass(frozen=True, slots=True)
class Written:
    """A text's tokens and what they took."""

    tokens: list[int]
    stats: Stats

    @property
    def seconds(self) -> float:
        """Behind the first token: the prompt of the second text is known from the first."""
        return max(self.stats.seconds - self.stats.first_token_seconds, 1e-9)


def seeded(params: SamplingParams) -> SamplingParams:
    """With a seed, so that two texts are drawn alike."""
    return params if params.seed is not None else replace(params, seed=0)


def plainly(llm: LLM, ids: list[int], params: SamplingParams) -> Written:
    """The text without drafts, after a few tokens with them to warm up."""
    llm.generate([ids], replace(params, max_tokens=min(WARM, params.max_tokens)))
    (done,) = llm.generate([ids], replace(params, draft_tokens=0))
    return Written(list(done.token_ids), done.stats)


def compared(plain: Written, drafted: Written) -> str:
    """Both times and what they say, in two sentences. `drafted`: the text that was shown."""
    count = len(drafted.tokens)
    if plain.tokens != drafted.tokens:
        return "The text without drafts is another one: `paceline check` says whether drafts or the machine did that."
    times = plain.seconds / drafted.seconds
    brought = f"with them {drafted.seconds:.2f} s"
    if times >= LITTLE:
        return (
            f"Without drafts these {count} tokens took {plain.seconds:.2f} s, {brought}: {times:.1f} times as fast, "
            "and every token is the same."
        )
    return (
        f"Without drafts these {count} tokens took {plain.seconds:.2f} s, {brought}: drafts do not pay for this text on "
        "this machine. Every token is the same."
    )
