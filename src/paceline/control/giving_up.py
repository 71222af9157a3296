"""When a text goes on without its network. As long as that may draft, states are handed over, which takes up to a
tenth of a plain step.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.control.acceptance import PairPrior

# A drafter that keeps less than this share of what would pay is given up, but for one text of so many that shows
# whether it still keeps so little
HOPELESS, STAYS = 0.5, 16
# A text alone that drafted in less than one of RARELY steps goes on without its network after LONG plain ones. After
# IN_A_ROW such texts only one of RETRIES has it at all
LONG, RARELY, IN_A_ROW, RETRIES = 64, 10, 3, 4
FREE = 4  # probes that such a text begins with


@dataclass(slots=True)
class Use:
    """What one text has of its network."""

    stays: bool = False  # it is not given up for what it keeps in others
    plain: int = 0  # steps alone in which nobody drafted,
    used: int = 0  # and in which the network did
    free: int = 0  # probes that no budget need pay for

    def refused(self, prior: PairPrior, hopeless: bool) -> bool:
        """Whether a new text goes without it, since others had nothing of it."""
        few = STAYS if hopeless else RETRIES if prior.unused >= IN_A_ROW else 0
        if not few:
            return False
        prior.refused += 1
        self.stays = prior.refused % few == 0
        self.free = FREE if self.stays else 0
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
