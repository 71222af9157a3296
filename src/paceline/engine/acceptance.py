"""How likely a drafted token is kept: by request and position, and by the drafter's confidence. Pure values.

A request starts at what the pair is known for and leaves it as fast as its own evidence grows; requests do
not learn from each other. What a confidence means (calibration) is learnt over all requests of a drafter
kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from paceline.core import MAX_DRAFT_TOKENS
from paceline.ops.extension import extension

PRIOR_WEIGHT = 3.0  # observations that the usual acceptance of such a drafter counts for
# That of a pair which was measured, for greedy and for sampled text: a few refused drafts in a row are no reason to stop,
# and at a temperature, where drafts are kept more rarely, a few that were kept no reason to begin.
KNOWN_WEIGHT = (24.0, 48.0)
WINDOW = 48.0  # observations that a request remembers by position
PARKED_WINDOW = 6.0  # fewer while parked, so that a few kept probes bring it back
FIRST_PROBE = 64  # steps until a parked row may probe; doubles with each probe that is refused
LAST_PROBE = 1024
BINS = 12  # of the drafter's confidence
BIN_WEIGHT = 8.0  # observations that the drafter's own word counts for
FIRST_WEIGHT = 4.0  # that it counts for where a text copies for the first time,
FIRSTS = 32.0  # and texts whose first copies are remembered
ALARM_TRIES, ALARM_SHARE = 96, 0.4
# Standard deviations by which the first acceptance of a greedy and of a sampled text is thought higher than it seems:
# what greedy texts keep differs, what sampled ones do hardly does, and there is nothing to hope for (docs/controller.md).
HOPE = (1.5, 0.0)
SAMPLED_SHARE = 0.8  # of the acceptance of greedy text, where nothing is known of sampled text

Bins = tuple[tuple[float, float], ...]  # (kept, tried) by confidence, [BINS]
Firsts = tuple[float, float]  # first copies of texts: (kept, tried)


@dataclass(frozen=True, slots=True)
class Kind:
    """What is known of a drafter before it has run: acceptance by position, given that all before were
    kept.
    """

    name: str
    prior: tuple[float, ...] = (0.7,)
    sequential: bool = True  # one call per position; False = one call proposes all, at once and for little
    known: bool = False  # the prior was measured for this pair: acceptance far below it is alarming
    sampled: tuple[float, ...] = ()  # the same at a temperature; empty: four fifths of the prior

    def law(self, sampled: bool, *, given: bool = False, masked: bool = False) -> str:
        """Under which name its calibration is kept: a confidence means something else at a temperature, and that of a
        copy also where a text was given to copy from, or a constraint says what may follow.
        """
        law = f"{self.name} at a temperature" if sampled else self.name
        if self.sequential:
            return law
        return law + " of a reference" * given + " under a constraint" * masked

    def accept(self, position: int, sampled: bool = False) -> float:
        if sampled and self.sampled:
            return self.sampled[min(position, len(self.sampled) - 1)]
        return self.prior[min(position, len(self.prior) - 1)] * (SAMPLED_SHARE if sampled else 1.0)


# What is known of drafters before a pair was measured.
MTP = Kind("mtp", (0.7, 0.72, 0.72, 0.7, 0.68), sampled=(0.56, 0.6, 0.6, 0.6))
MODEL = Kind("model", (0.65, 0.65, 0.62, 0.6))
NGRAM = Kind("ngram", (0.5, 0.7, 0.8, 0.85), sequential=False, sampled=(0.3, 0.55, 0.7, 0.8))
KINDS = (MTP, MODEL, NGRAM)


class Arm(NamedTuple):
    """One request's experience with one kind of drafter. A tuple: it is renewed in every other step."""

    hits: tuple[float, ...]  # by position, [MAX_DRAFT_TOKENS]
    tries: tuple[float, ...]
    prior: tuple[float, ...]  # what it starts from
    law: str  # under which name confidence is calibrated, see `Kind.law`
    sampled: bool = False  # the text is drawn at a temperature
    weight: float = PRIOR_WEIGHT  # observations that `prior` counts for
    accept: tuple[float, ...] = ()  # conditional acceptance by position
    survive: tuple[float, ...] = ()  # running products of `accept`
    copied: bool = False  # its first copy is behind it: `Firsts` tell of that one
    hope: float = 0.0  # share of `accept[0]` that is the benefit of the doubt
    parked: bool = False
    wait: int = FIRST_PROBE  # steps between probes
    due: int = 0  # the step from which a probe may run
    promised: tuple[float, ...] = ()  # of copies: hits, as their confidence said


