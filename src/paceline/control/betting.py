"""Drafts that the estimates do not promise to pay: bets, of which the loss is bounded and the gain is the point.

An estimate that says no is never refuted by plain steps: an acceptance that was assumed, a text unlike those before it, a
price that was measured beside other work. So now and then a row drafts what would be right if its own text were easy.
What a bet loses against plain steps comes out of a purse, and what it gains goes back into it.
"""

from __future__ import annotations

from dataclasses import dataclass

STAKE = 0.6  # seconds that the bets of a new engine may lose, 1% of a minute,
STAKE_STEPS = 16.0  # and so many plain steps at most
SHARE = 0.004  # of the time since, that bets may lose
SAVED = 2.0  # bets that the purse saves up for at most
LOOK = (
    256  # plain steps after which a network that nobody asks is asked again, whatever it is thought to cost
)
FIRST_LOOK = 8  # the same for one that was never asked: its price was measured without a text
SHORTEST = 2  # tokens of a bet at least: confidence may end it after one


@dataclass(slots=True)
class Purse:
    left: float  # seconds
    most: float

    @classmethod
    def of(cls, step: float) -> Purse:
        """Of an engine whose plain step takes so many seconds."""
        stake = min(STAKE, STAKE_STEPS * step)
        return cls(stake, stake)

    def affords(self, price: float) -> bool:
        """Whether a bet may be made that loses `price` seconds at worst; if not, it is saved for."""
        if self.left >= price:
            return True
        self.most = max(SAVED * price, self.left)
        return False

    def settle(self, lost: float) -> None:
        """A bet was made: what it lost, in seconds; below 0 it gained."""
        self.left = min(self.left - lost, self.most)

    def earn(self, spent: float) -> None:
        """Time has passed."""
        if self.left < self.most:
            self.left = min(self.left + SHARE * spent, self.most)
