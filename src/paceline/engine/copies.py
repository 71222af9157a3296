"""What copies are worth: proposals that cost nothing to make are judged when they are seen. Pure, as budget.py.

Only for proposals that are a function of the text so far (n-gram), or the choice would look at what it decides.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.core import Draft
from paceline.engine import acceptance as acc
from paceline.engine.acceptance import Arm, Firsts, Kind
from paceline.engine.budget import NO_CONFIDENCE, NO_PROPOSAL, Budget, arm_of, lines_of
from paceline.engine.costs import Costs
from paceline.ops.extension import extension

# Texts that are watched in every step while they rest: more, in which copies often bring less than they take, in some.
FEW_TEXTS = 3
LOST = 0.3  # chance of a first copy below which sampled text is not searched at once,
KEPT = 0.8  # and from which on any text that was given something is, however many there are
NONE: Firsts = (0.0, 0.0)
HOPELESS = 0.03  # survival below which nothing more is worth a look
Found = tuple[list[int], list[float]]  # tokens to copy, and the confidence of each


class Law(NamedTuple):
    """What a copy's confidence is worth to texts like one, see `Kind.law`."""

    lines: tuple[acc.Line, ...]
    special: bool  # more is known of such texts than that they copy, or that they are sampled
    bins: Mapping[str, acc.Bins]  # that this follows from

    @classmethod
    def of(cls, budget: Budget, kind: Kind, arm: Arm) -> Law:
        return cls(lines_of(budget, kind, arm), arm.law != kind.law(arm.sampled), budget.bins)


@dataclass(frozen=True, slots=True)
class Look:
    """What a step pays for tokens that are looked up: their number is decided when they are seen."""

    kind: str
    costs: Costs
    rows: int  # target rows of the step without any draft
    texts: int
    rate: float  # tokens per second without them
    slope: float = 0.0  # seconds that each takes beside its row,
    base: float = 0.0  # and that a step with some of them takes, whoever has one
    prices: list[float] = field(default_factory=list)  # of 1, 2, ... tokens, as far as anybody asked
    laws: dict[str, Law] = field(default_factory=dict)  # as they were last asked for
    # what proposals are worth, see `worth`, by identity of the arm
    worths: dict[int, tuple[Arm, list[float]]] = field(default_factory=dict)

    def upto(self, tokens: int) -> list[float]:
        """Seconds of 1, 2, ... up to so many for a text, at the price of all texts doing the same."""
        if (first := len(self.prices) + 1) <= tokens:
            without = self.costs.target(self.rows)
            steps = self.costs.targets(self.rows + first * self.texts, self.kind, more=self.texts)
            for more, seconds in zip(range(first, tokens + 1), steps, strict=False):
                self.prices.append((seconds - without) / self.texts + self.slope * more)
        return self.prices


def look(budget: Budget, kind: str, rows: int, texts: int, rate: float) -> Look:
    """What tokens that a kind looks up cost beside so many rows, where a step without them writes at such a rate."""
    base, step, slope = budget.costs.drafting(kind)
    return Look(kind, budget.costs, rows, texts, rate, slope, base + step + budget.care)


class Offer(NamedTuple):
    """A proposal made at one go, as far as it is worth checking."""

    tokens: int = 0
    gain: float = 0.0  # tokens, net of what checking it takes where all texts check as many
    kept: float = 0.0  # tokens


NOTHING = Offer()


def offer(budget: Budget, kind: Kind, arm: Arm, look: Look, confidence: list[float]) -> Offer:
    """What a proposal is worth beside the rows of others, see `together`.

    What its confidence is worth to texts like this one, by the odds that its own copies had over what theirs promised.
    Whether its first one is kept at all was told by the first ones of others: a text may go on as what it was given, or
    not, and copies look the same. It starts with four tokens, or as many as there are where the first ones of nearly all
    texts like it are kept, and each later copy that is kept lets the next be four longer.
    """
    return _offers(budget, kind, arm, look, [confidence])[0]


