"""How many tokens of prompts fit in a step beside texts that are being written, so that those never wait long.

A step answers nobody before its end. Of a small model 64 tokens of a prompt take some hundredths of a second, of a large
one behind a long text seconds. So their number follows what the last steps took. It is for computers of which a row's
bits depend on no other row: there it changes no token, only when it comes.
"""

from __future__ import annotations

LONGEST = 0.25  # seconds that a step with prompts beside other texts should take at most
LEAST = 8  # tokens of prompts in a step, however slow: else a prompt would never end
_FORGETS = 0.8  # of what a token took, where the next step was quicker: one slow step is no reason for long


class Pace:
    def __init__(self, longest: float = LONGEST) -> None:
        """`longest`: seconds that a step with prompts beside other texts should take at most."""
        self._longest = longest
        self._took = 0.0  # seconds of a token of a prompt, with all that a step does besides

    def rows(self, most: int) -> int:
        """How many tokens of prompts the next step may take, up to `most`."""
        if self._took * most <= self._longest:
            return most
        return min(most, max(LEAST, int(self._longest / self._took)))

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a step: tokens of prompts in it, and seconds that it took. The few at a prompt's end say nothing:
        of them the rest of the step takes most.
        """
        if rows >= LEAST:
            took = seconds / rows
            self._took = max(took, _FORGETS * self._took + (1 - _FORGETS) * took)
