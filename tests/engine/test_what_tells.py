"""Which steps show what steps take: not those in which a text ends, and not the first ones with drafts."""

from __future__ import annotations

import pytest
from tests.engine.test_audit import MTP, PROFILE, row, sequence
from tests.testing import Setup, make_engine, prompts, run

from paceline.core import Draft, SamplingParams
from paceline.engine import budget as b
from paceline.engine import learning
from paceline.engine.acceptance import Kind
from paceline.engine.audit import COLD, TRIAL
from paceline.engine.fixed import FixedController
from paceline.engine.records import FEW, StepRecord, Unlearnt
from paceline.engine.rest import Ran, Rest, Took
from paceline.engine.scheduler import Work

DRAFTED, PLAIN = row(4, 4), row()


def runs(drafted: str) -> list[int]:
    """What each step counts as, of those with drafts (d) and those without (a space)."""
    seen = Unlearnt()
    for step in drafted:
        seen.add(StepRecord(5 if step == "d" else 1, 1.0, 0.0, 0.0, [DRAFTED if step == "d" else PLAIN]))
    return [record.alike for record in seen.seen]


def test_a_few_steps_without_a_draft_do_not_end_a_run_of_drafts() -> None:
    assert runs("ddd dd") == [1, 2, 3, 1, 4, 5]
    assert runs("dd" + FEW * " " + "d") == [1, 2, *range(1, FEW + 1), 3]
    assert runs("dd" + (FEW + 1) * " " + "d")[-1] == 1
    assert runs("d d" + 9 * " " + "d")[-1] == 1
    assert runs("  d") == [1, 2, 1]  # none came before
    seen = Unlearnt()
    for rows in ([DRAFTED], [], [DRAFTED]):  # a prompt is read
        seen.add(StepRecord(5, 1.0, 0.0, 0.0, rows))
    assert seen.seen[-1].alike == 2


@pytest.mark.parametrize("drafted", [True, False])
def test_a_step_in_which_a_text_ends_says_nothing_of_what_steps_take(drafted: bool) -> None:
    budget = b.Budget(PROFILE.costs(), (MTP,))

    def learnt(*, ended: bool) -> b.Budget:
        rows, count = ([DRAFTED], 5) if drafted else ([PLAIN], 1)
        records = [StepRecord(count, 4.0, 0.0, 0.0, rows, alike=20, odd=ended) for _ in range(4)]
        return learning.observe(budget, records)

    price = 5 if drafted else 1
    assert learnt(ended=True).costs.target(price, "mtp") == budget.costs.target(price, "mtp")
    assert learnt(ended=False).costs.target(price, "mtp") > 1.2 * budget.costs.target(price, "mtp")
    assert bool(learnt(ended=True).totals) == drafted  # what was kept counts


@pytest.mark.parametrize("before", [40, 100])
@pytest.mark.parametrize("after", [0, 40])
def test_plain_steps_that_are_told_as_one_are_heard_whatever_they_come_between(
    before: int, after: int
) -> None:
    budget = b.Budget(PROFILE.costs(), (MTP,))
    drafts = StepRecord(5, 1.0, 0.0, 0.0, [DRAFTED], alike=20)
    audit = StepRecord(1, 1.0, 0.0, 0.0, [PLAIN], times=40, more_seconds=39.0, alike=41)
    assert learning.observe(budget, [drafts] * before).costs.unseen >= before * 3 // 4
    seen = learning.observe(budget, [drafts] * before + [audit] + [drafts] * after)
    assert seen.costs.unseen <= 1.5 * after


def test_nor_does_it_say_what_copies_cost_the_steps_after_them() -> None:
    copy = row(4, 4)
    copy.drafter = "ngram"
    kinds = (MTP, Kind("ngram", (0.9,), sequential=False))
    budget = b.Budget(PROFILE.costs(), kinds)

    def waking(*, ended: bool) -> float:
        steps = [
            StepRecord(5, 2.0, 0.0, 0.0, [copy], alike=1),
            StepRecord(1, 1.0, 0.0, 0.0, [PLAIN], times=4, more_seconds=9.0, alike=4, odd=ended),
            StepRecord(1, 1.0, 0.0, 0.0, [PLAIN], times=COLD, more_seconds=COLD - 1.0, alike=4 + COLD),
        ]
        return learning.observe(budget, steps).wake.get(1, 0.0)

    assert waking(ended=False) > 0.2
    assert waking(ended=True) == 0.0


def test_of_steps_at_rest_odd_ones_count_as_the_others() -> None:
    rest = Rest([1], 8, Draft.empty(1, b.NO_CONFIDENCE))
    work, reading = [Work(sequence(1), 1, True)], [Work(sequence(1), 1, True), Work(sequence(2), 8, False)]
    for seconds, odd in ((1.0, False), (1.0, False), (5.0, True)):
        rest.untold.add(Ran(work, [row()], 1, Took(seconds, 0.0, 0.0, 0.0), odd))
    rest.untold.add(Ran(reading, [row()], 9, Took(7.0, 0.0, 0.0, 0.0), odd=True))
    record = rest.tell()
    assert record is not None
    assert (record.target_rows, record.target_seconds, record.more_seconds, record.times) == (1, 1.0, 3.0, 4)
    assert len(record.rows) == 1
    assert record.tells
    assert not record.odd
    rest.untold.add(Ran(work, [row()], 1, Took(5.0, 0.0, 0.0, 0.0), odd=True))
    alone = rest.tell()
    assert alone is not None
    assert not alone.tells


class Listening(FixedController):
    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.told: list[StepRecord] = []

    def observe(self, record: StepRecord) -> None:
        self.told.append(record)


def test_the_engine_says_in_which_steps_texts_end() -> None:
    heard = Listening(3)
    engine = make_engine(Setup(drafter="mtp"), controller=heard)
    texts = [SamplingParams(max_tokens=n, temperature=0) for n in (9, 14)]
    run(engine, prompts(2), texts)
    assert sum(record.odd for record in heard.told) == 2
    assert heard.told[-1].odd


class Slow:
    """A constraint that allows everything, after so many seconds of `clock`."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def masks(self, draft: list[int]) -> list[None]:
        self.clock[0] += self.seconds
        return [None] * (len(draft) + 1)

    def commit(self, tokens: list[int]) -> None:
        pass


def test_the_engine_says_what_masks_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two texts one is under a constraint that takes a second at a time. A network that drafts asks it, too."""
    clock, heard = [0.0], Listening(3)
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    engine = make_engine(Setup(drafter="mtp"), controller=heard)
    slow = SamplingParams(max_tokens=8, temperature=0, constraint=lambda: Slow(clock, 1.0))
    run(engine, prompts(2), [slow, SamplingParams(max_tokens=40, temperature=0)])
    judged = [record for record in heard.told if record.rows]
    assert {record.masked for record in judged} == {0, 1}
    assert [record.mask_seconds for record in judged] == [float(record.masked) for record in judged]
    assert not any(record.target_seconds or record.other_seconds for record in heard.told)
    assert [record.checking for record in judged] == [record.mask_seconds for record in judged]


def test_a_trial_is_longer_than_what_tells_nothing() -> None:
    assert min(TRIAL) >= learning.WARM + 8
