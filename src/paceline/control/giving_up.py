"""When a text goes on without a network that is handed hidden states in every step, which takes up to a tenth of a
plain one. A draft model costs nothing while it is not asked, so it is never given up.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.control.acceptance import PairPrior

HOPELESS = 0.5  # a drafter that keeps less than this share of what would pay is given up
# A text alone that drafted in less than one of RARELY steps goes on without its network after LONG plain ones, and
# IN_A_ROW such texts are enough for those that follow
LONG, RARELY, IN_A_ROW = 64, 10, 3
STAYS, SHOWS = 8, 4  # one text of so many has its network all the same, for so many bets whatever they cost


@dataclass(slots=True)
class Use:
    """What one text has of its network."""

    stays: bool = False  # it is not given up for what it keeps in others
    plain: int = 0  # steps alone in which nobody drafted,
    used: int = 0  # and in which the network did

    @property
    def shows(self) -> bool:
        """Whether it has its network although others had nothing of it, and has hardly asked it yet."""
        return self.stays and self.used < SHOWS

    def refused(self, prior: PairPrior, hopeless: bool) -> bool:
        """Whether a new text goes without it, since others had nothing of it."""
        if not hopeless and prior.unused < IN_A_ROW:
            return False
        prior.refused += 1
        self.stays = prior.refused % STAYS == 0
        return not self.stays

    def over(self, prior: PairPrior, hopeless: bool) -> bool:
        """Whether a text that drafts nothing in this step never will."""
        if self.plain >= LONG and self.used * RARELY < self.plain:
            prior.unused += 1
            return True
        return hopeless and not self.stays

    def drafted(self, prior: PairPrior, *, alone: bool) -> None:
        """The network did in this step."""
        self.used += alone
        if self.used * RARELY >= self.plain + LONG:
            prior.unused = 0
