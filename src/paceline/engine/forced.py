"""Synthetic acceptance: how much of a draft is kept is drawn from given chances, whatever the models say.

For benchmarks on random weights, where no drafter would ever be right. The forward passes and the cache traffic are
those of a real step; the text is not the target's. Nothing that serves requests may set it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from paceline.core import MAX_DRAFT_TOKENS, Verdict
from paceline.errors import UsageError
from paceline.sampling.verify import uniforms


@dataclass(frozen=True, slots=True)
class ForcedAcceptance:
    """chances[j]: the chance that draft position j is kept, given that those before it are. Past the end: never."""

    chances: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raise UsageError for chances that no drafter could have."""
        if not 1 <= len(self.chances) <= MAX_DRAFT_TOKENS:
            raise UsageError(
                f"synthetic acceptance has {len(self.chances)} chances: give 1 to {MAX_DRAFT_TOKENS}"
            )
        for chance in self.chances:
            if not (math.isfinite(chance) and 0 <= chance <= 1):
                raise UsageError(f"synthetic acceptance has the chance {chance}: give values from 0 to 1")
        for before, after in zip(self.chances, self.chances[1:], strict=False):
            if after > before:
                raise UsageError(
                    f"synthetic acceptance rises from {before} to {after}: give chances that stay equal or fall"
                )

    @classmethod
    def parse(cls, text: str) -> ForcedAcceptance:
        """From `0.85,0.60,0.40`. Raises UsageError."""
        try:
            return cls(tuple(float(part) for part in text.split(",")))
        except ValueError:
            raise UsageError(
                f"synthetic acceptance {text!r} is no list of numbers: write for instance 0.85,0.60,0.40"
            ) from None

    def verdict(self, tokens: Seq[int], seed: int, position: int) -> Verdict:
        """`tokens` [k + 1]: the target's choices; `position`: where the first draft token stands."""
        drafted = min(len(tokens) - 1, len(self.chances))
        draws = uniforms(seed, position, drafted).accept
        accepted = 0
        while accepted < drafted and draws[accepted] < self.chances[accepted]:
            accepted += 1
        return Verdict(accepted, tokens[accepted])
