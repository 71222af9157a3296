"""Copies that were not worth checking teach what they would have brought; texts without any are looked at rarely."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from tests.engine.test_watching import firsts

from paceline.core import SamplingParams, Sequence
from paceline.engine import budget as b
from paceline.engine.acceptance import BINS, MTP, NGRAM
from paceline.engine.controller import AutoController
from paceline.engine.copies import FEW_TEXTS
from paceline.engine.costs import Profile
from paceline.engine.lookups import NEVER, Lookups
from paceline.engine.quiet import FIRST, LOOK, SAMPLED, WATCHED, Quiet
from paceline.engine.records import RowRecord, StepRecord
from paceline.engine.unchecked import MOST, Unchecked

STEEP = Profile((1, 5, 32), (1.0, 2.6, 14.0))


def text(tokens: list[int], sid: int = 1) -> Sequence:
    return Sequence(sid, tokens, 2, SamplingParams(max_tokens=900, temperature=0.8), seed=0)


@pytest.mark.parametrize(("said", "kept"), [([5, 6, 7, 8], 4), ([5, 6, 9], 2), ([1], 0)])
def test_a_copy_is_followed_until_the_text_has_shown_what_it_was_worth(said: list[int], kept: int) -> None:
    unchecked, sequence = Unchecked(), text([1, 2])
    assert unchecked.told(sequence) == 0
    unchecked.add(sequence, "ngram", [5, 6, 7, 8, 9, 10], [0.5] * 6)
    unchecked.add(sequence, "ngram", [9], [0.5])  # one at a time
    assert unchecked.told(sequence) == MOST
    for j, token in enumerate(said):
        assert unchecked.told(sequence) == MOST - j  # that many tokens are still to come
        sequence.tokens.append(token)
    told = unchecked.told(sequence)
    assert isinstance(told, RowRecord)
    assert (told.sequence_id, told.drafter, told.drafted, told.accepted) == (1, "ngram", MOST, kept)
    assert unchecked.told(sequence) == 0
    unchecked.add(sequence, "ngram", [1] * 9, [0.5] * 9)
    unchecked.forget(1)
    assert unchecked.told(sequence) == 0


def play(right: bool, steps: int = 60) -> tuple[list[int], int, AutoController]:
    """(tokens checked by step, looks) of a text in which a copy is always at hand, under a controller that has seen
    copies at a temperature fail."""
    auto = AutoController(STEEP, [NGRAM])
    bins = tuple([(20.0, 200.0)] * BINS)
    auto.budget = replace(auto.budget, bins={NGRAM.law(True): bins})
    sequence, checked, looks = replace(text([1, 2]), reference=(7,)), [], 0
    for step in range(steps):
        ((limit, _),) = auto.limits([sequence], ["auto"], 16)
        length = 0
        if limit:
            looks += 1
            ((length, _),) = auto.offers([sequence], "ngram", [([7] * 16, [0.6] * 16)], anyway=False)
        new = [7] * (length + 1) if right else [100 + step]
        checked.append(length)
        kept = length if right else 0
        done = RowRecord(1, "ngram", length, kept, [0.6] * length, None if length else b.NO_CONFIDENCE)
        sequence.tokens.extend(new[: kept + 1])
        auto.observe(StepRecord(1 + length, STEEP.costs().target(1 + length), 0.0, 0.0, [done]))
    auto._learn()
    return checked, looks, auto


def test_a_text_whose_copies_are_right_is_found_out_though_copies_of_others_failed() -> None:
    checked, _, auto = play(right=True)
    assert checked[0] == 0
    assert all(checked[24:])
    arm = b.arm_of(auto.budget, 1, NGRAM)
    assert arm.hits[0] > 0.9 * arm.tries[0] > 1.5 * arm.promised[0]
    assert auto.budget.totals["ngram"].drafted == sum(checked)  # only what was checked is counted


def test_a_text_whose_copies_are_wrong_is_looked_at_rarely() -> None:
    checked, looks, auto = play(right=False)
    assert sum(checked) == 0
    assert looks < 12
    assert b.arm_of(auto.budget, 1, NGRAM).tries[0] > 2
    assert "ngram" not in auto.budget.totals


def test_looks_become_rarer_and_fall_together() -> None:
    quiet, now, at = Quiet(), 0, []
    for _ in range(9):
        now = quiet.hush(1, now)
        at.append(now)
    assert at[:5] == [8, 16, 32, 64, 128]
    assert at[-1] - at[-2] == LOOK
    assert quiet.due(1, now) == now
    assert quiet.hush(1, now, 2) - now <= 2
    quiet.wake(1)
    assert quiet.due(1, 77) == 77


def test_looks_must_pay_for_themselves() -> None:
    quiet = Quiet()
    quiet.among(8, sampled=False)
    assert (quiet.pays, quiet.common(13)) == (True, 13)
    for _ in range(5):
        quiet.timed(0.08, 1.0, 0)
    assert quiet.pays
    assert quiet.hush(1, 0) == FIRST
    for _ in range(40):
        quiet.timed(0.2, 1.0, 0)
    assert not quiet.pays
    assert quiet.common(13) == LOOK  # with the others
    assert quiet.hush(2, 0) > quiet.hush(1, 0) == 2 * FIRST
    quiet.wake(1)
    assert quiet.hush(1, 0) == FIRST  # its own last copy was kept
    quiet.among(1, sampled=False)
    assert (quiet.pays, quiet.hush(3, 0)) == (True, FIRST)  # that was of eight texts
    quiet.among(8, sampled=False)
    quiet.brought(-5.0)
    assert not quiet.pays
    quiet.brought(9.0)
    assert quiet.pays
    for _ in range(1000):  # what they brought once does not count for ever
        quiet.timed(0.2, 1.0, 0)
    assert not quiet.pays


def test_texts_are_looked_at_in_the_same_steps_whatever_looks_take() -> None:
    for seconds in (0.001, 0.0135, 0.13, 0.9):
        quiet = Quiet()
        quiet.timed(seconds, 1.0, 0)
        for text, now in ((1, 0), (2, 37), (3, 100)):
            for _ in range(6):
                last, now = now, quiet.hush(text, now)
        assert (now - last).bit_count() == 1
        assert len({quiet.hush(text, 1000) for text in (1, 2, 3)}) == 1


@pytest.mark.parametrize(
    ("texts", "rests", "later"), [(1, False, LOOK), (9, True, WATCHED[False]), (9, False, LOOK)]
)
def test_a_new_text_is_looked_at_with_the_others_where_looks_do_not_pay(
    texts: int, rests: bool, later: int
) -> None:
    """At rest it is watched, and looked at only to learn from what its copies would have brought."""
    found, new = Lookups(Copier([0.5])), replace(text([1, 2]), params=SamplingParams(temperature=0.0))
    found.among(texts, sampled=False, rests=rests)
    assert found.due(new, 5, firsts(new)) == 5
    for _ in range(99):
        found.timed(0.2, 1.0, 0)
    second, third = replace(new, id=2), replace(new, id=3)
    assert found.due(second, 5, firsts(second)) == later
    assert found.join(replace(new, id=4, reference=(1, 2)), 5, firsts(new)) > 5 + FIRST
    record = StepRecord(5, 1.5, 0.0, 0.0, [RowRecord(1, "ngram", 4, 4, [0.9] * 4, None)])
    for _ in range(4):
        found.over([{}], record, {"ngram"}, 1.0, 5)
    assert found.due(third, 5, firsts(third)) == 5


def test_where_looks_do_not_pay_it_is_left_to_the_watch_to_say_when_there_is_something() -> None:
    found, new = Lookups(Copier([])), replace(text([1, 2]), params=SamplingParams(temperature=0.0))
    for rests, vain, first in ((True, 0, FIRST), (True, 99, WATCHED[False]), (False, 99, LOOK)):
        found.among(1, sampled=False, rests=rests)
        for _ in range(vain):
            found.timed(0.2, 1.0, 0)
        assert found.look(replace(new, id=vain + rests), 0) == first
    found.among(1, sampled=False, rests=True)
    following = replace(new, id=7, tokens=[1, 2])
    found._followed = {following.id}  # it most likely goes on as something that it was given
    assert found.look(following, 0) == LOOK
    for text_now, shown in ((following, 12), (replace(new, id=8, tokens=[1, 2]), LOOK)):
        found.judged(text_now, "ngram", [9] * MOST, [0.9] * MOST, checked=False)
        # what becomes of a copy is looked at as soon as it is shown
        assert found.due(text_now, 8, firsts(text_now)) == shown
        assert found.next([text_now.id], 8) == NEVER  # it is watched in every step


def test_the_controller_tells_what_looks_took_and_copies_brought() -> None:
    auto = AutoController(STEEP, [MTP, NGRAM])
    sequence = replace(text([1, 2]), params=SamplingParams(max_tokens=900, temperature=0.0))
    quiet = auto._lookups._quiet

    def step(draft_seconds: float, drafter: str, kept: int, read: int = 0) -> None:
        auto.limits([sequence], ["auto"], 16)
        auto._used[0].looked = True
        row = RowRecord(1, drafter, kept, kept, [0.9] * kept, None)
        auto.observe(StepRecord(1 + kept + read, 1.0, draft_seconds, 0.0, [row]))

    step(5.0, "", 0)
    assert not quiet.pays
    step(0.0, "mtp", 8)  # not by looks
    step(0.0, "ngram", 8, read=20)  # what it cost is not known
    assert not quiet.pays
    step(0.0, "ngram", 8)
    assert quiet.pays


def test_sampled_text_is_looked_at_more_rarely_at_first() -> None:
    quiet = Quiet()
    assert quiet.hush(1, 0) == FIRST
    assert quiet.hush(2, 0, sampled=True) == SAMPLED
    assert quiet.hush(2, SAMPLED, sampled=True) == 2 * SAMPLED
    assert (quiet.due(2, 9), quiet.due(3, 5)) == (2 * SAMPLED, None)
    quiet.wake(2)
    assert quiet.due(2, 10) == 10  # there was something to copy
    quiet.forget(2)
    assert quiet.due(2, 10) is None
    found = Lookups(None)
    bare, given = text([1, 2], sid=4), replace(text([1, 2], sid=5), reference=(1, 2))
    assert found.due(bare, 5, firsts(bare)) == SAMPLED
    assert found.due(given, 5, firsts(given)) == 5
    given = replace(given, id=6)
    assert found.due(given, 5, firsts(given, 0.0)) == SAMPLED
    found.gone([4])
    greedy = replace(bare, params=SamplingParams(temperature=0.0))
    assert found.due(greedy, 5, firsts(greedy)) == 5
    found = Lookups(Copier([]))
    assert found.look(text([1, 2]), 5) == SAMPLED
    assert found.look(replace(text([1, 2], sid=2), params=SamplingParams(temperature=0.0)), 5) == FIRST


@pytest.mark.parametrize(("kept", "first"), [(0.0, SAMPLED), (20.0, 0)])
def test_sampled_text_is_looked_at_later_where_first_copies_of_such_texts_are_lost(
    kept: float, first: int
) -> None:
    auto = AutoController(STEEP, [NGRAM])
    auto.budget = replace(auto.budget, firsts={NGRAM.law(True, given=True): (kept, 20.0)})
    sequence, looks = replace(text([1, 2]), reference=(7,)), []
    for step in range(SAMPLED + 2):
        ((limit, _),) = auto.limits([sequence], ["auto"], 16)
        if limit:
            looks.append(step)
            auto.offers([sequence], "ngram", [([], [])], anyway=False)
        auto.observe(StepRecord(1, 1.0, 0.0, 0.0, [RowRecord(1, "ngram", 0, 0, [], b.NO_PROPOSAL)]))
        sequence.tokens.append(9)
    assert looks[0] == first


class Copier:
    """Finds something if there is a confidence to find it with."""

    name = "ngram"

    def __init__(self, there: list[float]) -> None:
        self.there = there

    def peek(self, sequence: Sequence) -> bool:
        return bool(self.there)

    def look(self, sequence: Sequence, limit: int) -> tuple[list[int], list[float]]:
        return [7] * limit, self.there * limit


@pytest.mark.parametrize(
    ("temperature", "confidence", "awaited"), [(0.0, 0.1, MOST), (0.8, 0.9, MOST), (0.8, 0.6, 0)]
)
def test_of_sampled_text_only_a_copy_that_seemed_sure_is_waited_for(
    temperature: float, confidence: float, awaited: int
) -> None:
    sequence = replace(text([1, 2]), params=SamplingParams(temperature=temperature))
    found = Lookups(None)
    found.judged(sequence, "ngram", [5] * 6, [confidence] * 6, checked=False)
    found.in_vain([1], 0)
    assert found.next([1], 0) == (awaited or FIRST)
    sequence.tokens += [5] * MOST
    assert found.due(sequence, FIRST, firsts(sequence)) == FIRST
    (told,) = found.take_shown()  # by then it is known, whether it was waited for or not
    assert told.accepted == MOST


def test_what_is_found_at_rest_and_is_not_worth_checking_is_followed_and_does_not_end_it() -> None:
    there = [0.01]
    auto = AutoController(STEEP, [NGRAM], copier=Copier(there))
    params, texts = SamplingParams(max_tokens=900, temperature=0.0), FEW_TEXTS + 1
    sequences = [replace(text([1, 2]), id=i, params=params) for i in range(texts)]
    rows = [RowRecord(i, "", 0, 0, [], b.NO_PROPOSAL) for i in range(texts)]
    rooms = [16] * texts
    assert auto.limits(sequences, ["auto"] * texts, 16) == [(0, b.NO_PROPOSAL)] * texts
    assert auto.rest(sequences, rooms) == (MOST, None)  # until it is known what would have become of the copy
    for there[0], found in ((0.01, False), (0.99, True)):
        auto.observe(StepRecord(texts, 1.0, 0.0, 0.0, rows, times=4 * LOOK))  # so rarely are many looked at
        for sequence in sequences:
            sequence.tokens += [7] * MOST
        auto._choice.until = auto._now + 9  # type: ignore[union-attr]
        before = auto.budget
        steps, draft = auto.rest(sequences, rooms)
        assert (steps > 0, draft is not None) == (True, found)
    assert not b.arm_of(before, 1, NGRAM).copied or b.arm_of(auto.budget, 1, NGRAM).copied
    assert draft is not None
    assert all(tokens == [7] * len(tokens) for tokens in draft.tokens)


@pytest.mark.parametrize(("texts", "first"), [(1, []), (FEW_TEXTS + 1, [8, 16, 32, 64])])
def test_a_look_at_rest_that_finds_nothing_does_not_end_it(
    texts: int, first: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many texts are looked at ever more rarely; few are watched, and nobody is asked before a plan is made anew."""
    monkeypatch.setattr(Quiet, "timed", lambda *_: None)  # what it takes must not decide how often
    there: list[float] = []
    auto = AutoController(STEEP, [NGRAM], copier=Copier(there))
    params = SamplingParams(max_tokens=900, temperature=0.0)
    sequences = [replace(text([1, 2]), id=i, params=params) for i in range(texts)]
    rows = [RowRecord(i, "ngram", 0, 0, [], b.NO_PROPOSAL) for i in range(texts)]
    planned, looks, left, copied = [], [], 0, None
    for now in range(200):
        if now == 150:
            there.append(0.99)
        if left == 0:
            left, copied = auto.rest(sequences, [16] * texts)
            looks.append(now)
        if left == 0:
            planned.append(looks.pop())
            assert not any(limit for limit, _ in auto.limits(sequences, ["auto"] * texts, 16))
            left, copied = auto.rest(sequences, [16] * texts)
        if copied is not None:
            break
        left -= 1
        auto.observe(StepRecord(texts, 1.0, 0.0, 0.0, rows))
        for sequence in sequences:
            sequence.tokens.append(9)
    assert planned == [0, 128]
    assert looks[: len(first)] == first
    if texts > 1:
        assert 150 <= looks[-1] <= 150 + LOOK
    assert (copied is not None) is (texts > 1)


