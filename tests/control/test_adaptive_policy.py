"""The policy of `auto`, through what it plans and what it observes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from paceline.control.acceptance import SIBLINGS, likeliest
from paceline.control.adaptive import AdaptivePolicy, KnownPair
from paceline.control.base import DraftPlan, PlannedRow, PlanRow, Proposal, RowOutcome, StepOutcome, heat_of
from paceline.control.betting import LOOK, SHARE, STAKE, STAKE_STEPS, Purse
from paceline.control.cost_model import CostTable, DraftCost
from paceline.control.reasons import NoDraftReason
from paceline.tree import Shape

ROWS = (1, 2, 3, 5, 9, 17, 33)
CHEAP = CostTable(
    ROWS, tuple(0.01 * (1 + 0.03 * (n - 1)) for n in ROWS), {"mtp": DraftCost(2e-4, 5e-4, 5e-5)}
)
DEAR = CostTable(ROWS, tuple(0.01 * n for n in ROWS), {"mtp": DraftCost(5e-3, 5e-3, 1e-3)})
ROWS_COST = CostTable(ROWS, tuple(0.01 * (1 + 0.1 * (n - 1)) for n in ROWS), CHEAP.drafts)
DEARER = CostTable(ROWS, tuple(0.01 * (1 + 0.4 * (n - 1)) for n in ROWS), CHEAP.drafts)
GOOD = {("mtp", False): KnownPair((0.8, 0.8))}


def rows(count: int = 1, first: int = 0, room: int = 100, heat: int = 0) -> list[PlanRow]:
    return [PlanRow(first + i, "auto", room, "mtp", 8, heat) for i in range(count)]


def run(
    policy: AdaptivePolicy,
    table: CostTable,
    steps: int,
    chance: float,
    *,
    batch: int = 1,
    slower: float = 1.0,
    first: int = 0,
    heat: int = 0,
) -> list[DraftPlan]:
    """The plans of so many steps in which each drafted token is kept with that chance, until the drafter is given up."""
    rng, plans, dense = random.Random(3), [], table.dense(200)
    cost = table.drafts["mtp"]
    for _ in range(steps):
        plan = policy.plan(rows(batch, first, heat=heat), [None] * batch)
        outcomes = []
        for i, row in enumerate(plan.rows):
            kept = 0
            while kept < row.limit and rng.random() < chance:
                kept += 1
            outcomes.append(RowOutcome(first + i, row.drafter, row.limit, kept, (chance,) * row.limit))
        limits = [row.limit for row in plan.rows]
        draft = cost.base + cost.call * max(limits) + cost.token * sum(limits) if any(limits) else 0.0
        target = dense[batch + sum(limits) - 1] * (slower if any(limits) else 1.0)
        policy.observe(StepOutcome(tuple(outcomes), target, {"mtp": draft} if draft else {}))
        plans.append(plan)
        if all(row.reason == NoDraftReason.GIVEN_UP for row in plan.rows):
            break
    return plans


def drafted(plans: list[DraftPlan]) -> int:
    return sum(row.limit > 0 for plan in plans for row in plan.rows)


def test_a_known_pair_drafts_from_the_first_step() -> None:
    (plan,) = run(AdaptivePolicy(CHEAP, GOOD), CHEAP, 1, 0.8)
    assert plan.rows[0].drafter == "mtp"
    assert plan.rows[0].limit >= 3
    assert plan.stop.price > 0
    assert plan.stop.call > 0
    assert len(plan.rows[0].chance) == plan.rows[0].limit


def test_a_drafter_that_does_not_fit_is_found_out_once_for_all_requests() -> None:
    policy = AdaptivePolicy(ROWS_COST, GOOD)
    first = run(policy, ROWS_COST, 300, 0.02)
    assert drafted(first[:5]) == 5
    assert drafted(first) < 20
    assert len(first) < 200
    assert first[-1].rows[0].reason == NoDraftReason.GIVEN_UP
    later = run(policy, ROWS_COST, 30, 0.02, first=1)
    assert drafted(later) <= 16  # a new request does not start again at what the pair was known for


def test_a_drafter_that_keeps_nothing_in_any_text_is_given_up_but_for_one_text_of_eight() -> None:
    policy = AdaptivePolicy(ROWS_COST)
    for n in range(100, 104):
        run(policy, ROWS_COST, 20, 0.0, first=n)
    gone = [run(policy, ROWS_COST, 1, 0.0, first=n)[0].rows[0].reason for n in range(1, 33)]
    assert gone.count(NoDraftReason.GIVEN_UP) == 28
    (stays,) = (n for n, reason in enumerate(gone[:8], 1) if reason != NoDraftReason.GIVEN_UP)
    assert drafted(run(policy, ROWS_COST, 2000, 0.95, first=stays)[-100:]) >= 90
    assert drafted(run(policy, ROWS_COST, 20, 0.95, first=40)) == 20  # the next text knows of it


def test_a_drafter_that_pays_is_never_given_up() -> None:
    plans = run(AdaptivePolicy(ROWS_COST), ROWS_COST, 3000, 0.4)
    assert NoDraftReason.GIVEN_UP not in {plan.rows[0].reason for plan in plans}


def test_texts_that_hardly_draft_go_on_without_the_network_and_most_of_those_after_them() -> None:
    policy = AdaptivePolicy(DEARER, {("mtp", False): KnownPair((0.3, 0.3))})

    def steps(text: int, most: int, chance: float) -> int:
        """Until the network is given up."""
        return len(run(policy, DEARER, most, chance, first=text))

    assert all(64 < steps(text, 200, 0.3) < 120 for text in range(3))
    new = [run(policy, DEARER, 1, 0.3, first=text)[0].rows[0].reason for text in range(10, 26)]
    assert new.count(NoDraftReason.GIVEN_UP) == 14
    stays = next(i for i, reason in enumerate(new, 10) if reason != NoDraftReason.GIVEN_UP)
    assert steps(stays, 200, 0.95) == 200  # it pays in one that has it still
    assert steps(40, 60, 0.3) == 60  # and so the next texts have it


def test_steps_of_several_texts_give_nothing_up() -> None:
    plans = run(AdaptivePolicy(DEAR, GOOD), DEAR, 300, 0.9, batch=4)
    assert NoDraftReason.GIVEN_UP not in {row.reason for plan in plans for row in plan.rows}


def test_a_parked_request_is_probed_and_drafts_again_when_its_tokens_are_kept() -> None:
    policy = AdaptivePolicy(DEARER, GOOD)
    run(policy, DEARER, 300, 0.3, batch=2)
    assert drafted(run(policy, DEARER, 3000, 0.95, batch=2)[-100:]) >= 90


def test_a_network_that_did_not_pay_is_not_thought_of_for_some_steps() -> None:
    policy = AdaptivePolicy(CHEAP, {("mtp", False): KnownPair((0.01,))})
    run(policy, CHEAP, 18, 0.0)
    request = policy._requests[0]
    assert request.idle > policy._step + 1
    assert (
        policy.plan(rows(1), [Proposal((0.95,) * 8)]).rows[0].drafter == "ngram"
    )  # what is found is taken all the same
    policy.observe(StepOutcome((RowOutcome(0, "mtp", 1, 1, (0.9,)),), 0.01, {"mtp": 1e-3}))
    assert request.idle == 0  # whatever was drafted is news


def test_temperatures_are_learnt_apart_and_begin_at_the_nearest_one() -> None:
    policy = AdaptivePolicy(CHEAP, {("mtp", True): KnownPair((0.8, 0.8))})
    heats = [heat_of(t) for t in (0.0, 0.3, 0.6, 0.7, 0.8, 1.0)]
    assert heats == sorted(heats)
    assert (heats[0], heats[2], len({*heats[3:]})) == (0, heats[3], 3)

    def limit(heat: int, number: int, kept: int) -> int:
        planned = policy.plan([PlanRow(number, "auto", 100, "mtp", 8, heat)], [None]).rows[0]
        policy.observe(StepOutcome((RowOutcome(number, "mtp", 4, kept, (0.5,) * 4),), 0.01, {"mtp": 1e-3}))
        return planned.limit

    cool = [limit(heats[2], 0, 4) for _ in range(60)]
    hot = [limit(heats[5], 1, 0) for _ in range(60)]
    assert hot[0] >= cool[0] > 2  # what was seen at the other temperature
    assert hot[-1] == 0
    assert limit(heats[2], 2, 4) >= cool[-1] > 2  # and it stays as it was there
    assert limit(heat_of(1.3), 3, 4) <= 2  # nearest to the hot one


def test_bets_take_little_of_the_time() -> None:
    policy = AdaptivePolicy(DEARER, GOOD)
    run(policy, DEARER, 500, 0.3, batch=2)
    assert 1 <= drafted(run(policy, DEARER, 2000, 0.3, batch=2)) <= 40


STEEP = CostTable(ROWS, tuple(0.04 * (1 + 0.17 * (n - 1)) for n in ROWS), {"mtp": DraftCost(0.0, 0.015, 0.0)})


def test_an_unknown_pair_begins_with_drafts_of_several_tokens_though_the_usual_acceptance_would_not_pay() -> (
    None
):
    plans = run(AdaptivePolicy(STEEP), STEEP, 128, 0.95)
    assert plans[0].rows[0].limit >= 2
    assert drafted(plans[-60:]) >= 59
    assert plans[-1].rows[0].limit >= 4
    assert (
        not run(AdaptivePolicy(STEEP, {("mtp", False): KnownPair((0.2,))}), STEEP, 40, 0.0)[-1].rows[0].limit
    )


def test_what_bets_lose_is_bounded() -> None:
    """Of a pair that keeps nothing: 1% of a minute at first, or some steps, and then a share of the time."""
    for step in (0.003, 0.04, 0.15):
        table = CostTable(
            ROWS, tuple(step * (1 + 0.3 * (n - 1)) for n in ROWS), {"mtp": DraftCost(0.0, 0.4 * step, 0.0)}
        )
        policy, lost, spent = AdaptivePolicy(table), 0.0, 0.0
        for text in range(20):
            for _ in range(100):
                row = replace(rows(1, first=text)[0], follows=False)
                limit = policy.plan([row], [None]).rows[0].limit
                target, draft = step * (1 + 0.3 * limit), 0.4 * step * limit
                outcome = RowOutcome(text, "mtp" if limit else None, limit, 0, (0.5,) * limit)
                policy.observe(StepOutcome((outcome,), target, {"mtp": draft} if limit else {}))
                lost += target + draft - step
                spent += target + draft
            policy.forget(text)
        worst = 8 * 0.7 * step  # of one step that was still allowed
        assert 0 < lost <= min(STAKE, STAKE_STEPS * step) + SHARE * spent + worst


def test_a_price_that_was_measured_four_times_too_high_is_found_out_in_the_first_text() -> None:
    wrong = replace(CHEAP, drafts={"mtp": DraftCost(0.0, 0.02, 0.0)})
    policy = AdaptivePolicy(wrong, GOOD)
    true = replace(CHEAP, drafts={"mtp": DraftCost(0.0, 0.005, 0.0)})
    plans = run(policy, true, 128, 0.9)
    assert not plans[0].rows[0].limit
    assert drafted(plans[-60:]) >= 55


def test_what_was_learnt_is_what_the_next_policy_begins_with() -> None:
    policy = AdaptivePolicy(STEEP)
    run(policy, STEEP, 200, 0.9)
    learnt = policy.learnt()
    assert learnt.table.seconds == pytest.approx(STEEP.seconds, rel=0.1)
    assert learnt.table.drafts["mtp"] == pytest.approx(STEEP.drafts["mtp"], rel=0.1, abs=1e-4)
    assert learnt.pairs["mtp", False].acceptance[0] == pytest.approx(0.9, abs=0.05)
    assert learnt.drafts["mtp"] > 100
    assert AdaptivePolicy(CHEAP).learnt().pairs == {}
    assert AdaptivePolicy(CHEAP).learnt().table == CHEAP
    (plan,) = run(AdaptivePolicy(learnt.table, learnt.pairs), STEEP, 1, 0.9)
    assert plan.rows[0].limit >= 3


def test_the_purse_saves_for_what_it_cannot_afford() -> None:
    purse = Purse.of(0.001)
    assert purse.left == pytest.approx(STAKE_STEPS * 0.001)
    assert Purse.of(1.0).left == STAKE
    purse.settle(purse.left)
    assert not purse.affords(0.02)
    purse.earn(100.0)
    assert purse.left == pytest.approx(0.04)
    assert purse.affords(0.02)
    purse.settle(-1.0)  # a gain does not pay for more than two
    assert purse.left == pytest.approx(0.04)


def test_a_network_that_no_acceptance_would_pay_for_is_asked_again_from_time_to_time() -> None:
    policy = AdaptivePolicy(DEAR, GOOD)
    plans = run(policy, DEAR, 1000, 0.0, batch=4)
    assert 1 <= drafted(plans) <= 1 + 1000 // LOOK  # a price can be wrong
    reasons = {row.reason for plan in plans for row in plan.rows if not row.limit}
    assert NoDraftReason.PARKED_BY_COST in reasons


def test_one_plain_step_in_128_drafted_ones() -> None:
    plans = run(AdaptivePolicy(CHEAP, GOOD), CHEAP, 129 * 3, 0.9)
    measuring = [i for i, plan in enumerate(plans) if plan.rows[0].reason == NoDraftReason.MEASURING]
    assert measuring == [128, 257, 386]


def test_steps_that_verify_dearer_than_measured_end_drafting() -> None:
    policy = AdaptivePolicy(CHEAP, GOOD)
    assert drafted(run(policy, CHEAP, 20, 0.5)) == 20
    assert drafted(run(policy, CHEAP, 600, 0.5, slower=4.0)[-100:]) <= 5


def test_larger_batches_draft_less() -> None:
    steep = CostTable(ROWS, tuple(0.01 * (1 + 0.1 * (n - 1)) for n in ROWS), CHEAP.drafts)
    (alone,), (many,) = (run(AdaptivePolicy(steep, GOOD), steep, 1, 0.8, batch=n) for n in (1, 16))
    assert alone.rows[0].limit > max(row.limit for row in many.rows)


def test_a_request_that_asks_for_a_number_gets_it() -> None:
    policy = AdaptivePolicy(DEAR, GOOD)
    plan = policy.plan([PlanRow(0, 3, 9, "mtp", 8), PlanRow(1, 0, 9, "mtp", 8)], [None, None])
    assert [(row.limit, row.reason) for row in plan.rows] == [(3, None), (0, NoDraftReason.DISABLED)]
    policy.observe(StepOutcome((RowOutcome(0, "mtp", 3, 1, (0.5,) * 3), RowOutcome(1)), 0.02, {"mtp": 0.01}))


@pytest.mark.parametrize(
    ("row", "proposal", "reason"),
    [
        (PlanRow(0, "auto", 0, "mtp", 8), None, NoDraftReason.NO_ROOM),
        (PlanRow(0, "auto", 0), None, NoDraftReason.NO_DRAFTER),
        (PlanRow(0, "auto", 9), None, NoDraftReason.NO_DRAFTER),
        (PlanRow(0, "auto", 9), Proposal(()), NoDraftReason.NO_PROPOSAL),
        (PlanRow(0, "auto", 9, "mtp", 0), None, NoDraftReason.NO_PROPOSAL),
        (PlanRow(0, 0, 9, "mtp", 8), Proposal((0.9,)), NoDraftReason.DISABLED),
    ],
)
def test_reasons(row: PlanRow, proposal: Proposal | None, reason: NoDraftReason) -> None:
    (planned,) = AdaptivePolicy(CHEAP, GOOD).plan([row], [proposal]).rows
    assert (planned.limit, planned.reason) == (0, reason)


def test_a_confident_proposal_is_taken_instead_of_the_network() -> None:
    policy = AdaptivePolicy(CHEAP, GOOD)
    plan = policy.plan(rows(2), [Proposal((0.95,) * 8), None])
    assert [row.drafter for row in plan.rows] == ["ngram", "mtp"]
    plan = policy.plan(rows(1), [Proposal((0.3,) * 8)])
    assert plan.rows[0].drafter == "mtp"


def test_proposals_are_learnt_from_though_nobody_took_them() -> None:
    """A row that could have copied right for long does so, at a confidence that says no."""
    policy = AdaptivePolicy(DEAR)
    dear_row, weak = PlanRow(0, "auto", 50), Proposal((0.5, 0.6, 0.6))
    assert policy.plan([dear_row], [weak]).rows[0].limit == 0
    policy = AdaptivePolicy(CostTable(ROWS, tuple(0.01 * (1 + 0.7 * (n - 1)) for n in ROWS)))
    assert policy.plan([dear_row], [weak]).rows[0].limit == 0
    for _ in range(60):
        policy.observe(StepOutcome((RowOutcome(0, unused=(0.5,), agreed=1),), 0.01))
    assert policy.plan([dear_row], [weak]).rows[0].drafter == "ngram"


def test_rejected_matches_keep_their_request_from_copying() -> None:
    policy = AdaptivePolicy(CHEAP)
    row, match = PlanRow(0, "auto", 50), Proposal((0.5, 0.6, 0.7))
    assert policy.plan([row], [match]).rows[0].drafter == "ngram"
    for _ in range(200):
        policy.observe(StepOutcome((RowOutcome(0, "ngram", 3, 0, match.confidence),), 0.011))
    assert policy.plan([row], [match]).rows[0].reason == NoDraftReason.NO_CONFIDENCE


def test_prompts_that_are_read_beside_leave_no_room_for_dear_rows() -> None:
    steep = CostTable(ROWS, tuple(0.01 * (1 + 0.1 * (n - 1)) for n in ROWS), CHEAP.drafts)
    policy = AdaptivePolicy(steep, GOOD)
    alone = policy.plan(rows(), [None]).rows[0].limit
    beside = policy.plan(rows(), [None], prefill_rows=64).rows[0].limit
    assert beside >= alone > 0  # the prompt is paid for anyway: a row more hardly matters


def test_the_alarm_comes_once() -> None:
    said: list[str] = []
    policy = AdaptivePolicy(CHEAP, GOOD, said.append)
    run(policy, CHEAP, 4000, 0.1, batch=4)
    assert sum("should reach about 80%" in line for line in said) == 1


def test_a_pair_measured_at_another_temperature_is_soon_outweighed_and_no_alarm_for_hotter_texts() -> None:
    said: list[str] = []
    known = KnownPair((0.9, 0.9), heat=heat_of(0.6))
    told = AdaptivePolicy(CHEAP, {("mtp", True): known}, said.append)
    hot = run(told, CHEAP, 400, 0.1, heat=heat_of(1.4))
    assert drafted(hot[:3]) == 3
    other = run(AdaptivePolicy(CHEAP), CHEAP, 400, 0.1, heat=heat_of(1.4))
    assert drafted(hot[-200:]) <= drafted(other[-200:]) + 4  # bets, which do not ask what was known
    assert said == []
    told = AdaptivePolicy(CHEAP, {("mtp", True): known}, said.append)
    run(told, CHEAP, 4000, 0.1, batch=4, heat=heat_of(0.6))  # as hot as those: it does not fit
    assert sum("should reach about 90%" in line for line in said) == 1


def test_no_alarm_for_a_pair_that_is_as_known() -> None:
    said: list[str] = []
    run(AdaptivePolicy(CHEAP, GOOD, said.append), CHEAP, 400, 0.8)
    assert said == []


def test_a_forgotten_request_starts_as_a_new_one() -> None:
    policy = AdaptivePolicy(CHEAP, GOOD)
    run(policy, CHEAP, 100, 0.8, batch=2)
    before = policy.plan(rows(1, first=9), [None]).rows[0]
    policy.forget(0)
    assert policy.plan(rows(1, first=0), [None]).rows[0].chance == before.chance


def test_nothing_is_measured_of_a_step_with_other_work_in_it() -> None:
    policy = AdaptivePolicy(CHEAP, GOOD)
    for prefill, timed in ((64, True), (0, False)):
        for _ in range(60):
            policy.plan(rows(), [None])
            outcome = (RowOutcome(0, "mtp", 4, 4, (0.8,) * 4),)
            policy.observe(StepOutcome(outcome, 9.0, {"mtp": 9.0}, prefill, timed))
    assert policy.plan(rows(), [None]).rows[0].limit >= 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0])
def test_times_that_are_none_are_ignored(bad: float) -> None:
    policy = AdaptivePolicy(CHEAP, GOOD)
    for _ in range(50):
        plan = policy.plan(rows(), [None])
        row = RowOutcome(
            0, "mtp", plan.rows[0].limit, plan.rows[0].limit, (float("nan"),) * plan.rows[0].limit
        )
        policy.observe(StepOutcome((row,), bad, {"mtp": bad}))
    assert policy.plan(rows(), [None]).rows[0].limit > 0


def with_trees(chance: float, second: float, table: CostTable = CHEAP, steps: int = 300) -> list[DraftPlan]:
    """Plans where first candidates are kept with `chance`, and second ones, if the first is wrong, with `second`."""
    policy, rng, plans = (
        AdaptivePolicy(table, {("mtp", False): KnownPair((chance,) * 8)}),
        random.Random(4),
        [],
    )
    row, dense, cost = (
        PlanRow(0, "auto", 100, "mtp", 16, tree=Shape(6, 2)),
        table.dense(200),
        table.drafts["mtp"],
    )
    for _ in range(steps):
        plan = policy.plan([row], [None])
        (planned,) = plan.rows
        right = [0 if rng.random() < chance else 1 if rng.random() < second else 2 for _ in range(6)]
        kept = next((j for j, rank in enumerate(right) if rank), 6)
        if planned.tree is None:
            outcome = RowOutcome(0, planned.drafter, planned.limit, min(kept, planned.limit))
            tokens, calls = planned.limit, planned.limit
        else:
            flags, depths, trunk = path_of(planned, chance, right)
            outcome = RowOutcome(0, "mtp", trunk, min(kept, trunk), likeliest=flags, levels=max(depths))
            tokens, calls = 2 * len(flags), max(depths)
        draft = cost.base + cost.call * calls + cost.token * tokens if tokens else 0.0
        policy.observe(StepOutcome((outcome,), dense[outcome.tokens], {"mtp": draft} if draft else {}))
        plans.append(plan)
    return plans


def path_of(planned: PlannedRow, chance: float, right: list[int]) -> tuple[tuple[bool, ...], list[int], int]:
    """Of the tree's likeliest tokens: whether each is kept, how deep they stand, and how many are first candidates."""
    assert planned.tree is not None
    promised, depths = likeliest((chance,) * 6, planned.tree)
    promised, depths = promised[: planned.limit], depths[: planned.limit]
    flags, trunk = [], 0
    for promise, deep in zip(promised, depths, strict=True):
        first = abs(promise - chance**deep) < 1e-12
        trunk += first
        want = 1.0
        for rank in right[:deep]:
            want *= (chance, (1 - chance) * SIBLINGS[0], -1.0)[rank]
        flags.append(abs(promise - want) < 1e-12)
    return tuple(flags), depths, trunk


