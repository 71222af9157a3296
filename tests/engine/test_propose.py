"""Who drafts for a row: as the policy plans it, merged by row; a drafter may fail, a policy's failure surfaces."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest
import torch

from paceline.control.base import DraftPlan, PlannedRow, PlanRow, Proposal, StepOutcome
from paceline.control.fixed import FixedPolicy
from paceline.control.reasons import NoDraftReason
from paceline.core import Draft, SamplingParams
from paceline.drafters.base import DraftContext, Drafter
from paceline.drafters.ngram import NgramDrafter
from paceline.engine.engine import Engine
from paceline.engine.propose import check_draft
from testing import Setup, make_engine, prompts, run

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
REPEATING = [[2, 3, 4, 5, 6, 7] * 4]


class Scripted(Drafter):
    """Drafts one token again and again, and remembers which limits it was given."""

    needs_hidden = False
    max_tokens = 16

    def __init__(self, name: str = "network", *, fails: bool = False) -> None:
        self.name, self.fails = name, fails
        self.asked: list[list[int]] = []
        self.forgotten: list[int] = []

    def draft(self, context: DraftContext) -> Draft:
        self.asked.append(list(context.limits))
        if self.fails:
            raise RuntimeError("no more")
        tokens = [[9] * limit for limit in context.limits]
        return Draft(
            tokens, [[0.5] * len(t) for t in tokens], None, [None] * len(tokens), [self.name] * len(tokens)
        )

    def forget(self, sequence_id: int) -> None:
        self.forgotten.append(sequence_id)


class Recording(FixedPolicy):
    """Keeps what it was asked and what it observed."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.rows: list[list[PlanRow]] = []
        self.proposals: list[list[Proposal | None]] = []
        self.outcomes: list[StepOutcome] = []
        self.forgotten: list[int] = []

    def plan(
        self, rows: Seq[PlanRow], free_proposals: Seq[Proposal | None], prefill_rows: int = 0
    ) -> DraftPlan:
        self.rows.append(list(rows))
        self.proposals.append(list(free_proposals))
        return super().plan(rows, free_proposals, prefill_rows)

    def observe(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)

    def forget(self, id: int) -> None:
        self.forgotten.append(id)


def engine_of(policy: FixedPolicy, network: Scripted, *, ngram: Scripted | None = None) -> Engine:
    drafters = {network.name: network, "ngram": ngram or NgramDrafter()}
    return make_engine(
        Setup(), network, drafters=drafters, policy=policy, draft_tokens="auto",
        default_drafter=f"{network.name}+ngram",
    )  # fmt: skip


def test_each_row_takes_what_is_planned_and_never_both() -> None:
    policy, network = Recording(4), Scripted()
    texts = [REPEATING[0], [11, 4, 19, 8, 2]]
    done = run(engine_of(policy, network), texts, GREEDY)
    plain = run(make_engine(Setup()), texts, GREEDY)
    assert [c.token_ids for c in done] == [c.token_ids for c in plain]
    drafters = {row.drafter for outcome in policy.outcomes for row in outcome.rows if row.drafted}
    assert drafters == {"ngram", "network"}
    for outcome in policy.outcomes:
        by_network = [row.drafted for row in outcome.rows if row.drafter == "network"]
        assert ("network" in outcome.draft_seconds) == bool(by_network)
    asked = [limit for limits in network.asked for limit in limits]
    assert asked
    assert all(limit > 0 for limit in asked)


def test_the_policy_is_asked_and_told_once_in_a_step() -> None:
    policy = Recording(3)
    done = run(engine_of(policy, Scripted()), prompts(3), GREEDY)
    decoded = [outcome for outcome in policy.outcomes if outcome.rows]
    assert len(policy.rows) == len(decoded)
    for asked, got in zip(policy.rows, decoded, strict=True):
        assert [row.id for row in asked] == [row.id for row in got.rows]
    assert sorted(policy.forgotten) == list(range(len(done)))
    accepted = sum(row.accepted for outcome in decoded for row in outcome.rows)
    assert accepted >= sum(c.stats.accepted for c in done)


class GivesUp(Recording):
    """Gives the network up in its fourth step."""

    def plan(
        self, rows: Seq[PlanRow], free_proposals: Seq[Proposal | None], prefill_rows: int = 0
    ) -> DraftPlan:
        plan = super().plan(rows, free_proposals, prefill_rows)
        gone = PlannedRow(None, 0, NoDraftReason.GIVEN_UP)
        return DraftPlan(tuple([gone] * len(rows))) if len(self.rows) == 4 else plan


