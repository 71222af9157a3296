"""What plain steps amid drafts tell: pace and drag, audits, what probes are charged, and what a rest leaves out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.testing import Setup, make_engine, prompts, run

from paceline.core import Draft, SamplingParams, Sequence
from paceline.engine import audit, learning
from paceline.engine import budget as b
from paceline.engine.acceptance import NGRAM, Kind
from paceline.engine.audit import (
    AUDIT,
    COLD,
    FIRST_AUDIT,
    HOPEFUL,
    LAST_TRIAL,
    RAREST,
    SOONEST,
    SPENT,
    TRIAL,
    Audit,
    hopeful,
)
from paceline.engine.choice import HOLD, LONGEST_HOLD, LONGEST_IDLE
from paceline.engine.controller import AutoController
from paceline.engine.costs import TABLE_ROWS, Costs, Profile, Step, spread
from paceline.engine.fixed import FixedController, Limit
from paceline.engine.planner import LITTLE
from paceline.engine.records import LEARNING, MANY, RowRecord, StepRecord, Unlearnt
from paceline.engine.rest import ALIKE, TYPICAL, Ran, Rest, Took
from paceline.engine.rounds import Round
from paceline.engine.scheduler import Work

MTP = Kind("mtp", (0.75, 0.7, 0.65, 0.6))
PROFILE = Profile((1, 2, 5, 9, 17, 33), (1.0, 1.2, 1.8, 2.6, 4.2, 7.4), rounds={"mtp": (0.1, 0.1, 0.0)})
PLAIN, DRAFTED = Step(1, 1.0, texts=1), Step(5, 1.8, "mtp", 1, 1)


def at_drag(value: float = 1.0, stale: int = 0, texts: int = 1) -> Costs:
    costs, size = PROFILE.costs(), texts.bit_length()
    return replace(costs, tempo=costs.tempo.dearer(size, value), stale={size: stale})


def sequence(sid: int) -> Sequence:
    return Sequence(sid, [1, 2, 3], 3, SamplingParams(max_tokens=10_000), seed=1)


def row(drafted: int = 0, accepted: int = 0, sid: int = 1) -> RowRecord:
    reason = None if drafted else b.NO_CONFIDENCE
    return RowRecord(sid, "mtp" if drafted else "none", drafted, accepted, [0.8] * drafted, reason)


def test_plain_steps_tell_the_pace_and_those_with_drafts_beside_them_the_drag() -> None:
    costs = slow = PROFILE.costs()
    for _ in range(9):
        slow = slow.observe_targets([PLAIN._replace(seconds=2.0)] * 20)
    assert slow.target(1) == pytest.approx(2.0, rel=0.02)
    assert slow.drag == 1.0
    dear = costs
    for _ in range(40):
        dear = dear.observe_targets([PLAIN] * 4).observe_targets([DRAFTED._replace(seconds=2.25)] * 4)
    assert dear.drag == pytest.approx(1.25, rel=0.05)
    assert dear.within(2, 2).drag == 1.0  # for other numbers of texts nothing is known
    assert dear.target(5, "mtp") == pytest.approx(1.25 * 1.8, rel=0.05)
    assert dear.target(1) == pytest.approx(1.0, rel=0.02)
    assert dear.within(5, 5).target(5) == pytest.approx(
        costs.within(5, 5).target(5), rel=0.05
    )  # no drafts: no drag
    rested = dear.observe_targets([PLAIN] * 12, elapsed=16_000.0)
    assert rested.drag == pytest.approx(dear.drag, rel=0.02)  # nothing was seen of it
    wild = costs.observe_targets([PLAIN, *[DRAFTED._replace(seconds=90.0)] * 50])
    assert wild.drag <= 2.0**2  # of so many texts, and of such a spread


def test_without_plain_steps_for_long_the_machine_is_thought_slow_and_not_the_drafts_dear() -> None:
    costs = PROFILE.costs()
    for _ in range(9):
        costs = costs.observe_targets([PLAIN] * 4).observe_targets([DRAFTED] * 4)
    slow = costs
    for _ in range(50):
        slow = slow.observe_targets([DRAFTED._replace(seconds=3.6)] * 4)
    assert slow.target(5, "mtp") == pytest.approx(3.6, rel=0.02)
    assert slow.drag < 1.2
    assert slow.target(1) > 1.6
    assert slow.unseen == costs.unseen + 200
    assert slow.observe_targets([PLAIN]).unseen == 0


def test_what_an_audit_finds_wrong_with_the_machine_was_the_drag() -> None:
    costs = PROFILE.costs()
    for _ in range(50):
        costs = costs.observe_targets([DRAFTED._replace(seconds=2.7)] * 4)  # half as dear again
    assert costs.target(1) > 1.2
    audited = costs.observe_targets([PLAIN] * 12)  # and plain steps as ever
    assert audited.target(1) == pytest.approx(1.0, rel=0.1)
    assert audited.target(5, "mtp") == pytest.approx(2.7, rel=0.2)  # what both together take is still known
    few = costs.observe_targets([PLAIN._replace(seconds=0.5)])  # one step may be chance
    assert few.target(1) > 0.55


def test_what_reading_the_weights_takes_longer_is_the_same_for_any_number_of_rows() -> None:
    """Where others take the caches plain steps of one row took 0.30 to 0.86 ms, those of five 0.82 to 1.3."""
    costs = PROFILE.costs()
    slow = costs.observe_targets([PLAIN._replace(seconds=2.0)] * 200)
    assert slow.target(5) == pytest.approx(1.8 + 1.0, rel=0.15)
    fast = costs.observe_targets([PLAIN._replace(seconds=0.6)] * 200)
    assert fast.target(5) == pytest.approx(1.8 - 0.4, rel=0.15)
    assert costs.observe_targets([PLAIN._replace(seconds=1e-3)] * 200).target(1) > 0


@pytest.mark.parametrize("drafted", [0, 4])
def test_prompts_that_are_read_beside_texts_say_nothing_of_what_drafts_take(drafted: int) -> None:
    rows = [row(drafted=drafted, accepted=drafted)] if drafted else [row()]
    for more, taught in (
        (0, bool(drafted)),
        (12, False),
    ):  # of a prompt's rows one is judged at most: they are cheap
        budget = b.Budget(PROFILE.costs(), (MTP,))
        seconds = 0.5 * budget.costs.target(1 + drafted + more)
        records = [StepRecord(1 + drafted + more, seconds, 0.1, 0.0, rows, alike=20) for _ in range(4)]
        learnt = learning.observe(budget, [StepRecord(1, 1.0, 0.0, 0.0, [row()], alike=20)])
        learnt = learning.observe(learnt, records)
        assert (learnt.costs.drag != 1.0) is taught


def test_audits_become_rarer_while_they_confirm_what_is_known() -> None:
    stale = at_drag(stale=10_000)
    own = Audit()
    assert not own.due(stale, 1.0)  # nothing is drafted
    assert not own.due(
        at_drag(stale=2 * FIRST_AUDIT - 1), audit.CLEAR
    )  # an error will hardly turn that around
    assert Audit().due(at_drag(stale=2 * FIRST_AUDIT), audit.CLEAR)
    for every in (FIRST_AUDIT, SOONEST, 2 * SOONEST, 4 * SOONEST, RAREST):
        assert not own.due(at_drag(stale=every - 1), 1.02)
        assert own.due(at_drag(stale=every), 1.02)
    for drag in (1.2, 1.4, 1.7, 2.0, 2.4):  # each time it has changed
        own.due(at_drag(drag, RAREST), 1.02)
    assert not own.due(at_drag(2.4, SOONEST - 1), 1.02)
    assert own.due(at_drag(2.4, SOONEST), 1.02)
    own = Audit()
    for every in (FIRST_AUDIT, SOONEST, 2 * SOONEST, 4 * SOONEST, RAREST):
        own.due(at_drag(stale=every), 1.02)
    assert own.due(at_drag(1.2, RAREST), 1.02)  # it has changed
    assert not own.due(at_drag(1.2, RAREST // 2 - 1), 1.02)
    assert own.due(at_drag(1.2, RAREST // 2), 1.02)


def test_what_audits_take_of_what_drafts_bring_is_bounded() -> None:
    own = Audit()
    assert own.due(at_drag(stale=FIRST_AUDIT), 1.3)  # but for the first one
    least = round(AUDIT[1] * 0.3 / SPENT)
    assert SOONEST < least < RAREST
    assert not own.due(at_drag(stale=least - 1), 1.3)
    assert own.due(at_drag(stale=least + 1), 1.3)


def test_what_long_copies_take_says_little_about_short_drafts_that_were_seen() -> None:
    short, long = (
        Step(3, PROFILE.costs().target(3), "mtp", 1, 1),
        Step(17, PROFILE.costs().target(17), "ngram", 1, 1),
    )
    costs = PROFILE.costs()
    for _ in range(20):
        costs = costs.observe_targets([PLAIN] * 4).observe_targets([short] * 4)
        costs = costs.observe_targets([PLAIN] * 4).observe_targets(
            [long._replace(seconds=0.75 * long.seconds)] * 4
        )
    assert costs.target(17, "ngram") < 0.85 * long.seconds
    assert costs.target(3, "mtp") == pytest.approx(short.seconds, rel=0.05)
    assert costs.target(7, "mtp") < PROFILE.costs().target(7)  # of what was not seen it is thought a little
    assert (spread(1, 1), spread(2, 1), spread(4, 1), spread(12, 8), spread(24, 8)) == (0, 1, 2, 1, 2)


def never() -> Audit:
    """That is never due."""
    audit = Audit()
    audit._every = 1 << 60
    return audit


class Free:
    """A constraint that allows everything."""

    def masks(self, draft: Any) -> list[None]:
        return [None] * (len(draft) + 1)

    def commit(self, tokens: Any) -> None:
        pass


def always() -> Audit:
    """That is due wherever drafts pay."""
    audit = Audit()
    audit._every = 0
    return audit


def play(auto: AutoController, true: Costs, chance: float, steps: int) -> tuple[int, int]:
    """(steps with drafts, steps that measured) of one text whose tokens are kept by turns, at such prices."""
    drafting = measured = 0
    credit = 0.0
    for _ in range(steps):
        (limit, reason), *_ = auto.limits([sequence(1)], ["auto"], 16)
        kept = 0
        while kept < limit and (credit := credit + chance) >= 1.0:
            credit -= 1.0
            kept += 1
        drafting, measured = drafting + bool(limit), measured + (reason == b.MEASURING)
        seconds = 0.1 + 0.1 * limit if limit else 0.0
        own = row(limit, kept) if limit else replace_reason(row(), reason)
        auto.observe(StepRecord(1 + limit, true.target(1 + limit), seconds, 0.0, [own]))
    return drafting, measured


def replace_reason(record: RowRecord, reason: str | None) -> RowRecord:
    record.reason = reason
    return record


def test_drafts_that_were_thought_cheap_are_given_up_after_an_audit() -> None:
    cheap = replace(PROFILE, seconds=(1.0, 1.01, 1.04, 1.1, 1.2, 1.3))
    auto = AutoController(cheap, [replace(MTP, prior=(0.45, 0.45), known=True)])
    drafting, measured = play(auto, Profile((1, 2, 33), (1.0, 1.5, 10.0)).costs(), 0.45, 1000)
    assert measured
    assert auto.budget.costs.drag > 1.1
    assert drafting < 400
    without = AutoController(cheap, [replace(MTP, prior=(0.45, 0.45), known=True)])
    without._audits[1, False] = never()
    assert play(without, Profile((1, 2, 33), (1.0, 1.5, 10.0)).costs(), 0.45, 1000)[0] > 2 * drafting


def test_drafts_that_were_thought_too_dear_are_tried_and_found_to_pay() -> None:
    dear, true = replace(PROFILE, seconds=(1.0, 1.7, 2.5, 4.0, 7.0, 13.0)), PROFILE.costs()
    auto = AutoController(dear, [replace(MTP, prior=(0.6, 0.6), known=True)])
    assert auto.limits([sequence(1)], ["auto"], 16)[0][0] == 0
    drafting, _ = play(auto, true, 0.8, 1500)
    assert drafting > 500
    assert auto.budget.costs.drag < 0.9


@pytest.mark.parametrize(
    ("sampled", "first"), [(False, [64, 320, 1344, 3392]), (True, [128, 640, 2688, 10880])]
)
def test_trials_become_rarer_while_they_are_in_vain(sampled: bool, first: list[int]) -> None:
    own, at = Audit(sampled), []
    for now in range(40_000):
        if now >= own.next:
            own.tried(now)
            at.append(now)
    assert at[:4] == first
    assert at[-1] - at[-2] == LAST_TRIAL[sampled]
    own.paid(40_000)  # it was not in vain after all
    assert own.next == 40_000 + 4 * first[0]
    fresh = Audit(sampled)
    fresh.paid(5000)
    assert fresh.next == 5000 + first[0]


@pytest.mark.parametrize("sampled", [False, True])
def test_many_texts_are_tried_more_rarely_and_only_their_own_steps_count(sampled: bool) -> None:
    first = 5 * Audit(sampled).next
    many = Audit(sampled, 5)
    assert many.next == first
    many.back(1000)  # others were written before
    assert many.next == 1000 + first
    many.away(1100)
    many.back(9000)
    many.back(9500)  # still there
    assert many.next == 9000 + first - 100
    many.paid(9500)
    assert many.next == 9500 + first


def test_steps_of_other_texts_bring_no_trial_nearer() -> None:
    auto = AutoController(
        replace(PROFILE, seconds=(1.0, 2.5, 5.5, 9.0, 17.0, 33.0)), [replace(MTP, known=True)]
    )
    auto.limits([sequence(1)], ["auto"], 4)
    due = auto._audits[1, False].next
    auto.budget = replace(auto.budget, step=10)
    auto.limits([sequence(i) for i in (2, 3)], ["auto"] * 2, 4)
    auto.budget = replace(auto.budget, step=5000)
    auto.limits([sequence(4)], ["auto"], 4)
    assert auto._audits[1, False].next == due + 4990


def test_drafts_that_stay_dear_are_tried_a_few_times() -> None:
    assert hopeful(at_drag(1.5)).drag == pytest.approx(1.5 * HOPEFUL)
    assert hopeful(at_drag(0.9)).drag == pytest.approx(0.9 * HOPEFUL)
    auto = AutoController(
        replace(PROFILE, seconds=(1.0, 1.7, 2.5, 4.0, 7.0, 13.0)),
        [replace(MTP, prior=(0.6, 0.6), known=True)],
    )
    drafting, _ = play(auto, Profile((1, 2, 33), (1.0, 1.9, 30.0)).costs(), 0.6, 1500)
    assert TRIAL[0] <= drafting < 75  # a trial or two, and probes


def test_an_audit_is_a_rest_of_a_few_steps_with_its_reason() -> None:
    auto = AutoController(PROFILE, [replace(MTP, prior=(0.5, 0.5, 0.5))])
    auto._audits[1, False] = always()
    assert auto.limits([sequence(1)], ["auto"], 16) == [(0, b.MEASURING)]
    assert auto.rest([sequence(1)], [16]) in {(steps, None) for steps in AUDIT}
    assert auto.kind_limit(1, "mtp") == 0
    told = AutoController(PROFILE, [MTP])
    told._audits[2, False] = always()
    assert told.limits([sequence(1), sequence(2)], ["auto", 3], 16)[1][0] == 3
    assert (
        told.limits([sequence(1), sequence(2)], ["auto", 3], 16)[0][1] != b.MEASURING
    )  # no step would be plain


def test_of_steps_at_rest_the_median_of_the_last_ones_speaks_for_all() -> None:
    rest = Rest([1], ALIKE, Draft.empty(1, b.NO_CONFIDENCE))
    work = [Work(sequence(1), 1, True)]
    clock = 0.0
    for i in range(ALIKE):
        rest.untold.add(Ran(work, [row()], 1, Took(i, 0.25, 0.25, 0.0)))
        clock += 0.5 + i
    record = rest.tell()
    assert record is not None
    assert (record.times, record.target_rows, record.context) == (ALIKE, 1, sequence(1).committed)
    assert (record.draft_seconds, record.other_seconds) == (0.25, 0.25)
    assert record.target_seconds == (range(ALIKE)[-TYPICAL:])[(TYPICAL - 1) // 2]
    assert record.seconds + record.more_seconds == pytest.approx(clock)
    assert rest.tell() is None

    seen = Unlearnt()
    seen.add(record)
    seen.add(StepRecord(1, 1.0, 0.0, 0.0, [row()], times=2, more_seconds=1.0))
    assert not seen.drafted
    seen.add(StepRecord(5, 1.0, 0.1, 0.0, [row(4, 4)]))
    seen.add(StepRecord(1, 1.0, 0.0, 0.0, [row()]))
    seen.add(StepRecord(1, 1.0, 0.0, 0.0, [row()], masked=1))
    assert seen.drafted
    assert seen.steps == ALIKE + 5
    learnt = learning.observe(b.Budget(PROFILE.costs(), (MTP,)), seen.seen)
    assert learnt.step == seen.steps
    assert [record.alike for record in seen.seen] == [ALIKE, ALIKE + 2, 1, 1, 2]
    seen.learnt(0.0)
    assert (seen.seen, seen.steps, seen.drafted) == ([], 0, False)


def test_to_learn_what_steps_take_may_not_take_long() -> None:
    seen = Unlearnt()
    for steps in (MANY, 2 * MANY, 2 * MANY):
        needed = 0
        while not seen.enough:
            seen.add(StepRecord(1, 0.5, 0.25, 0.25, [row()]))
            needed += 1
        assert needed == steps
        seen.learnt((2 * MANY - 0.5) * LEARNING)


@pytest.mark.parametrize(("kept", "taken", "charged"), [(0, 1.6, 0.6), (1, 1.6, -0.4), (0, 99.0, 7.0)])
def test_a_probe_is_charged_what_it_took(kept: int, taken: float, charged: float) -> None:
    budget = b.Budget(PROFILE.costs(), (MTP,), credit=0.5, probing=frozenset({1}))
    after = learning.observe(budget, [StepRecord(2, taken - 0.4, 0.4, 0.0, [row(1, kept)])])
    expected = max(min(0.5 + learning.PROBE_SHARE * taken - charged, b.MOST_CREDIT), -2 * b.MOST_CREDIT)
    assert after.credit == pytest.approx(expected, abs=1e-6)
    assert after.costs.pace == budget.costs.pace  # it is no measure of steps that follow each other


def test_probes_of_one_step_share_the_credit() -> None:
    arm = b.arm_of(b.Budget(PROFILE.costs(), (MTP,)), 1, MTP)._replace(parked=True, wait=64)
    price = b.probe_price(PROFILE.costs(), MTP, 4)
    budget = b.Budget(PROFILE.costs(), (MTP,), arms={(i, "mtp"): arm for i in range(4)}, credit=2.5 * price)
    limits = []
    for i in range(4):
        budget, limit = b.settle(budget, MTP, i, 0, 4)
        limits.append(limit)
    assert limits == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("planning", "price", "hold"),
    [
        (0.0, 0.01, HOLD),
        (0.9, 0.01, 32),
        (9.0, 0.01, LONGEST_HOLD[True]),
        (9.0, 0.7, LONGEST_HOLD[False]),  # it promises little
    ],
)
def test_a_plan_holds_for_as_long_as_it_takes_to_pay_for_itself(
    planning: float, price: float, hold: int
) -> None:
    auto = AutoController(
        replace(PROFILE, rounds={"mtp": (0.01, price, 0.0)}), [replace(MTP, prior=(0.99,), known=True)]
    )
    auto._plan_seconds = planning
    limit = auto.limits([sequence(1)], ["auto"], 4)[0][0]
    assert limit == 4
    choice = auto._choice
    assert choice is not None
    assert choice.hold == pytest.approx(hold, abs=2)


@pytest.mark.parametrize(
    ("steps", "kept", "told"),
    [(LITTLE - 1, 0, 0), (LITTLE, LITTLE, 0), (MANY - 1, MANY - 1, 0), (MANY, MANY, MANY)],
)
def test_where_only_the_texts_have_changed_little_is_learnt_from_a_few_steps(
    steps: int, kept: int, told: int
) -> None:
    auto = AutoController(
        replace(PROFILE, rounds={"mtp": (0.01, 0.01, 0.0)}), [replace(MTP, prior=(0.99,), known=True)]
    )
    auto._plan_seconds = 9.0  # a plan holds as long as it may
    texts = [sequence(1), sequence(2)]
    auto.limits(texts, ["auto"] * 2, 4)
    for _ in range(steps):
        auto.observe(StepRecord(10, 1.8, 0.2, 0.0, [row(4, 4), row(4, 4, sid=2)]))
    other = replace(sequence(3), params=SamplingParams(max_tokens=10_000, temperature=0.8))
    auto.limits([sequence(1), other], ["auto"] * 2, 4)  # what was planned is not for such texts
    assert auto.budget.step == told
    assert auto._now == steps  # and nothing is lost
    assert b.arm_of(auto.budget, 1, MTP).hits[0] == pytest.approx(kept)
    auto._learn()
    assert auto.budget.step == steps
    assert b.arm_of(auto.budget, 1, MTP).hits[0] == pytest.approx(steps)
    assert auto.budget.totals["mtp"].first_tries == 2 * steps


def test_what_was_planned_for_several_texts_goes_on_for_those_that_take_their_places() -> None:
    auto = AutoController(
        replace(PROFILE, rounds={"mtp": (0.01, 0.01, 0.0)}), [replace(MTP, prior=(0.99,), known=True)]
    )
    plans: list[int] = []
    auto._plan_seconds = 9.0  # a plan holds as long as it may
    hold = LONGEST_HOLD[True]
    for step in range(hold + 1):
        ids = (1, 2) if step < 5 else (1, 3) if step < 9 else (4, 3)
        planned = auto.planned
        limits = auto.limits([sequence(i) for i in ids], ["auto"] * 2, 4)
        plans += [step] * (auto.planned - planned)
        assert [limit for limit, _ in limits] == [4, 4]
        assert all(auto.kind_limit(i, "mtp") == 4 for i in ids)
        auto.observe(StepRecord(10, 1.8, 0.2, 0.0, [row(4, 4, sid=i) for i in ids]))
    assert plans == [0, hold]
    auto.limits([sequence(i) for i in (4, 3, 5)], ["auto"] * 3, 4)
    assert auto.planned == 3  # more texts are another matter


def test_of_copies_that_are_kept_as_ever_nothing_is_learnt_before_the_next_one() -> None:
    auto = AutoController(PROFILE, [NGRAM])
    text = sequence(1)
    copied = [RowRecord(1, "ngram", 4, 4, [1.0] * 4, None) for _ in range(6)]
    for record in copied:
        auto.limits([text], ["auto"], 4)
        auto.offers([text], "ngram", [([1, 1], [0.9, 0.9])], anyway=False)
        auto.observe(StepRecord(5, 1.8, 0.0, 0.0, [record]))
    auto.offers([text], "ngram", [([1, 1], [0.9, 0.9])], anyway=False)
    learnt = [record.learnt for record in copied]
    assert learnt == [True] * 4 + [False] * 2  # a text's first copy is none of its own
    refused = RowRecord(1, "ngram", 4, 2, [1.0] * 4, None)
    auto.observe(StepRecord(5, 1.8, 0.0, 0.0, [refused]))
    assert not refused.learnt
    auto.offers([text], "ngram", [([1, 1], [0.9, 0.9])], anyway=False)
    assert refused.learnt
    assert b.arm_of(auto.budget, 1, NGRAM).hits[0] == 4
    auto._learn()
    assert b.arm_of(auto.budget, 1, NGRAM).hits[0] == 6  # the others too, once
    assert auto.budget.totals["ngram"].drafted == 28


class Resting(FixedController):
    """Drafts in one step of five and rests in between."""

    asked = rested = 0

    def limits(
        self, sequences: list[Sequence], wants: list[Any], drafter_max: int, others: int = 0
    ) -> list[Limit]:
        self.asked += 1
        k = self.k if self.asked % 2 else 0
        return [(k, None if k else b.NO_CONFIDENCE) for _ in sequences]

    def rest(self, sequences: list[Sequence], rooms: list[int]) -> tuple[int, None]:
        rested, self.rested = self.rested, self.asked
        return 0 if self.asked % 2 or rested == self.asked else 5, None


def test_after_a_rest_the_drafter_has_its_hidden_states_again() -> None:
    setup = Setup(drafter="mtp", k=3)
    plain = run(
        make_engine(replace(setup, drafter="none")), prompts(1), SamplingParams(max_tokens=60, temperature=0)
    )
    engine = make_engine(setup, controller=Resting(3))
    (text,) = run(engine, prompts(1), SamplingParams(max_tokens=60, temperature=0))
    assert text.token_ids == plain[0].token_ids
    assert text.stats.reasons[b.NO_CONFIDENCE] > 10
    drafted = text.stats.steps - sum(text.stats.reasons.values())
    assert drafted >= (text.stats.reasons[b.NO_CONFIDENCE]) // 5  # each time that it was asked


def test_a_twin_never_drafts_and_shares_the_cache() -> None:
    setup = Setup(drafter="mtp", k=3, max_batch=8, pages=400)
    engine = make_engine(setup)
    twin = engine.twin()
    assert twin.state.cache is engine.state.cache
    assert twin.drafter_names == ["none"]
    params = SamplingParams(max_tokens=30, temperature=0.8, seed=3)
    for one in (engine, twin):
        for i, prompt in enumerate(prompts(3)):
            one.add(str(i), prompt, params)
    texts: list[dict[str, list[int]]] = [{}, {}]
    drafted = [0, 0]
    while engine.has_work or twin.has_work:
        for at, one in enumerate((engine, twin)):
            for delta in one.step():
                texts[at].setdefault(delta.request, []).extend(delta.token_ids)
                drafted[at] += delta.stats.drafted if delta.stats is not None else 0
    assert texts[0] == texts[1]
    assert drafted[0] > 0
    assert drafted[1] == 0
    assert engine.state.cache.open_sequences == 0


def test_what_rounds_take_is_known_for_each_number_of_texts() -> None:
    costs = replace(PROFILE, rounds={"mtp": (0.1, 0.1, 0.01)}).costs()
    for _ in range(60):
        costs = costs.observe_rounds("mtp", [Round(2, 32, 2 * (0.1 + 0.2 + 0.32), 16)])
        costs = costs.observe_rounds("mtp", [Round(2, 2, 0.1 + 0.2 + 0.02, 1)])
    cold = costs.observe_rounds("mtp", [Round(2, 32, 9.0, 16, False)] * 20)
    assert cold.crowds == costs.crowds
    assert max(costs.crowds.values()).value > 1.1
    first = replace(PROFILE, rounds={"mtp": (0.1, 0.1, 0.01)}).costs()
    for _ in range(4):  # what nobody has seen yet is soon believed
        first = first.observe_rounds("mtp", [Round(2, 32, 2 * (0.1 + 0.2 + 0.32), 16)])
    new = first.within(16, 16).drafting("mtp", 16)
    assert new[0] + 2 * new[1] + 32 * new[2] == pytest.approx(2 * 0.62, rel=0.1)
    assert hopeful(costs).crowds == costs.crowds
    rested = costs.idle("mtp", 1400)  # steps without a draft
    assert max(rested.crowds.values()).value == pytest.approx(
        max(costs.crowds.values()).value ** 0.5, rel=0.01
    )
    many, one = costs.within(16, 16).drafting("mtp", 16), costs.within(1, 1).drafting("mtp", 1)
    assert many[0] + 2 * many[1] + 32 * many[2] == pytest.approx(2 * 0.62, rel=0.1)
    assert one[0] + 2 * one[1] + 2 * one[2] == pytest.approx(0.32, rel=0.15)


@pytest.mark.parametrize(
    ("texts", "constraint", "most"),
    [(TABLE_ROWS + 1, None, 0), (1, None, max(AUDIT)), (1, Free(), max(AUDIT))],
)
def test_texts_whose_steps_teach_nothing_are_not_audited_for_ever(
    texts: int, constraint: Any, most: int
) -> None:
    """Nothing is learnt of steps beyond the table: an audit would stay due. What masks take is timed for itself."""
    cheap = Profile((1, 4 * TABLE_ROWS), (1.0, 1.1), rounds={"mtp": (0.0, 0.0, 0.0)})
    auto = AutoController(cheap, [replace(MTP, prior=(0.3, 0.3, 0.3))])
    drafted = measured = 0
    for _ in range(3 * SOONEST):
        group = [replace(sequence(i), constraint=constraint) for i in range(texts)]
        limits = auto.limits(group, ["auto"] * texts, 16)
        drafted, measured = drafted + (limits[0][0] > 0), measured + (limits[0][1] == b.MEASURING)
        rows = [RowRecord(i, "mtp", k, min(k, 1), [0.8] * k, reason) for i, (k, reason) in enumerate(limits)]
        count = texts + sum(k for k, _ in limits)
        seconds = cheap.costs().target(count)
        masked, masks = (texts, 0.3 * count) if constraint is not None else (0, 0.0)
        auto.observe(StepRecord(count, seconds, 0.0, 0.0, rows, masked=masked, mask_seconds=masks))
    assert measured <= most
    assert (measured > 0) is (most > 0)
    assert drafted > 0


STEEP = Profile((1, 2, 33), (1e-5, 3e-5, 7e-4), rounds={"mtp": (1e-5, 1e-5, 0.0)})  # nothing would pay


def plans_of(texts: list[Sequence], steps: int, auto: AutoController, seconds: float = 1e-5) -> list[int]:
    """Plans that were thought out while the texts are written one after the other, by text."""
    made: list[int] = []
    for text in texts:
        made.append(-auto.planned)
        for _ in range(steps):
            ((limit, reason),) = auto.limits([text], ["auto"], 16)
            assert (limit, reason) == (0, b.PARKED_BY_COST)
            record = RowRecord(text.id, "none", 0, 0, [], reason)
            auto.observe(StepRecord(1, seconds, 0.0, 0.0, [record]))
        auto.forget(text.id)
        made[-1] += auto.planned
    return made


def test_a_plan_without_drafts_serves_the_next_texts_of_which_nothing_is_known() -> None:
    auto = AutoController(STEEP, [MTP])
    made = plans_of([sequence(i) for i in range(120)], 32, auto)
    assert made[0] == 1
    assert 1 < sum(made) <= 120 * 32 // LONGEST_IDLE[0] + 2  # for so many steps, then it is made anew
    sampled = replace(sequence(150), params=SamplingParams(max_tokens=99, temperature=0.8))
    assert plans_of([sampled, replace(sampled, id=151)], 8, auto) == [1, 0]  # another kin
    auto.budget = b.meet(auto.budget, MTP, [sequence(160)])
    assert plans_of([sequence(160)], 8, auto) == [1]  # something is known of this one
    assert plans_of([sequence(161)], 140, auto) == [1]  # one text that goes on gets a plan of its own


def test_what_nearly_pays_is_tried_though_texts_come_and_go() -> None:
    """A plan without drafts served them for 512 steps, and no trial was thought of."""

    def tried(factor: float) -> list[int]:
        nearly = Profile((1, 2, 33), (1e-5, 1e-5 * factor, 32e-5 * factor), rounds={"mtp": (1e-7, 1e-7, 0.0)})
        auto = AutoController(nearly, [replace(MTP, prior=(0.7, 0.7), known=True)])
        auto._plan_seconds, steps = 1e-3, []
        for now in range(400):
            text = sequence(now // 20)
            ((limit, _),) = auto.limits([text], ["auto"], 16)
            steps += [now] * (limit > 0)
            seconds = 1.3 * auto.budget.costs.target(1 + limit) if limit else 1e-5
            auto.observe(
                StepRecord(1 + limit, seconds, 1e-7 * limit, 0.0, [replace(row(limit), sequence_id=text.id)])
            )
            if now % 20 == 19:
                auto.forget(text.id)
        return steps

    assert tried(1.9)
    assert tried(1.9)[0] >= 64
    assert not tried(4.0)  # far from it


def test_the_first_rounds_after_plain_steps_say_nothing_of_what_rounds_take() -> None:
    budget = b.Budget(PROFILE.costs(), (MTP,))

    def learnt(alike: int) -> tuple[float, float, float]:
        records = [StepRecord(5, 1.8, 3.0, 0.0, [row(4, 4)], alike=alike) for _ in range(8)]
        return learning.observe(budget, records).costs.rounds["mtp"]

    assert learnt(learning.WARM - 1) == budget.costs.rounds["mtp"]
    assert sum(learnt(learning.WARM)) > 1.2 * sum(budget.costs.rounds["mtp"])


def test_where_steps_are_dear_beside_planning_every_text_gets_a_plan_of_its_own() -> None:
    slow = Profile(STEEP.rows, tuple(1e5 * s for s in STEEP.seconds), rounds={"mtp": (1.0, 1.0, 0.0)})
    auto = AutoController(slow, [MTP])
    assert plans_of([sequence(i) for i in range(6)], 16, auto, 1.0) == [1] * 6


def test_an_audit_is_long_where_drafts_promise_little() -> None:
    """Plain steps after drafts are cold for some dozens: what the twelfth takes makes drafts seem cheap."""
    assert Audit().steps(1.1) == AUDIT[1] > 4 * COLD
    assert COLD < Audit().steps(2.0) == AUDIT[0] < AUDIT[1]


def arrivals(
    auto: AutoController, texts: int, every: int, steps: int, **params: Any
) -> tuple[int, list[list[int]]]:
    """(plans, limits of each step) where a text is done and another one comes `every` so many steps, its prompt read in a
    step of its own."""
    planned, limits = auto.planned, []
    ids, fresh = list(range(texts)), texts
    for now in range(steps):
        reading = now % every == every - 1
        group = [replace(sequence(i), params=SamplingParams(max_tokens=999, **params)) for i in ids]
        group = group[1:] if reading else group
        got = auto.limits(group, ["auto"] * len(group), 16, 8 * reading)
        limits.append([limit for limit, _ in got])
        rows = [RowRecord(s.id, "mtp", k, k, [0.9] * k, why) for s, (k, why) in zip(group, got, strict=True)]
        count = len(group) + sum(limits[-1]) + 8 * reading
        auto.observe(StepRecord(count, auto.budget.costs.target(count), 0.0, 0.0, rows))
        if reading:
            auto.forget(ids[0])
            ids, fresh = [*ids[1:], fresh], fresh + 1
    return auto.planned - planned, limits


def test_where_nothing_is_drafted_texts_that_come_and_go_need_no_plans() -> None:
    auto = AutoController(STEEP, [MTP])
    plans, limits = arrivals(auto, 8, 4, 200, temperature=0.8)
    assert not any(map(any, limits))
    assert plans <= 4
    auto = AutoController(STEEP, [MTP])
    auto.budget = b.meet(auto.budget, MTP, [sequence(100)])
    texts = [sequence(i) for i in range(7)]
    auto.limits(texts, ["auto"] * 7, 16)
    known = auto._choice
    auto.limits([*texts, sequence(100)], ["auto"] * 8, 16)  # something is known of all of them
    assert auto._choice is not known


def test_beside_a_prompt_that_is_read_drafts_go_on_as_planned() -> None:
    cheap = Profile((1, 65), (1.0, 1.2), rounds={"mtp": (0.01, 0.01, 0.0)})
    auto = AutoController(cheap, [replace(MTP, known=True)])
    plans, limits = arrivals(auto, 4, 5, 60)
    reading = limits[4::5]
    assert all(len(step) == 3 and all(step) for step in reading)
    assert all(all(step) for step in limits)
    assert plans < 60 - len(reading)