def trees(plans: list[DraftPlan]) -> int:
    return sum(plan.rows[0].tree is not None for plan in plans)


def test_trees_are_drafted_where_they_are_faster() -> None:
    """Cheap rows, and a second candidate that is often right."""
    plans = with_trees(0.6, 0.6)
    assert trees(plans[-100:]) > 90
    planned = next(plan for plan in reversed(plans) if plan.rows[0].tree is not None)
    assert planned.stop.price > 0
    assert planned.rows[0].limit > (planned.rows[0].tree or Shape(0, 0)).depth
    assert len(planned.rows[0].chance) == planned.rows[0].limit


@pytest.mark.parametrize("second", [0.0, 0.6])
def test_chains_are_drafted_where_trees_are_not_faster(second: float) -> None:
    """Second candidates that are never right; or rows that cost more than a second candidate brings."""
    table = (
        CHEAP
        if second == 0
        else CostTable(ROWS, tuple(0.01 * (1 + 0.35 * (n - 1)) for n in ROWS), CHEAP.drafts)
    )
    plans = with_trees(0.8, second, table)
    assert drafted(plans[-100:]) > 90
    assert trees(plans[-100:]) <= 4  # now and then one, to see


def test_without_trees_plans_are_those_of_chains() -> None:
    plans = run(AdaptivePolicy(CHEAP, GOOD), CHEAP, 50, 0.8)
    assert not trees(plans)


