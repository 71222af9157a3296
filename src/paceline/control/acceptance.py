"""How likely a drafted token is kept: by request and position, around what all requests of the pair show.

`PairPrior` is shared by the requests of one drafter with one target. It starts at what the pair is known for, and
remembers so much that a drafter which does not fit is found out once, not by every request again. An
`AcceptanceEstimator` is one request's own; both forget at a fixed rate.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from heapq import heappop, heappush
from itertools import accumulate
from operator import mul

from paceline.control.base import Line
from paceline.control.confidence import worth_of
from paceline.core import MAX_DRAFT_TOKENS
from paceline.tree import Shape

PAIR_MEMORY = 256.0  # observations of a position that all requests of a pair remember together,
REQUEST_MEMORY = 48.0  # and each request for itself
KNOWN_WEIGHT = 8.0  # observations that a pair's known acceptance counts for at first
PRIOR_WEIGHT = 8.0  # observations that the pair's prior counts for in a request
TRIES = 12  # drafts before a pair is judged
# Drafts until an alarm, and the share of the known acceptance below which it comes
ALARM_DRAFTS, ALARM_SHARE = 64, 0.4
# Drafts after which a network is told that keeps fewer tokens a step than this, if it promises so much
MISREAD_DRAFTS, MISREAD, PROMISES = 20, 1.2, 0.4
# Acceptance by position of a drafter of which nothing is known, and the share of it that text drawn at a temperature has
USUAL, SAMPLED_SHARE = (0.7, 0.7, 0.7, 0.68, 0.66), 0.8

# Of a text of which nothing is seen yet, at best, and the observations that this hope counts for
HOPE, HOPE_WEIGHT = (0.95,) * MAX_DRAFT_TOKENS, 2.0

SIBLINGS = (0.35, 0.1, 0.05)  # that the second, third, ... neighbour is right where all before it are wrong


class Counts:
    """Kept and tried tokens by draft position, of the last `memory` or so."""

    def __init__(self, memory: float) -> None:
        self._keep = 1.0 - 1.0 / memory
        self.accepted = [0.0] * MAX_DRAFT_TOKENS
        self.tried = [0.0] * MAX_DRAFT_TOKENS

    def halve(self) -> None:
        """What was seen is long ago."""
        self.accepted = [0.5 * count for count in self.accepted]
        self.tried = [0.5 * tried for tried in self.tried]

    def add(self, drafted: int, accepted: int) -> None:
        """A draft: position j was tried if all before it were kept."""
        for j in range(min(accepted + 1, drafted, MAX_DRAFT_TOKENS)):
            self.accepted[j] = self.accepted[j] * self._keep + (j < accepted)
            self.tried[j] = self.tried[j] * self._keep + 1.0


class PairPrior:
    """What requests of one drafter and one target keep on average."""

    def __init__(
        self, drafter: str, known: Seq[float] = (), *, sampled: bool = False, near: PairPrior | None = None
    ) -> None:
        """`known`: acceptance by position, given that all before were kept, where it was measured for this pair.

        `near`: the same pair's at another temperature, where it begins.
        """
        share = 1.0 if known or not sampled else SAMPLED_SHARE
        usual = known or USUAL
        self._drafter, self._known = drafter, known[0] if known else None
        self._start = [share * usual[min(j, len(usual) - 1)] for j in range(MAX_DRAFT_TOKENS)]
        self._start = self._start if near is None else list(near.accept)
        self._counts = Counts(PAIR_MEMORY)
        self.drafts = self._kept = self._tokens = 0
        self.judged = usual[0] >= PROMISES  # whether to tell it where next to nothing is kept
        self.refused = 0  # texts that were to go without the drafter
        self.unused = 0  # of the last texts, those that gave it up
        self.alarms = True  # whether `known` holds at this temperature
        self._accept: list[float] | None = list(self._start)

    def add(self, drafted: int, accepted: int) -> None:
        self._counts.add(drafted, accepted)
        self.drafts += 1
        self._kept += accepted > 0
        self._tokens += accepted
        self._accept = None

    @property
    def accept(self) -> list[float]:
        """[MAX_DRAFT_TOKENS] that a token is kept, given that those before it are."""
        if self._accept is None:
            self._accept = shrunk(self._counts, self._start, KNOWN_WEIGHT, 0.0)
        return self._accept

    def most(self) -> float:
        """The share of first tokens that is kept, with one more than was seen; 1 while too few drafts say so."""
        accepted, tried = self._counts.accepted[0], self._counts.tried[0]
        return (accepted + 1.0) / (tried + 2.0) if tried >= TRIES else 1.0

    def misread(self) -> str | None:
        """A warning, once, when the first drafts kept so little that the network may be read wrongly."""
        drafts, step = self.drafts, 1.0 + self._tokens / max(self.drafts, 1)
        if not self.judged or drafts < TRIES or (self._tokens and drafts < MISREAD_DRAFTS):
            return None
        self.judged = False
        if step >= MISREAD:
            return None
        return (
            f"drafter {self._drafter}: {drafts} drafts kept {self._tokens} tokens, {step:.2f} a step, where such "
            "drafters reach 2 and more. Likely causes: a block read by the wrong convention (sample_from_anchor), other "
            "layers than it was trained on (taps), a drafter of another target, or a target quantised otherwise. The "
            "text is still right; `--drafter ngram` goes without it"
        )

    def alarm(self) -> str | None:
        """A warning, once, when first tokens are kept far more rarely than this pair is known for."""
        if self._known is None or not self.alarms or self.drafts < ALARM_DRAFTS:
            return None
        seen = self._kept / self.drafts
        if seen >= ALARM_SHARE * self._known:
            return None
        self.alarms = False
        return (
            f"drafter {self._drafter}: only {seen:.0%} of first draft tokens were kept over {self.drafts} drafts, "
            f"this pair should reach about {self._known:.0%}. Likely causes: the target was fine-tuned or quantised "
            "after the drafter was made, a drafter of another target, text unlike what the drafter was trained on, or "
            "a high temperature. The text is still right; `paceline check` shows which"
        )


class AcceptanceEstimator:
    """What one request keeps of one network drafter: its own counts, drawn to the pair's prior."""

    def __init__(self, prior: PairPrior) -> None:
        self._prior = prior
        self._counts = Counts(REQUEST_MEMORY)

    def add(self, drafted: int, accepted: int) -> None:
        self._counts.add(drafted, accepted)
        self._prior.add(drafted, accepted)

    def chances(self, floor: float = 0.0) -> list[float]:
        """That token 1, 2, ... is kept, given that those before it are, until all are kept more rarely than `floor`."""
        return shrunk(self._counts, self._prior.accept, PRIOR_WEIGHT, floor)

    def hopes(self) -> list[float]:
        """The same if this text is as easy as its own drafts allow, whatever other texts keep."""
        return shrunk(self._counts, HOPE, HOPE_WEIGHT, 0.0)

    def age(self) -> None:
        """This text has not been drafted for long: what it kept then counts half."""
        self._counts.halve()