@pytest.mark.parametrize(("step", "every"), [(4e-4, LOOK), (5e-3, 4), (0.1, 2)])
def test_looks_are_as_rare_as_what_they_take_asks_for(step: float, every: int) -> None:
    """The slower a step, the less is a look beside it: a large model's text is looked at in every other step."""
    auto = AutoController(replace(STEEP, seconds=tuple(step * s for s in STEEP.seconds)), [NGRAM])
    sequence, looks = replace(text([1, 2]), params=SamplingParams(max_tokens=900, temperature=0.0)), []
    for now in range(6 * LOOK):
        ((limit, _),) = auto.limits([sequence], ["auto"], 16)
        if limit:
            looks.append(now)
            auto.offers([sequence], "ngram", [([], [])], anyway=False)
        row = RowRecord(1, "ngram", 0, 0, [], b.NO_PROPOSAL)
        auto.observe(StepRecord(1, step, auto._care.thought + 1e-4 * bool(limit), 0.0, [row]))
        sequence.tokens.append(9)
    gaps = [later - earlier for earlier, later in itertools.pairwise(looks)]
    assert max(gaps[-3:]) == every
    assert gaps[0] == min(
        FIRST if step > 4e-4 else 4 * FIRST, every
    )  # beside a short step not as often at first


@pytest.mark.parametrize(
    ("temperature", "reference", "sparingly"), [(0.0, (), False), (0.8, (), True), (0.8, (7,), False)]
)
def test_sampled_text_with_nothing_to_copy_from_is_looked_up_sparingly_beside_a_network(
    temperature: float, reference: tuple[int, ...], sparingly: bool
) -> None:
    """What is found has to be judged and followed, and is hardly worth more than the network's tokens there."""
    cheap = Profile((1, 256), (1.0, 1.1), rounds={"mtp": (0.01, 0.01, 0.0)})
    auto = AutoController(cheap, [MTP, NGRAM])
    params = SamplingParams(max_tokens=4000, temperature=temperature)
    sequence, looks, drafted = replace(text([1, 2]), params=params, reference=reference), 0, 0
    for _ in range(4 * SAMPLED):
        auto.limits([sequence], ["auto"], 16)
        if auto.kind_limit(1, "ngram"):
            looks += 1
            auto.offers([sequence], "ngram", [([], [])], anyway=True)
        length = min(auto.kind_limit(1, "mtp"), 4)
        drafted += length > 0
        row = RowRecord(1, "mtp", length, length, [0.9] * length, None)
        auto.observe(StepRecord(1 + length, 1.0, 0.05, 0.0, [row]))
        sequence.tokens += [9] * (length + 1)
    assert drafted > 2 * SAMPLED
    assert 1 <= looks <= 4 if sparingly else looks >= drafted
