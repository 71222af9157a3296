"""The policy's parts, each by its formula."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from paceline.control.acceptance import AcceptanceEstimator, PairPrior, ProposalEstimator
from paceline.control.allocation import Batch, Option, allocate, break_even, proposal_gain
from paceline.control.confidence import ConfidenceCalibrator, worth_of
from paceline.control.cost_model import CostModel, CostTable, DraftCost, table_of
from paceline.control.outlook import by_bytes, outlook, pays_from
from paceline.ops.base import Stop
from paceline.ops.rounds import Ends

ROWS = (1, 2, 3, 5, 9, 17, 33)


def model(row: float = 0.05) -> CostModel:
    draft = DraftCost(0.03, 0.05, 0.01)
    return CostModel(CostTable(ROWS, tuple(1.0 + row * (n - 1) for n in ROWS), {"mtp": draft}))


def test_allocation_is_the_best_of_all_lengths() -> None:
    """Against every combination of lengths, where a row costs the same wherever it stands."""
    costs, rng = model(), random.Random(5)
    for _ in range(20):
        options = []
        for row in range(3):
            chance = rng.uniform(0.2, 0.95)
            options.append(Option(row, "mtp", [chance ** (j + 1) for j in range(4)]))
        best = 0.0
        for lengths in itertools.product(range(5), repeat=3):
            tokens = 3 + sum(sum(o.survival[:k]) for o, k in zip(options, lengths, strict=True))
            seconds = costs.step_seconds(3 + sum(lengths), True)
            seconds += costs.draft_seconds("mtp", max(lengths), sum(lengths))
            best = max(best, tokens / seconds)
        found = allocate(options, Batch(3, 3), costs)
        lengths = [found.taken.get(row, (options[row], 0))[1] for row in range(3)]
        assert found.rate >= 0.98 * best  # a prefix by survival: rows that share a call may be unequal
        assert found.tokens == pytest.approx(
            3 + sum(sum(o.survival[:k]) for o, k in zip(options, lengths, strict=True))
        )


def test_proposals_cost_no_round() -> None:
    costs = model()
    free = allocate([Option(0, None, [0.5])], Batch(1, 1), costs)
    paid = allocate([Option(0, "mtp", [0.5])], Batch(1, 1), costs)
    assert free.seconds == pytest.approx(1.05)
    assert paid.seconds == pytest.approx(1.05 + 0.09)


def test_proposal_gain_takes_the_best_length() -> None:
    assert proposal_gain([0.5, 0.4, 0.1], 0.2) == pytest.approx(0.5)
    assert proposal_gain([0.1], 0.2) == 0.0


def test_break_even_is_where_a_draft_just_pays() -> None:
    costs = model(row=0.5)
    share = break_even("mtp", Batch(1, 1), 1, costs)
    assert 0 < share <= 1
    assert not allocate([Option(0, "mtp", [share * 0.9])], Batch(1, 1), costs).taken
    assert break_even("mtp", Batch(1, 1), 1, model(row=2.0)) > 1


def test_rows_go_on_that_gain_if_together_they_pay_for_the_call() -> None:
    good, poor, sure = (Stop(4, (chance,), ((1.0, 0.0),), 0.2, 0.5) for chance in (0.5, 0.1, math.inf))
    assert Ends([good, poor, good]).go_on([0, 1, 2], 0, [0.9] * 3) == [0, 2]
    assert Ends([good, poor]).go_on([0, 1], 0, [0.9] * 2) == []
    assert Ends([sure, Stop(1)]).go_on([0, 1], 0, [0.9] * 2) == [0]
    with pytest.raises(ValueError, match="what a confidence is worth"):
        Ends([Stop(4, (0.5,))]).go_on([0], 0, [0.9])


def test_a_request_leaves_the_prior_as_its_evidence_grows() -> None:
    prior = PairPrior("mtp", (0.5, 0.5))
    request, other = AcceptanceEstimator(prior), AcceptanceEstimator(prior)
    before = request.chances()[0]
    for _ in range(40):
        request.add(1, 1)
    assert before == pytest.approx(0.5)
    assert request.chances()[0] > 0.9
    assert 0.6 < other.chances()[0] < request.chances()[0]  # by the prior that both share


def test_a_position_that_was_never_reached_goes_on_as_those_before() -> None:
    request = AcceptanceEstimator(PairPrior("mtp", (0.5, 0.5, 0.5)))
    for _ in range(40):
        request.add(1, 1)
    assert request.chances()[1] > 0.8


def test_a_position_counts_only_if_verification_reached_it() -> None:
    request = AcceptanceEstimator(PairPrior("mtp", (0.5,) * 4))
    for _ in range(300):
        request.add(4, 1)
    first, second, *_ = request.chances()
    assert first > 0.9
    assert second < 0.1


def test_sampled_text_of_an_unknown_pair_is_kept_more_rarely() -> None:
    assert PairPrior("mtp", sampled=True).accept[0] < PairPrior("mtp").accept[0]
    assert PairPrior("mtp", (0.6,), sampled=True).accept[0] == pytest.approx(0.6)


def test_proposals_of_a_request_that_copies_well_are_worth_more() -> None:
    lines = ConfidenceCalibrator().lines()
    good, bad = ProposalEstimator(), ProposalEstimator()
    usual = good.survival([0.5], lines)[0]
    for _ in range(30):
        good.add([0.5], 1)
        bad.add([0.5], 0)
    assert usual == pytest.approx(0.5)
    assert good.survival([0.5], lines)[0] > 0.75
    assert bad.survival([0.5], lines)[0] < 0.25


def test_confidence_is_worth_what_was_kept_at_it() -> None:
    calibrator = ConfidenceCalibrator()
    assert worth_of(calibrator.lines(), 0.9) == pytest.approx(0.9)
    for _ in range(400):
        calibrator.add([0.9], 0)
    assert worth_of(calibrator.lines(), 0.9) < 0.05
    assert worth_of(calibrator.lines(), 0.3) == pytest.approx(0.3)
    assert worth_of(calibrator.lines(), float("nan")) == worth_of(calibrator.lines(), 0.0)


def test_bins_of_another_layout_are_refused() -> None:
    with pytest.raises(ValueError, match="give 12"):
        ConfidenceCalibrator([(1.0, 2.0)])


def test_costs_follow_the_machine() -> None:
    costs = model()
    for _ in range(200):
        costs.observe(1, False, 3.0)
    assert costs.step_seconds(1, False) == pytest.approx(3.0, rel=0.01)
    for _ in range(400):
        costs.observe(5, True, 7.0)
    assert costs.step_seconds(5, True) == pytest.approx(7.0, rel=0.01)


def test_a_plain_step_tells_the_factors_apart() -> None:
    """Steps that verify take twice their price: half of it is put down to the machine, until plain ones are seen."""
    costs = model()
    for _ in range(10):
        for _ in range(100):
            costs.observe(5, True, 2.4)
        costs.observe(1, False, 1.0, rare=True)
    assert costs.step_seconds(1, False) == pytest.approx(1.0, rel=0.1)
    assert costs.step_seconds(5, True) == pytest.approx(2.4, rel=0.1)


def test_a_table_that_gives_rows_for_nothing_is_found_out_in_some_steps() -> None:
    """Each number of rows has its own factor: what two rows take does not say what seventeen do."""
    costs = CostModel(table_of((1, 17), (1.0, 1.0)))
    for _ in range(12):
        costs.observe(2, True, 1.2)
        costs.observe(1, False, 1.0)
        costs.observe(17, True, 4.2)
    assert costs.step_seconds(1, False) == pytest.approx(1.0, rel=0.15)
    assert costs.step_seconds(2, True) == pytest.approx(1.2, rel=0.15)
    assert costs.step_seconds(17, True) > 2.5
    assert costs.steps(1, 63, True) == sorted(costs.steps(1, 63, True))
    assert costs.steps(1, 63, True)[16] == costs.step_seconds(17, True)
    before = costs.step_seconds(17, True)
    for _ in range(1000):
        costs.observe(1, False, 1.0)
    assert costs.step_seconds(17, True) < 0.5 * before, "drafts are tried again after many plain steps"


def test_rounds_scale_as_they_are_timed() -> None:
    costs = model()
    for _ in range(200):
        costs.observe_draft("mtp", 2, 2, 0.30)
    assert costs.draft_seconds("mtp", 2, 2) == pytest.approx(0.30, rel=0.01)
    costs.observe_draft("model", 4, 4, 2.0)  # never timed before: its first round sets the scale
    assert costs.draft_seconds("model", 4, 4) == pytest.approx(2.0)
    assert costs.draft_seconds("model", 0, 0) == 0.0


def test_tables_go_on_beyond_what_was_measured() -> None:
    costs = model()
    assert costs.step_seconds(200, False) == pytest.approx(1 + 0.05 * 199)
    assert costs.steps(190, 20, True)[10] == pytest.approx(costs.step_seconds(200, True))


def test_a_falling_table_is_made_level() -> None:
    dense = table_of((1, 2, 4), (1.0, 0.8, 1.2)).dense(4)
    assert dense == pytest.approx([0.9, 0.9, 1.05, 1.2])


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [
        ((), ()),
        ((1, 2), (1.0,)),
        ((2, 1), (1.0, 1.0)),
        ((0, 1), (1.0, 1.0)),
        ((1, 2), (1.0, float("nan"))),
        ((1,), (0.0,)),
    ],
)
def test_what_is_no_table_is_refused(rows: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="have to"):
        table_of(rows, seconds)


def test_the_outlook_is_what_allocation_would_do() -> None:
    table = by_bytes(0.44)
    low, high = outlook(table, "model", [0.4]), outlook(table, "model", [0.95, 0.9])
    assert low == (0, pytest.approx(1.0, abs=0.03))
    assert high.tokens >= 3
    assert 1.3 < high.gain < 1.6
    share = pays_from(table, "model")
    assert outlook(table, "model", [share + 0.01]).tokens
    assert not outlook(table, "model", [share - 0.01]).tokens
    assert pays_from(by_bytes(2.0), "model") > 1.0


def test_a_drafter_that_gets_slower_is_followed_within_some_rounds() -> None:
    costs = model()
    for _ in range(100):
        costs.observe_draft("mtp", 4, 4, 0.27)
    for _ in range(20):
        costs.observe_draft("mtp", 4, 4, 0.81)
    assert costs.draft_seconds("mtp", 4, 4) > 0.5
    for _ in range(20):
        costs.observe_draft("mtp", 4, 4, 0.27)
    assert costs.draft_seconds("mtp", 4, 4) < 0.35


def test_a_price_that_is_not_trusted_is_that_of_the_first_round() -> None:
    table = replace(table_of((1, 2), (1.0, 1.1), {"model": DraftCost(0.0, 4.0, 0.0)}), trusted=False)
    costs = CostModel(table)
    costs.observe_draft("model", 2, 2, 0.8)
    assert costs.draft_seconds("model", 2, 2) == pytest.approx(0.8)
    assert costs.learnt() is table  # nothing is kept of so few steps


def test_a_machine_that_is_slower_for_a_while_changes_no_ratio() -> None:
    """A step and its round both take three times as long: that is the machine, and plain steps take so long, too."""
    costs = model()
    before = costs.step_seconds(5, True) / costs.step_seconds(1, False)
    for slow in (3.0, 1.0, 3.0):
        for _ in range(12):
            step, draft = slow * 1.2, slow * 0.27
            costs.observe_machine(5, step, {"mtp": (4, 4, draft)})
            costs.observe(5, True, step)
            costs.observe_draft("mtp", 4, 4, draft)
        ratio = costs.step_seconds(5, True) / costs.step_seconds(1, False)
        assert ratio == pytest.approx(before, rel=0.1)
        assert costs.draft_seconds("mtp", 4, 4) == pytest.approx(slow * 0.27, rel=0.1)
        assert costs.step_seconds(1, False) == pytest.approx(slow, rel=0.1)
    costs.observe_machine(
        5, 3.6, {"mtp": (4, 4, 0.5 * 0.81)}
    )  # one slower, the other faster: not the machine
    assert costs.step_seconds(1, False) == pytest.approx(3.0, rel=0.1)


def test_a_round_that_began_with_a_prompt_says_nothing_unless_it_was_cheap() -> None:
    costs = model()
    before = costs.draft_seconds("mtp", 2, 2)
    costs.observe_draft("mtp", 2, 2, 10 * before, behind=True)
    assert costs.draft_seconds("mtp", 2, 2) == before
    costs.observe_draft("mtp", 2, 2, 0.5 * before, behind=True)
    assert costs.draft_seconds("mtp", 2, 2) < 0.8 * before