def _offers(budget: Budget, kind: Kind, arm: Arm, look: Look, proposals: Seq[list[float]]) -> list[Offer]:
    law = look.laws.get(arm.law)
    if law is None or law.bins is not budget.bins:
        law = look.laws[arm.law] = Law.of(budget, kind, arm)
    firsts = NONE if arm.copied else budget.firsts.get(arm.law, NONE)
    if arm.copied or not law.special or acc.first_kept(firsts, 0.5) < KEPT:
        most = 4 + 4 * int(arm.hits[0])
        proposals = [confidence[:most] for confidence in proposals]
    prices, paid = look.upto(max(map(len, proposals))), look.rate
    if (native := extension("offers")) is not None:
        first = (0.0 if arm.copied else acc.FIRST_WEIGHT, *firsts)
        found = native.offers(
            proposals, law.lines, first, (arm.hits, arm.tries, arm.promised, arm.weight), prices, paid
        )
        return [Offer(*one) for one in found]
    return [judged(confidence, law.lines, firsts, arm, prices, paid) for confidence in proposals]


def judged(
    confidence: list[float], lines: Seq[acc.Line], firsts: Firsts, arm: Arm, prices: Seq[float], paid: float
) -> Offer:
    """As much of a proposal as gains most. `prices`: seconds of 1, 2, ... tokens, of which each costs `paid` tokens.
    The reference of native/experience.cpp.
    """
    best, kept, alive = Offer(), 0.0, 1.0
    for j, value in enumerate(confidence):
        chance = acc.calibrated(lines, value)
        if j == 0 and not arm.copied:
            chance = acc.first_kept(firsts, chance)
        alive *= acc.in_text(arm, j, chance)
        kept += alive
        net = kept - paid * prices[j]
        if net > best.gain:
            best = Offer(j + 1, net, kept)
        elif alive < HOPELESS:
            break
    return best


def worth(budget: Budget, kind: Kind, arm: Arm, look: Look, rungs: Seq[list[float]]) -> list[float]:
    """What a proposal gains, net of what its rows take, by how sure it may be: `rungs` of confidence, rising."""
    known = look.worths.get(id(arm))
    if known is None:
        gains = [one.gain for one in _offers(budget, kind, arm, look, rungs)]
        least = next((i for i in reversed(range(len(gains))) if gains[i] <= 0), -1)
        known = look.worths[id(arm)] = arm, [0.0] * (least + 1) + gains[least + 1 :]
    return known[1]


def needed(budget: Budget, look: Look) -> float:
    """Tokens that all copies of a step amid plain ones must gain, net of what their rows take."""
    return look.rate * (look.base + budget.wake.get(look.texts.bit_length(), 0.0))


def together(budget: Budget, look: Look, offers: Seq[Offer], *, wakes: bool) -> bool:
    """Whether the copies of a step gain more than it takes longer. `wakes`: nothing was drafted before; that costs
    something, too, of which each step with copies that follows has its share.
    """
    tokens, kept = 0, 0.0
    for one in offers:
        tokens, kept = tokens + one.tokens, kept + one.kept
    if not tokens:
        return False
    takes = look.costs.adding(look.rows, tokens, look.kind) + look.slope * tokens + look.base
    wake = budget.wake.get(look.texts.bit_length(), 0.0) if wakes else 0.0
    return kept > look.rate * (takes + wake)


def draft(kind: str, found: Seq[Found], offers: Seq[Offer]) -> Draft:
    """As much of each proposal as is worth checking."""
    cut = [
        (tokens[: one.tokens], sure[: one.tokens]) for (tokens, sure), one in zip(found, offers, strict=True)
    ]
    reasons = [
        None if worth_it else NO_CONFIDENCE if proposed else NO_PROPOSAL
        for (worth_it, _), (proposed, _) in zip(cut, found, strict=True)
    ]
    names = [kind if tokens else "none" for tokens, _ in cut]
    return Draft([tokens for tokens, _ in cut], [sure for _, sure in cut], None, reasons, names)


def is_lost(budget: Budget, arm: Arm) -> bool:
    """Whether the first copy of such a text is hardly ever kept, and this one has not come to it."""
    return not arm.copied and acc.first_kept(budget.firsts.get(arm.law), 0.5) < LOST


def loses_first(budget: Budget, sequence_id: int, names: Collection[str]) -> bool:
    """Whether none of these kinds' first copy would be kept, by what became of those of other texts."""
    return all(
        is_lost(budget, arm_of(budget, sequence_id, kind)) for kind in budget.kinds if kind.name in names
    )


def keeps_first(budget: Budget, sequence_id: int, names: Collection[str]) -> bool:
    """Whether one of these kinds' first copies are kept in nearly all such texts."""
    arms = [arm_of(budget, sequence_id, kind) for kind in budget.kinds if kind.name in names]
    return any(acc.first_kept(budget.firsts.get(arm.law), 0.5) >= KEPT for arm in arms)