@dataclass(frozen=True, slots=True)
class Totals:
    """Of one kind over all requests, for the alarm and the metrics."""

    first_tries: int = 0
    first_hits: int = 0
    drafted: int = 0
    accepted: int = 0
    alarmed: bool = False

    def add(self, outcomes: Seq[tuple[int, int]]) -> Totals:
        """More drafts, as (drafted, accepted)."""
        return Totals(
            self.first_tries + len(outcomes),
            self.first_hits + sum([accepted > 0 for _, accepted in outcomes]),
            self.drafted + sum([drafted for drafted, _ in outcomes]),
            self.accepted + sum([accepted for _, accepted in outcomes]),
            self.alarmed,
        )


@lru_cache(maxsize=64)
def fresh_arm(kind: Kind, sampled: bool = False, *, given: bool = False, masked: bool = False) -> Arm:
    """The arm of a text that is new to a kind of drafter."""
    zeros = (0.0,) * MAX_DRAFT_TOKENS
    prior = tuple(kind.accept(j, sampled) for j in range(MAX_DRAFT_TOKENS))
    law = kind.law(sampled, given=given, masked=masked)
    weight = KNOWN_WEIGHT[sampled] if kind.known else PRIOR_WEIGHT
    promised = () if kind.sequential else zeros
    return estimated(Arm(zeros, zeros, prior, law, sampled, weight, promised=promised))


def estimated(arm: Arm) -> Arm:
    """Fill acceptance and survival: own counts, drawn to a mean of the pair's value and the position before.

    The more the request has shown at the positions before, the more they count: a position that was never
    reached is expected to go on as the text has gone so far.
    """
    weight, prior, tries = arm.weight, arm.prior, arm.tries
    first = (arm.hits[0] + weight * prior[0]) / (tries[0] + weight)
    # what is not known yet is worth trying
    unknown = weight / (tries[0] + weight)
    more = HOPE[arm.sampled] * unknown * math.sqrt(first * (1 - first) / (tries[0] + weight + 1))
    more = min(more, 1.0 - first)
    before = alive = first + more
    accept, survive, shown = [before], [before], tries[0]
    for own, tried, usual in zip(arm.hits[1:], tries[1:], prior[1:], strict=True):
        drawn = usual + shown / (shown + weight) * (before - usual)
        before = (own + weight * drawn) / (tried + weight)
        shown = tried if tried > 0.9 * shown else 0.9 * shown
        alive *= before
        accept.append(before)
        survive.append(alive)
    hope = more / accept[0] if accept[0] else 0.0
    return arm._replace(accept=tuple(accept), survive=tuple(survive), hope=hope)


def sober(arm: Arm, texts: int) -> float:
    """What to count of `survive` where so many texts would draft together: their mean is surer than each of them."""
    return 1.0 - arm.hope * (1.0 - 1.0 / math.sqrt(texts))


def _fading(seen: float, most: float) -> float:
    """What is left of observations as one more comes, so that they are that many at most."""
    return min(1.0, (most - 1) / seen) if seen else 1.0


def learn(arm: Arm, outcomes: Seq[tuple[int, int]]) -> Arm:
    """Count what became of drafts, as (drafted, accepted): the kept positions, and the first that was not."""
    window = PARKED_WINDOW if arm.parked else WINDOW
    if (native := extension("learn")) is None:
        return counted(arm, window, outcomes)
    hits, tries, accept, survive, hope = native.learn(
        arm.hits, arm.tries, arm.prior, arm.weight, HOPE[arm.sampled], window, outcomes
    )
    return arm._replace(hits=hits, tries=tries, accept=accept, survive=survive, hope=hope)


def counted(arm: Arm, window: float, outcomes: Seq[tuple[int, int]]) -> Arm:
    """`learn` for a memory of so many observations: the reference of native/experience.cpp."""
    hits, tries = list(arm.hits), list(arm.tries)
    for drafted, accepted in outcomes:
        for j in range(min(accepted + 1, drafted, MAX_DRAFT_TOKENS)):
            keep = _fading(tries[j], window)
            hits[j] = hits[j] * keep + (j < accepted)
            tries[j] = tries[j] * keep + 1
    return estimated(arm._replace(hits=tuple(hits), tries=tuple(tries)))


def followed(arm: Arm, copies: Iterable[tuple[Seq[float], int]], lines: Seq[Line]) -> Arm:
    """Count what became of copies, as (confidence, accepted), beside what their confidence promised: that long matches
    were kept says little of short ones.
    """
    hits, tries, promised = list(arm.hits), list(arm.tries), list(arm.promised)
    for confidence, accepted in copies:
        for j, value in enumerate(confidence[: min(accepted + 1, MAX_DRAFT_TOKENS)]):
            keep = _fading(tries[j], WINDOW)
            hits[j] = hits[j] * keep + (j < accepted)
            tries[j] = tries[j] * keep + 1
            promised[j] = promised[j] * keep + calibrated(lines, value)
    return arm._replace(hits=tuple(hits), tries=tuple(tries), promised=tuple(promised))