def test_a_text_whose_network_is_given_up_goes_on_without_it() -> None:
    policy, network = GivesUp(2), Scripted()
    text = [[11, 4, 19, 8, 2]]
    engine = make_engine(Setup(), network, policy=policy, draft_tokens="auto", default_drafter=network.name)
    (done,) = run(engine, text, GREEDY)
    assert done.token_ids == run(make_engine(Setup()), text, GREEDY)[0].token_ids
    assert len(network.asked) == 3
    assert network.forgotten == [0, 0]  # when it is given up, and at the end
    assert [row[0].drafter for row in policy.rows[3:6]] == ["network", None, None]
    assert done.stats.reasons[NoDraftReason.GIVEN_UP.value] == done.stats.steps - 1 - 3


def test_an_unused_proposal_is_compared_with_what_was_written() -> None:
    policy = Recording(0)  # drafts nothing
    run(engine_of(policy, Scripted()), REPEATING, GREEDY)
    seen = [row for outcome in policy.outcomes for row in outcome.rows if row.unused]
    assert seen
    assert all(len(row.unused) == 1 and row.agreed in (0, 1) for row in seen)  # a plain step writes one token


def test_a_failing_network_is_parked_and_lookup_goes_on() -> None:
    policy, network = Recording(4), Scripted(fails=True)
    (done,) = run(engine_of(policy, network), [[11, 4, 19, 8, 2]], GREEDY)
    assert len(network.asked) == 1
    assert done.stats.reasons["drafter failed: RuntimeError: no more"] >= 1
    (plain,) = run(make_engine(Setup()), [[11, 4, 19, 8, 2]], GREEDY)
    assert done.token_ids == plain.token_ids
    assert all(row.drafter is None for rows in policy.rows[1:] for row in rows)


def test_a_failing_lookup_is_parked_and_the_network_goes_on() -> None:
    network, ngram = Scripted(), Scripted("ngram", fails=True)
    (done,) = run(engine_of(FixedPolicy(2), network, ngram=ngram), REPEATING, GREEDY)
    assert len(ngram.asked) == 1
    assert done.stats.drafters.keys() == {"network"}


@pytest.mark.parametrize("where", ["plan", "observe"])
def test_a_policy_that_raises_surfaces(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a bug of ours, and not called a drafter's failure."""

    def broken(*args: object) -> DraftPlan:
        raise ZeroDivisionError("a bug in the policy")

    policy = FixedPolicy(4)
    monkeypatch.setattr(policy, where, broken)
    engine = engine_of(policy, Scripted())
    with pytest.raises(ZeroDivisionError, match="a bug in the policy"):
        run(engine, REPEATING, GREEDY)
    assert not engine.has_work


def test_a_plan_that_names_no_drafter_of_ours_surfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = FixedPolicy(4)
    monkeypatch.setattr(policy, "plan", lambda rows, *_: DraftPlan((PlannedRow("nobody", 2),) * len(rows)))
    with pytest.raises(KeyError, match="nobody"):
        run(engine_of(policy, Scripted()), REPEATING, GREEDY)


def test_without_a_hidden_state_a_network_that_needs_one_cannot_draft() -> None:
    policy, network = Recording(4), Scripted()
    network.needs_hidden = True
    engine = engine_of(policy, network)
    engine.state.hidden_at = {}
    engine.add("a", [11, 4, 19, 8, 2], GREEDY)
    while not policy.rows:
        engine.step()
        engine.state.hidden_at.clear()
    assert policy.rows[0][0].drafter_max == 0
    assert network.asked == []


@pytest.mark.parametrize(
    ("tokens", "confidence"),
    [
        ([[1]], [[0.5], [0.5]]),
        ([[1, 2, 3], []], [[0.5] * 3, []]),
        ([[1], [99]], [[0.5], [0.5]]),
        ([[1], [-1]], [[0.5], [0.5]]),
        ([[1], [True]], [[0.5], [0.5]]),
        ([[1], [2]], [[0.5], []]),
        ([[1.0], [2]], [[0.5], [0.5]]),
    ],
)
def test_nonsense_is_refused(tokens: list[list[int]], confidence: list[list[float]]) -> None:
    with pytest.raises(ValueError, match=r"proposed|allowed|not an id"):
        check_draft(Draft(tokens, confidence), [2, 1], 10)


class Counting(Scripted):
    """Notes with how many threads torch would compute what it drafts."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    def draft(self, context: DraftContext) -> Draft:
        self.threads.add(torch.get_num_threads())
        return super().draft(context)


@pytest.mark.parametrize(("own", "within"), [(True, 1), (False, 2)])
def test_torch_has_one_thread_while_a_target_computes_with_its_own(own: bool, within: int) -> None:
    before, network = torch.get_num_threads(), Counting()
    torch.set_num_threads(2)
    try:
        run(make_engine(Setup(), network, policy=FixedPolicy(2), own_threads=own), prompts(1), GREEDY)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert network.threads == {within}
