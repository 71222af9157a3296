"""Texts that come where others rest: they go on resting, and nobody is asked."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
from tests.engine.test_audit import MTP, sequence
from tests.engine.test_rest import work
from tests.testing import VOCAB, Setup, make_engine, prompts, run

from paceline.core import Draft, SamplingParams, Sequence
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.portfolio import Portfolio
from paceline.engine import budget as b
from paceline.engine.acceptance import NGRAM
from paceline.engine.choice import LONGEST_IDLE, REST
from paceline.engine.controller import AutoController
from paceline.engine.costs import Profile
from paceline.engine.fixed import Limit
from paceline.engine.quiet import FIRST
from paceline.engine.records import RowRecord, StepRecord
from paceline.engine.rest import Rest, nothing

STEEP = Profile((1, 33), (1e-3, 33e-3), rounds={"mtp": (1e-3, 1e-3, 0.0)})  # no draft pays
FLAT = Profile((1, 33), (1e-3, 1.1e-3), rounds={"mtp": (1e-5, 1e-5, 0.0)})  # every draft does


def controller(texts: Seq[Sequence], profile: Profile = STEEP, **options: Any) -> AutoController:
    """That was asked for these texts: they rest, where nothing pays."""
    auto = AutoController(profile, [MTP], **options)
    auto._plan_seconds = 1.0  # a plan is dear, and holds for others
    auto.limits(list(texts), ["auto"] * len(texts), 16)
    rows = [RowRecord(s.id, "none", 0, 0, [], b.PARKED_BY_COST) for s in texts]
    auto.observe(StepRecord(len(texts), 1e-3, 0.0, 0.0, rows))
    return auto


def test_a_text_that_comes_where_another_rested_goes_on_resting_without_a_plan() -> None:
    first, second, new = map(sequence, (1, 2, 3))
    auto = controller([first, second])
    auto.limits([first, sequence(9)], ["auto"] * 2, 16)  # a plan for two texts of which one is new
    planned = auto.planned
    auto.forget(9)
    joined = auto.join([first, new], ["auto"] * 2, 16, 5)
    assert joined == (REST, b.PARKED_BY_COST)
    assert auto.join([new, sequence(4)], ["auto"] * 2, 16, 9) == joined  # and so on
    assert auto.limits([new, sequence(4)], ["auto"] * 2, 16) == [(0, b.PARKED_BY_COST)] * 2
    auto.observe(StepRecord(2, 1e-3, 0.0, 0.0, [row_of(3), row_of(4)], times=9 + REST))
    # without looks a rest lasts until the plan is made anew
    assert auto.rest([new, sequence(4)], [16] * 2) == (0, None)
    assert auto.planned == planned


@pytest.mark.parametrize(
    "changes",
    [{"temperature": 0.8}, {"drafter": "mtp"}, {"max_tokens": 1}],
    ids=["sampled", "a drafter of its own", "no room"],
)
def test_a_text_of_another_kind_does_not_join(changes: dict[str, Any]) -> None:
    auto = controller([sequence(1)])
    auto.forget(1)
    other = replace(sequence(2), params=replace(sequence(2).params, **changes))
    assert auto.join([other], ["auto"], 16, 1) is None
    assert auto.join([sequence(2)], ["auto"], 16, 1) is not None


def test_nor_does_any_where_something_is_drafted_or_no_plan_for_such_texts_holds() -> None:
    assert controller([sequence(1)], FLAT).join([sequence(2)], ["auto"], 16, 1) is None
    auto = controller([sequence(1)])
    assert auto.join([sequence(2)], ["auto"], 16, LONGEST_IDLE[0] + 1) is None  # it was made too long ago
    assert (
        auto.join([sequence(1), sequence(2)], ["auto"] * 2, 16, 1) is None
    )  # more texts than it was made for
    mixed = controller([sequence(1), sequence(2)])
    mixed.limits([sequence(1), sequence(5)], ["auto", "auto"], 16)
    mixed.limits([sequence(1), sequence(6)], ["auto", 0], 16)
    assert mixed.join([sequence(6), sequence(3)], [0, "auto"], 16, 1) is None  # one of them was asked not to
    assert AutoController(STEEP, [MTP]).join([sequence(1)], ["auto"], 16, 0) is None


def test_the_plan_of_a_single_new_text_serves_the_next_one() -> None:
    """Nothing is known of either: a plan of its own took each short text of a small model a step and a half."""
    auto = controller([sequence(1)], FLAT)
    ((limit, _),) = auto.limits([sequence(1)], ["auto"], 16)
    hold, room = auto._choices[1,].hold, limit - 2
    assert min(limit, hold) > 2
    assert auto.planned == 1
    short = replace(sequence(3), params=SamplingParams(max_tokens=room + 1, temperature=0))
    for text, most in ((sequence(2), limit), (short, room)):
        auto.forget(text.id - 1)
        assert auto.limits([text], ["auto"], 16) == [(most, None)]
        choice = auto._choices[text.id,]
        assert (choice.hold, choice.until) == (hold, auto._now + hold)
        assert auto.kind_limit(text.id, "mtp") == most
        assert len(auto.stop(text.id).chance) > 0
        assert (text.id, "mtp") in auto.budget.arms
        auto.observe(StepRecord(1 + most, 1e-3, 1e-5, 0.0, [RowRecord(text.id, "mtp", 1, 1, [0.9], None)]))
    auto.forget(3)
    assert auto.join([sequence(4)], ["auto"], 16, 0) is None  # it does not rest
    assert auto.planned == 1
    masked = replace(sequence(5), constraint=object())  # type: ignore[arg-type]
    sampled = replace(sequence(6), params=SamplingParams(temperature=0.8, max_tokens=99))
    for text, plans in ((masked, 2), (sampled, 3), (sequence(7), 3)):
        auto.forget(text.id - 1)
        auto.limits([text], ["auto"], 16)
        assert auto.planned == plans  # masks take time, sampled text is kept more rarely
    auto.observe(replace(StepRecord(1, 1e-3, 0.0, 0.0, [row_of(7)]), times=REST))
    auto.forget(7)
    auto.limits([sequence(8)], ["auto"], 16)
    assert auto.planned == 4  # it was made too long ago


def row_of(sequence_id: int) -> RowRecord:
    return RowRecord(sequence_id, "none", 0, 0, [], b.NO_CONFIDENCE)


@pytest.mark.parametrize(("temperature", "first"), [(0.0, FIRST), (0.8, 64)])
def test_a_new_text_is_looked_at_when_the_others_are(temperature: float, first: int) -> None:
    texts = [replace(s, params=replace(s.params, temperature=temperature)) for s in map(sequence, (1, 2))]
    nearly = Profile(
        (1, 33), (1e-3, 2e-3), rounds={"mtp": (1.0, 1.0, 0.0)}
    )  # copies would pay, a network would not
    auto = AutoController(nearly, [MTP, NGRAM])
    auto._plan_seconds = 1.0
    auto.limits([texts[0]], ["auto"], 16)
    assert auto.rest([texts[0]], [16])[0] > 0 or temperature == 0.0
    auto.observe(StepRecord(1, 1e-3, 0.0, 0.0, [RowRecord(1, "none", 0, 0, [], b.NO_PROPOSAL)]))
    auto.forget(1)
    joined = auto.join([texts[1]], ["auto"], 16, 2)  # in the step of number 3
    assert joined is not None
    assert joined[0] == first - 3
    assert (2, "ngram") in auto.budget.arms


def test_who_has_come_in_the_place_of_others() -> None:
    rest = Rest([1, 2], 5, nothing([b.PARKED_BY_COST, b.NO_CONFIDENCE]), "mtp")
    assert rest.newcomers([work(2), work(3)])
    assert rest.newcomers([work(3), work(4)])
    assert not rest.newcomers([work(1), work(2)])
    assert not rest.newcomers([work(2)])  # nobody has come
    assert rest.newcomers([work(2), work(3, 8)])  # it reads its prompt
    assert not Rest([1], 5, nothing([None])).newcomers([work(3)])  # nobody drafts
    rest.go_on([work(2), work(3)], 7, b.PARKED_BY_COST)
    assert (rest.ids, rest.steps) == ([2, 3], 7)
    assert rest.empty.reasons == [b.NO_CONFIDENCE, b.PARKED_BY_COST]


class Asked:
    """A controller that counts how often it is asked for drafts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.inner, self.asked_for = AutoController(*args, **kwargs), 0

    def limits(self, *args: Any, **kwargs: Any) -> list[Limit]:
        self.asked_for += 1
        return self.inner.limits(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize("batch", [1, 3])
def test_texts_come_and_go_at_rest_and_nobody_is_asked(batch: int) -> None:
    texts = prompts(16, longest=12)
    params = [SamplingParams(max_tokens=9 + i % 5, temperature=0, draft_tokens="auto") for i in range(16)]
    heard = Asked(STEEP, [MTP])
    heard.inner._plan_seconds = 1.0
    setup = Setup(drafter="mtp", max_batch=batch)
    completions = run(make_engine(setup, controller=heard), texts, params)
    plain = run(make_engine(Setup(max_batch=batch)), texts, params)
    assert [c.token_ids for c in completions] == [c.token_ids for c in plain]
    assert heard.asked_for <= 8  # at first and at the end, when there are fewer texts than places
    for completion in completions:
        assert completion.stats.steps == len(completion.token_ids)
        assert set(completion.stats.reasons) <= {b.PARKED_BY_COST, b.PREFILL, b.NO_ROOM, b.NO_CONFIDENCE}
    assert heard.budget.arms.keys() <= {(i, "mtp") for i in range(99)}


@pytest.mark.parametrize("batch", [1, 3])
def test_texts_at_rest_take_their_copies_and_hardly_anybody_is_asked(batch: int) -> None:
    texts, params = prompts(batch, longest=12), SamplingParams(max_tokens=160, temperature=0)
    plain = run(make_engine(Setup(max_batch=batch)), texts, params)
    copier = NgramDrafter()
    heard = Asked(FLAT, [NGRAM], copier=copier)
    engine = make_engine(Setup(max_batch=batch), drafter=Portfolio(copier, None, heard), controller=heard)
    given = [replace(params, draft_tokens="auto", reference=tuple(one.token_ids[60:])) for one in plain]
    completions = run(engine, texts, given)
    assert [one.token_ids for one in completions] == [one.token_ids for one in plain]
    for one in completions:
        assert one.stats.accepted == one.stats.emitted - one.stats.steps
        assert one.stats.drafters["ngram"] > 4
        assert one.stats.accepted > 60
    assert heard.asked_for < completions[0].stats.steps / 2


class Failing(NgramDrafter):
    """Says something wrong, or raises, once texts have come to what they were given."""

    def __init__(self, answer: int | None) -> None:
        super().__init__()
        self.answer = answer

    def look(self, sequence: Sequence, limit: int) -> tuple[list[int], list[float]]:
        tokens, confidence = super().look(sequence, limit)
        if len(sequence.tokens) < 90 or not tokens:
            return tokens, confidence
        if self.answer is None:
            raise RuntimeError("boom")
        return [self.answer] * len(tokens), confidence


@pytest.mark.parametrize(("answer", "why"), [(None, "boom"), (VOCAB, "not an id"), (-1, "not an id")])
def test_a_text_at_rest_whose_copies_are_none_is_parked_and_the_text_is_right(
    answer: int | None, why: str
) -> None:
    texts, params = prompts(2, longest=12), SamplingParams(max_tokens=160, temperature=0)
    plain = run(make_engine(Setup()), texts, params)
    copier = Failing(answer)
    heard = Asked(FLAT, [NGRAM], copier=copier)
    engine = make_engine(Setup(), drafter=Portfolio(copier, None, heard), controller=heard)
    given = [replace(params, draft_tokens="auto", reference=tuple(one.token_ids[60:])) for one in plain]
    completions = run(engine, texts, given)
    assert [one.token_ids for one in completions] == [one.token_ids for one in plain]
    for one in completions:
        assert any(b.DRAFTER_FAILED in reason and why in reason for reason in one.stats.reasons)


@pytest.mark.parametrize("verify", ["match", "block"])
def test_texts_that_join_copy_nothing_before_their_prompt_is_read(
    verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their prompts are read in pieces, beside texts that copy."""
    texts = prompts(12, longest=30)
    each = [SamplingParams(max_tokens=40 + 9 * (i % 4), temperature=0) for i in range(12)]
    plain = run(make_engine(Setup(max_batch=3, verify=verify)), texts, each)
    copier = NgramDrafter()
    nearly = replace(FLAT, rounds={"mtp": (1.0, 1.0, 0.0)})  # copies pay, a network does not
    heard = Asked(nearly, [MTP, NGRAM], copier=copier)
    heard.inner._plan_seconds = 1.0  # a plan is dear, and holds for others
    setup = Setup(max_batch=3, verify=verify)
    engine = make_engine(setup, drafter=Portfolio(copier, None, heard), controller=heard)
    given = [
        replace(own, draft_tokens="auto", reference=tuple(text + one.token_ids))
        for own, text, one in zip(each, texts, plain, strict=True)
    ]
    reading: list[list[int]] = []

    def copies(sequences: list[Sequence], rooms: list[int]) -> Draft | None:
        reading.extend(s.tokens for s in sequences if s.committed < len(s.tokens) - 1)
        return heard.inner.copies(sequences, rooms)

    def rest(sequences: list[Sequence], rooms: list[int]) -> tuple[int, Draft | None]:
        reading.extend(s.tokens for s in sequences if s.committed < len(s.tokens) - 1)
        return heard.inner.rest(sequences, rooms)

    monkeypatch.setattr(heard, "copies", copies)
    monkeypatch.setattr(heard, "rest", rest)
    completions = run(engine, texts, given)
    assert reading == []
    assert [one.token_ids for one in completions] == [one.token_ids for one in plain]
    for one in completions:
        assert one.stats.accepted == one.stats.emitted - one.stats.steps
    assert sum(one.stats.accepted for one in completions) > 100