def in_text(arm: Arm, position: int, chance: float) -> float:
    """That chance of a copy's token, by the odds that its text's own copies had over what was promised of them."""
    hits, tries = arm.hits[position], arm.tries[position]
    promised, weight = arm.promised[position], arm.weight
    kept = chance * (hits + weight) * (tries - promised + weight)
    lost = (1.0 - chance) * (tries - hits + weight) * (promised + weight)
    return kept / (kept + lost)


def parked(arm: Arm, step: int) -> Arm:
    """Not drafting any more: it forgets most of what it has seen, and is probed after a while."""
    keep = [min(1.0, PARKED_WINDOW / t) if t else 1.0 for t in arm.tries]
    hits = tuple(h * k for h, k in zip(arm.hits, keep, strict=True))
    tries = tuple(t * k for t, k in zip(arm.tries, keep, strict=True))
    promised = tuple(p * k for p, k in zip(arm.promised, keep, strict=False))
    due = step + FIRST_PROBE
    return arm._replace(parked=True, wait=FIRST_PROBE, due=due, hits=hits, tries=tries, promised=promised)


def probed(arm: Arm, step: int, *, kept: bool) -> Arm:
    """After a probe: at once again if it was kept, else only after twice the time."""
    wait = 1 if kept else min(max(2 * arm.wait, FIRST_PROBE), LAST_PROBE)
    return arm._replace(wait=wait, due=step + wait)


def calibrate(bins: Bins | None, seen: Iterable[tuple[Seq[float], int]]) -> Bins:
    """Count what became of the tokens that verification reached, by their confidence, of drafts of which so many were
    kept. NaN counts for nothing.
    """
    new = list(bins or ((0.0, 0.0),) * BINS)
    for confidence, accepted in seen:
        for j, value in enumerate(confidence[: accepted + 1]):
            if 0.0 <= value <= 1.0:
                i = min(int(value * BINS), BINS - 1)
                hits, tries = new[i]
                keep = 0.5 if tries > 512 else 1.0
                new[i] = (hits * keep + (j < accepted), tries * keep + 1)
    return tuple(new)


def count_first(firsts: Firsts | None, accepted: int) -> Firsts:
    """Count what became of a text's first copy, see `first_kept`."""
    hits, tries = firsts or (0.0, 0.0)
    keep = _fading(tries, FIRSTS)
    return hits * keep + (accepted > 0), tries * keep + 1


def first_kept(firsts: Firsts | None, chance: float) -> float:
    """Chance that the first token of a text's first copy is kept, where `chance` is that of any copy that looks like it:
    whether such texts go on as what they copy from cannot be seen by its looks.
    """
    hits, tries = firsts or (0.0, 0.0)
    return (hits + FIRST_WEIGHT * chance) / (tries + FIRST_WEIGHT)


Line = tuple[float, float]  # chance that a token is kept at confidence 0, and what it rises by until 1


@lru_cache(maxsize=64)
def calibration(bins: Bins | None, elsewhere: Bins | None = None) -> tuple[Line, ...]:
    """By bin of the confidence: what it is worth. Where little is known, as much as `elsewhere`, and where nothing is
    known there either, what it says.
    """
    none = ((0.0, 0.0),) * BINS
    lines = []
    for (hits, tries), (other_hits, other_tries) in zip(bins or none, elsewhere or none, strict=True):
        rest, other = BIN_WEIGHT / (tries + BIN_WEIGHT), 1.0 / (other_tries + BIN_WEIGHT)
        lines.append((hits / (tries + BIN_WEIGHT) + rest * other * other_hits, rest * other * BIN_WEIGHT))
    return tuple(lines)


def calibrated(lines: Seq[Line], confidence: float) -> float:
    """Chance that a token drafted with this confidence is kept, given that those before it were."""
    c = confidence if 0.0 <= confidence <= 1.0 else 0.0  # NaN too
    usual, rise = lines[min(int(c * BINS), BINS - 1)]
    return usual + rise * c


def alarm(kind: Kind, totals: Totals) -> str | None:
    """A warning when acceptance at position 0 is far under what this pair is known for, else None."""
    if totals.alarmed or not kind.known or totals.first_tries < ALARM_TRIES:
        return None
    seen, known = totals.first_hits / totals.first_tries, kind.accept(0)
    if seen >= ALARM_SHARE * known:
        return None
    return (
        f"drafter {kind.name}: only {seen:.0%} of first draft tokens were kept over {totals.first_tries} "
        f"drafts, this pair should reach about {known:.0%}. Likely causes: the target was fine-tuned or "
        f"quantised after the drafter was made, a drafter of another target, text unlike what the drafter "
        f"was trained on, or a high temperature. The text is still right; `paceline check` tells which"
    )