class ProposalEstimator:
    """How much better, or worse, one request's n-gram proposals are kept than their confidence promises, as odds."""

    def __init__(self) -> None:
        self._kept = self._tried = self._promised = 0.0

    def add(self, promised: Seq[float], accepted: int) -> None:
        """A proposal of which `accepted` tokens were kept; `promised`: the chances that were expected of its tokens."""
        keep = 1.0 - 1.0 / REQUEST_MEMORY
        for j, chance in enumerate(promised[: accepted + 1]):
            self._kept = self._kept * keep + (j < accepted)
            self._tried = self._tried * keep + 1.0
            self._promised = self._promised * keep + chance

    def survival(self, confidence: Seq[float], lines: Seq[Line]) -> list[float]:
        """That the first 1, 2, ... tokens of a proposal are all kept."""
        good = (self._kept + PRIOR_WEIGHT) * (self._tried - self._promised + PRIOR_WEIGHT)
        bad = (self._tried - self._kept + PRIOR_WEIGHT) * (self._promised + PRIOR_WEIGHT)
        chances = [worth_of(lines, c) for c in confidence]
        return list(accumulate([c * good / (c * good + (1.0 - c) * bad) for c in chances], mul))


def shrunk(counts: Counts, prior: Seq[float], weight: float, floor: float) -> list[float]:
    """Chances by position: counts, drawn to a prior that moves with what was seen at the positions before.

    A position that was hardly ever reached is expected to go on as those before it, so far as they are known.
    """
    out: list[float] = []
    shift, seen, alive = 0.0, 0.0, 1.0
    for accepted, tried, usual in zip(counts.accepted, counts.tried, prior, strict=True):
        expected = usual + shift
        expected = 0.0 if expected < 0.0 else 1.0 if expected > 1.0 else expected
        chance = (accepted + weight * expected) / (tried + weight)
        alive *= chance
        if alive < floor:
            break
        out.append(chance)
        seen = tried if tried > 0.9 * seen else 0.9 * seen
        shift = seen / (seen + weight) * (chance - usual)
    return out


class TreeEstimator:
    """Of one pair, how much more often, or more rarely, the likeliest, the second likeliest, ... token of a tree is kept
    than chains promise.
    """

    def __init__(self) -> None:
        self._kept, self._promised = [0.0] * MAX_DRAFT_TOKENS, [0.0] * MAX_DRAFT_TOKENS

    def add(self, accepted: Seq[bool], promised: Seq[float]) -> None:
        keep = 1.0 - 1.0 / PAIR_MEMORY
        for j, (yes, chance) in enumerate(zip(accepted, promised, strict=False)):
            self._kept[j] = self._kept[j] * keep + yes
            self._promised[j] = self._promised[j] * keep + chance

    def survival(self, promised: Seq[float]) -> list[float]:
        """That each token is kept, never rising."""
        out, least = [], 1.0
        for j, chance in enumerate(promised):
            more = (self._kept[j] + KNOWN_WEIGHT * chance) / (self._promised[j] + KNOWN_WEIGHT * chance)
            least = min(least, chance * more)
            out.append(least)
        return out


def likeliest(chances: Seq[float], shape: Shape) -> tuple[list[float], list[int]]:
    """The likeliest tokens of a tree, and how deep they stand, if chains are kept by `chances`."""
    out: list[float] = []
    depths: list[int] = []
    beside = [0] * shape.depth
    waiting = [(-1.0, 0)]  # of those whose path is in: its chance, and how many tokens it has
    leaves: list[tuple[float, int]] = []
    while len(out) < MAX_DRAFT_TOKENS:
        for negative, deep in waiting:
            if deep < min(len(chances), shape.depth):
                own = chances[deep]
                shares = [own, *((1.0 - own) * share for share in SIBLINGS[: shape.width - 1])]
                for share in shares:
                    heappush(leaves, (negative * share, deep + 1))
        waiting = []
        if not leaves:
            break
        negative, deep = heappop(leaves)
        if beside[deep - 1] < shape.width:
            beside[deep - 1] += 1
            out.append(-negative)
            depths.append(deep)
            waiting = [(negative, deep)]
    return out, depths