def test_the_likeliest_tokens_of_a_tree() -> None:
    chances, depths = likeliest((0.5, 0.8), Shape(2, 2))
    assert depths == [1, 2, 1, 2]  # no more than two beside each other
    assert chances == pytest.approx([0.5, 0.4, 0.175, 0.14])
    assert likeliest((0.9,) * 16, Shape(16, 4))[1][:6] == [1, 2, 3, 4, 5, 6]
    assert likeliest((), Shape(2, 2)) == ([], [])


def test_a_first_round_that_reads_the_prompt_does_not_make_drafts_dear() -> None:
    policy = AdaptivePolicy(STEEP)
    for step in range(40):
        (planned,) = policy.plan([replace(rows(1)[0], follows=False)], [None]).rows
        limit = planned.limit
        draft = 0.015 * limit + (0.3 if step == 0 else 0.0)
        outcome = RowOutcome(0, planned.drafter, limit, limit, (0.95,) * limit)
        policy.observe(StepOutcome((outcome,), STEEP.dense(20)[limit], {"mtp": draft} if limit else {}))
    assert limit >= 4
    assert policy.learnt().table.drafts["mtp"] == STEEP.drafts["mtp"]


def reading(unread: int, *, written: int = 0, room: int = 1000) -> PlanRow:
    """A text of which the network has to read so many tokens first; reading one takes a quarter of drafting it."""
    return PlanRow(0, "auto", room, "mtp", 8, unread=unread, written=written)


