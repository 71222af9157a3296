"""The portfolio: one proposal per row, the better one; drafts that are no drafts are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.core import Draft, SamplingParams, Sequence
from paceline.drafters.base import DraftContext
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.portfolio import Portfolio
from paceline.engine import budget as b
from paceline.engine.acceptance import MTP, NGRAM, Kind, fresh_arm
from paceline.engine.controller import AutoController
from paceline.engine.costs import Profile
from paceline.engine.fixed import FixedController
from paceline.engine.propose import check_draft
from paceline.engine.records import RowRecord, StepRecord

FLAT = Profile((1, 5, 9, 17, 32), (1.0, 1.1, 1.3, 1.9, 3.0))


class Scripted:
    """Proposes given tokens per row and remembers which limits it was given."""

    needs_hidden = False
    max_tokens = 16

    def __init__(self, name: str, lengths: list[int], confidence: float, token: int) -> None:
        self.name, self.lengths, self.confidence, self.token = name, lengths, confidence, token
        self.asked: list[list[int]] = []

    def draft(self, context: DraftContext) -> Draft:
        self.asked.append(list(context.limits))
        counts = [min(n, k) for n, k in zip(self.lengths, context.limits, strict=True)]
        return Draft(
            [[self.token] * n for n in counts],
            [[self.confidence] * n for n in counts],
            None,
            [None if n else "no proposal" for n in counts],
            [self.name] * len(counts),
        )

    def forget(self, sequence_id: int) -> None:
        self.lengths = []


def context(limits: list[int]) -> DraftContext:
    rows = [Sequence(i, [1, 2], 2, SamplingParams(max_tokens=100), seed=1) for i in range(len(limits))]
    nothing: Any = None
    return DraftContext(rows, limits, [0] * len(rows), None, [True] * len(rows), nothing, nothing)


def test_a_strong_match_runs_and_the_network_only_drafts_the_other_rows() -> None:
    ngram, mtp = Scripted("ngram", [12, 0, 2], 0.996, 7), Scripted("mtp", [4, 4, 4], 0.8, 9)
    auto = AutoController(FLAT, [MTP, NGRAM])
    for _ in range(20):  # copies are kept, by experience
        rows = [RowRecord(0, "ngram", 12, 12, [0.996] * 12, None)]
        auto.observe(StepRecord(13, 1.6, 0.0, 0.0, rows))
    ctx = context([16, 16, 16])
    limits = auto.limits(ctx.sequences, ["auto"] * 3, 16)
    ctx.limits = [k for k, _ in limits]
    draft = Portfolio(ngram, mtp, auto).draft(ctx)
    assert draft.drafter == ["ngram", "mtp", "ngram"] or draft.drafter == ["ngram", "mtp", "mtp"]
    assert draft.tokens[0] == [7] * 12
    assert set(draft.tokens[1]) == {9}
    assert mtp.asked[0][0] == 0
    check_draft(draft, ctx.limits, 10)


def test_what_became_of_a_copy_counts_in_the_next_step() -> None:
    """A plan may hold for a hundred steps: a text that begins to repeat itself does not wait for the next one."""
    ngram, auto = Scripted("ngram", [16], 0.9, 7), AutoController(FLAT, [NGRAM])
    ctx, seen = context([16]), []
    for _ in range(5):
        ctx.limits = [k for k, _ in auto.limits(ctx.sequences, ["auto"], 16)]
        seen.append(len(Portfolio(ngram, None, auto).draft(ctx).tokens[0]))
        rows = [RowRecord(0, "ngram", seen[-1], seen[-1], [0.9] * seen[-1], None)]
        auto.observe(StepRecord(1 + seen[-1], 1.0, 0.0, 0.0, rows))
    assert seen == [4, 4, 8, 12, 16]  # a text's first copy says nothing of the next


def test_a_match_that_never_holds_gives_way_to_the_network() -> None:
    ngram, mtp = Scripted("ngram", [4], 0.75, 7), Scripted("mtp", [4], 0.8, 9)
    auto = AutoController(FLAT, [MTP, NGRAM])
    steep = AutoController(Profile((1, 5, 32), (1.0, 2.0, 9.0)), [NGRAM])
    for _ in range(20):
        for controller, seconds in ((auto, 1.1), (steep, 2.0)):
            rows = [RowRecord(0, "ngram", 4, 0, [0.75] * 4, None)]
            controller.observe(StepRecord(5, seconds, 0.0, 0.0, rows))
    ctx = context([16])
    assert steep.limits(ctx.sequences, ["auto"], 16) == [(16, None)]
    ctx.limits = [k for k, _ in auto.limits(ctx.sequences, ["auto"], 16)]
    assert Portfolio(ngram, mtp, auto).draft(ctx).drafter == ["mtp"]
    alone = Portfolio(ngram, None, steep).draft(ctx)
    assert alone.tokens == [[]]
    assert alone.reasons == [b.NO_CONFIDENCE]


def test_a_network_that_does_not_pay_is_not_asked_when_something_to_copy_is_looked_for() -> None:
    ngram, mtp = Scripted("ngram", [0, 0], 0.99, 7), Scripted("mtp", [16, 16], 0.8, 9)
    prices = {"mtp": (50.0, 1.0, 1.0), "ngram": (0.0, 0.0, 0.01)}
    auto = AutoController(replace(FLAT, rounds=prices), [MTP, NGRAM])
    ctx = context([16, 16])
    ctx.limits = [k for k, _ in auto.limits(ctx.sequences, ["auto", "auto"], 16)]
    assert ctx.limits == [16, 16]  # for a copy
    assert Portfolio(ngram, mtp, auto).draft(ctx).tokens == [[], []]
    assert mtp.asked in ([], [[0, 0]])
    auto.forget(0)
    ctx.limits = [k for k, _ in auto.limits(ctx.sequences, ["auto", 4], 16)]
    Portfolio(ngram, mtp, auto).draft(ctx)
    assert mtp.asked[-1] == [0, 4]  # who asks for a length gets it


def test_fixed_length_prefers_a_long_match_and_never_drafts_twice() -> None:
    ngram, mtp = Scripted("ngram", [4, 0], 0.99, 7), Scripted("mtp", [4, 4], 0.8, 9)
    portfolio = Portfolio(ngram, mtp, FixedController(4))
    draft = portfolio.draft(context([4, 4]))
    assert draft.drafter == ["ngram", "mtp"]
    assert mtp.asked == [[0, 4]]
    assert portfolio.draft(context([0, 0])).tokens == [[], []]
    portfolio.forget(1)
    assert (ngram.lengths, mtp.lengths) == ([], [])


def test_without_a_hidden_state_the_network_is_not_asked() -> None:
    ngram, mtp = Scripted("ngram", [0], 0.99, 7), Scripted("mtp", [4], 0.8, 9)
    mtp.needs_hidden = True
    ctx = context([4])
    ctx.has_hidden = [False]
    assert Portfolio(ngram, mtp, FixedController(4)).draft(ctx).tokens == [[]]
    assert not mtp.asked


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


@pytest.mark.parametrize(
    ("base", "copies", "anyway", "asked"),
    [
        (0.1, [0.0, 0.0], False, [2, 2]),  # nothing to copy: as planned
        (
            0.1,
            [0.3, 0.0],
            False,
            [2, 2],
        ),  # the round runs for the other row: here its tokens cost little more
        (0.1, [1.5, 0.0], False, [0, 2]),  # a copy that gains more than the network would
        (5.0, [0.3, 0.0], False, [0, 0]),  # a round that pays for no row alone
        (5.0, [0.3, 0.0], True, [2, 2]),  # but runs in any case
        (0.1, [1.5, 1.5], False, [0, 0]),
    ],
)
def test_copies_and_a_round_are_weighed_together(
    base: float, copies: list[float], anyway: bool, asked: list[int]
) -> None:
    arm = fresh_arm(Kind("mtp", (0.8,), known=True))
    plan = b.Plan({0: 2, 1: 2}, rate=1.0, token_seconds=0.15, round=(base, 0.05, 0.05))
    assert 1.0 < sum(arm.survive[:2]) - 2 * 0.15 < 1.5
    assert b.shared(plan, [arm, arm], [2, 2], copies, anyway=anyway) == asked


@pytest.mark.parametrize("seeing", ["", "trial", "probes"])
def test_a_round_that_is_there_to_see_what_comes_of_it_is_not_put_off_by_a_copy(seeing: str) -> None:
    auto = AutoController(replace(FLAT, rounds={"mtp": (0.1, 0.1, 0.0)}), [MTP, NGRAM])
    rows = context([16, 16]).sequences
    auto.limits(rows, ["auto", "auto"], 16)
    choice = auto._choice
    assert choice is not None
    choice.plans["mtp"] = replace(choice.plans["mtp"], round=(50.0, 0.1, 0.0))
    if seeing:
        setattr(choice, seeing, True if seeing == "trial" else 1)
    assert auto.asked([0, 1], "mtp", [0, 1], [0.5, 0.0]) == ([0, 1] if seeing else [0, 0])


def test_a_row_that_asks_for_a_length_has_a_round_for_all() -> None:
    ngram, mtp = Scripted("ngram", [2, 0], 0.6, 7), Scripted("mtp", [4, 4], 0.8, 9)
    auto = AutoController(replace(FLAT, rounds={"mtp": (0.1, 0.1, 0.0)}), [MTP, NGRAM])
    ctx = context([16, 16])
    ctx.limits = [k for k, _ in auto.limits(ctx.sequences, ["auto", 3], 16)]
    draft = Portfolio(ngram, mtp, auto).draft(ctx)
    assert mtp.asked[-1][1] == 3
    assert draft.drafter[1] == "mtp"
    assert draft.reasons == [None, None]


def test_a_row_without_anything_to_copy_is_not_looked_up() -> None:
    prices = {"mtp": (50.0, 1.0, 1.0), "ngram": (0.0, 0.0, 0.01)}
    seen: list[int] = []

    class Copier(NgramDrafter):
        def peek(self, sequence: Sequence) -> bool:
            seen.append(sequence.id)
            return sequence.id == 1

    auto = AutoController(replace(FLAT, rounds=prices), [MTP, NGRAM], copier=Copier())
    rows = context([16] * 4).sequences  # fewer are watched
    assert auto.limits(rows, ["auto"] * 4, 16) == [(0, b.PARKED_BY_COST)] * 4
    assert seen == []
    auto.rest(rows, [16] * 4)
    assert (seen[:4], set(seen[4:])) == ([0, 1, 2, 3], {1})
    only = AutoController(replace(FLAT, rounds=prices), [MTP, NGRAM], copier=NgramDrafter())
    looks = 0
    for _ in range(64):
        ((limit, _),) = only.limits(rows[:1], ["auto"], 16)
        assert limit == 0
        looks += only.rest(rows[:1], [16])[0] == 1
        only.observe(StepRecord(1, 1.0, 0.0, 0.0, [RowRecord(0, "", 0, 0, [], b.NO_PROPOSAL)]))
    assert looks < 16  # in between it rests