@pytest.mark.parametrize(
    ("row", "drafts"),
    [
        (reading(100), True),
        (reading(20_000), False),  # 2.75 s, for 64 tokens of which each takes some 6 ms less
        (reading(4_000, written=10), False),
        (reading(4_000, written=300), True),  # it has gone on for long, so it may go on for as long
        (reading(4_000, written=300, room=20), False),  # but it ends soon
    ],
)
def test_a_network_reads_a_long_prompt_only_where_its_drafts_bring_the_time_back(
    row: PlanRow, drafts: bool
) -> None:
    planned = AdaptivePolicy(CHEAP, GOOD).plan([row], [None]).rows[0]
    assert (planned.limit > 0) == drafts


def test_another_text_of_the_step_drafts_while_one_would_read_too_much() -> None:
    other = replace(reading(0), id=1)
    plan = AdaptivePolicy(CHEAP, GOOD).plan([reading(20_000), other], [None, None])
    assert [row.limit > 0 for row in plan.rows] == [False, True]


def test_reading_takes_what_it_was_seen_to_take() -> None:
    policy = AdaptivePolicy(CHEAP, GOOD)
    assert policy.plan([reading(600)], [None]).rows[0].limit  # a guess: 0.1 s
    slow = RowOutcome(0, "mtp", 2, 2, (0.8, 0.8))
    policy.observe(StepOutcome((slow,), 0.01, {"mtp": 6.0}))  # 10 ms for each token
    policy.forget(0)
    assert not policy.plan([replace(reading(600), id=1)], [None]).rows[0].limit
    assert policy.plan([replace(reading(20), id=2)], [None]).rows[0].limit


def test_a_bet_pays_for_what_is_read() -> None:
    first = AdaptivePolicy(CHEAP).plan([reading(0)], [None]).rows[0]
    assert first.limit  # nobody knows the pair: a bet
    long = AdaptivePolicy(CHEAP).plan([reading(20_000)], [None]).rows[0]
    assert not long.limit  # the purse of a new engine has 0.16 s
