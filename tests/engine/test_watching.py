"""Texts at rest are watched: a rest ends as soon as they come to something that is worth copying, and not before."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
from tests.engine.test_rest import work

from paceline.core import Draft, SamplingParams, Sequence
from paceline.drafters.ngram import NgramDrafter
from paceline.engine import budget as b
from paceline.engine import copies
from paceline.engine.acceptance import NGRAM, Kind
from paceline.engine.budget import Budget
from paceline.engine.controller import AutoController
from paceline.engine.costs import Profile
from paceline.engine.lookups import NEVER, Firsts, Lookups
from paceline.engine.quiet import LOOK, SPARING
from paceline.engine.records import RowRecord, StepRecord
from paceline.engine.rest import Rest, nothing
from paceline.ops.search import LENGTHS, Watch

CHEAP = Profile((1, 33), (1e-3, 3e-3))
DEAR = Profile((1, 33), (1e-3, 60e-3))
RUN = list(range(100, 140))


def text(sid: int, tokens: Seq[int], **changes: object) -> Sequence:
    params = SamplingParams(max_tokens=900, temperature=0.0)
    return replace(Sequence(sid, list(tokens), 2, params, seed=0), **changes)  # type: ignore[arg-type]


def resting(profile: Profile, *texts: Sequence) -> tuple[AutoController, NgramDrafter]:
    """A controller that was asked for these texts, in which there is nothing to copy."""
    drafter = NgramDrafter()
    auto = AutoController(profile, [NGRAM], copier=drafter)
    allowed = auto.limits(list(texts), ["auto"] * len(texts), 16)
    offers = auto.offers(texts, "ngram", [drafter.look(s, 16) for s in texts], anyway=False)
    assert not any(tokens for tokens, _ in offers)
    assert len(allowed) == len(texts)
    auto.observe(
        StepRecord(
            len(texts), 1e-3, 0.0, 0.0, [RowRecord(s.id, "none", 0, 0, [], b.NO_PROPOSAL) for s in texts]
        )
    )
    return auto, drafter


def firsts(sequence: Sequence, kept: float | None = None) -> Firsts:
    """Of first copies in texts like this one such a share was kept; None: there were none."""
    budget = b.meet(Budget(CHEAP.costs(), (NGRAM,)), NGRAM, [sequence])
    law = b.arm_of(budget, sequence.id, NGRAM).law
    seen = {} if kept is None else {law: (30 * kept, 30.0)}
    return Firsts(replace(budget, firsts=seen), sequence.id, {"ngram"})


class Finding:
    """A watch that says what it is told to."""

    def __init__(self, *says: bool) -> None:
        self.says = list(says)

    def finds(self) -> bool:
        return self.says.pop(0)


def test_a_rest_goes_on_over_copies_and_what_follows_one_is_asked_for_at_once() -> None:
    empty, copied = nothing([b.NO_PROPOSAL]), Draft([[7]], [[0.9]], None, [None], ["ngram"])
    rest, ours = Rest([1], 5, empty, "ngram", Finding(False, True, True)), text(1, [5])  # type: ignore[arg-type]
    assert not rest.stirs()
    assert rest.draft([ours]) is empty
    assert rest.stirs()
    assert rest.draft([ours], copied) is copied
    assert rest.lost([ours])  # nothing of it was kept so far
    ours.tokens += [7, 8]
    assert not rest.lost([ours])
    assert rest.stirs()  # the watch is not asked
    assert rest.draft([ours]) is empty
    assert not rest.lost([ours])
    assert rest.stirs()
    assert rest.draft([ours]) is empty
    assert (rest.steps, rest.holds([work(1)])) == (1, True)
    rest.go_on([work(2)], 5, None)
    assert not rest.stirs()


def test_what_a_text_at_rest_can_copy_is_found_judged_and_learnt_from() -> None:
    ours = text(1, [*RUN, 7, 8, 9])
    auto, _ = resting(CHEAP, ours)
    watch = auto.watch([ours])
    assert watch is not None
    for token in (11, 12, 13):
        ours.tokens.append(token)
        assert not watch.finds()
    ours.tokens += RUN[:24]
    assert watch.finds()
    assert auto.copies([ours], [0]) is None  # no room
    short = auto.copies([ours], [3])
    assert short is not None
    assert short.tokens == [RUN[24:27]]
    draft = auto.copies([ours], [16])
    assert draft is not None
    ((tokens,), (confidence,)) = draft.tokens, draft.confidence
    assert tokens == RUN[24 : 24 + len(tokens)]
    assert (len(tokens) > 3, draft.reasons, draft.drafter, draft.q) == (True, [None], ["ngram"], None)

    def refuse() -> None:
        row = RowRecord(1, "ngram", len(tokens), 0, confidence, None)
        auto.observe(StepRecord(1 + len(tokens), 1e-3, 0.0, 0.0, [row]))

    refuse()
    assert auto.watch([ours]) is not None  # which learns what became of the last copy
    assert auto.budget.arms[1, "ngram"].copied
    for _ in range(40):  # until the text has shown that its copies are not kept
        refuse()
    assert auto.copies([ours], [16]) is None


def test_where_no_copy_could_pay_nobody_watches_or_wakes() -> None:
    ours = text(1, [*RUN, 7, 8, 9])
    auto, _ = resting(DEAR, ours)
    assert auto.watch([ours]) is None
    ours.tokens += RUN[:24]
    assert auto.copies([ours], [16]) is None
    assert auto.limits([ours], ["auto"], 16)[0][0] == 0


def says(watch: Watch | None, steps: int) -> list[bool]:
    assert watch is not None
    return [watch.finds() for _ in range(steps)]


@pytest.mark.parametrize(
    ("count", "spent", "every"), [(copies.FEW_TEXTS, 0.0, 1), (copies.FEW_TEXTS + 1, 0.0, 4), (8, 9.0, 16)]
)
def test_more_than_a_few_texts_are_watched_in_some_steps_only(count: int, spent: float, every: int) -> None:
    """Rarer where looks at so many have brought less than they took."""
    texts = [text(sid, [*RUN, 7, sid]) for sid in range(count)]
    auto, _ = resting(CHEAP, *texts)
    auto._lookups._quiet._here.spent = spent
    watch = auto.watch(texts)
    assert says(watch, 2 * every) == [False] * 2 * every
    texts[0].tokens += RUN[:24]
    assert says(watch, every) == [False] * (every - 1) + [True]


def test_many_texts_that_go_on_as_what_they_were_given_are_watched_more_often() -> None:
    texts = [text(1, [*RUN, 7, 1], reference=(8, 9)), *[text(sid, [*RUN, 7, sid]) for sid in range(2, 6)]]
    auto, drafter = resting(CHEAP, *texts)
    auto._lookups._quiet._here.spent = 9.0
    texts[0].tokens += RUN[:24]
    assert says(auto.watch(texts), 16) == [False] * 15 + [True]
    assert not auto._lookups._followed
    law = b.arm_of(auto.budget, 1, NGRAM).law
    auto.budget = replace(auto.budget, firsts={law: (30.0, 30.0)})
    assert says(auto.watch(texts), 4) == [False, False, False, True]
    assert drafter.look(texts[0], 4)[0] == RUN[24:28]
    assert auto._lookups._followed == {1}
    auto.budget = replace(auto.budget, firsts={law: (10.0, 30.0)})  # they are kept no more
    auto.watch(texts)
    assert not auto._lookups._followed


def test_sampled_text_is_watched_only_where_it_was_given_something_to_copy_from() -> None:
    sampled = SamplingParams(max_tokens=900, temperature=0.8)
    bare, given = text(1, [*RUN, 7], params=sampled), text(2, [*RUN, 7], params=sampled, reference=(8, 9))
    for ours, watched in ((bare, False), (given, True)):
        auto, _ = resting(CHEAP, ours)
        assert (auto.watch([ours]) is not None) is watched


def test_a_copy_that_is_followed_is_let_go_where_one_is_checked() -> None:
    lookups, ours = Lookups(NgramDrafter()), text(1, [*RUN, 7])
    lookups.among(1, sampled=False, rests=True)
    lookups.judged(ours, "ngram", RUN[:4], [0.9] * 4, checked=False)
    assert 8 + lookups.told(ours, 8) == 12  # when it is known what would have become of it
    lookups.judged(ours, "ngram", RUN[:4], [0.9] * 4, checked=True)
    assert (lookups.told(ours, 8), lookups._next(ours, 8, firsts(ours)) > 12) == (0, True)


def test_few_texts_at_rest_are_watched_and_looked_at_at_once_only_where_such_copies_are_kept() -> None:
    lookups = Lookups(NgramDrafter())
    lookups.among(1, sampled=False, rests=True)
    given, bare = text(1, [1, 2], reference=tuple(RUN)), text(2, [1, 2])
    assert lookups.join(given, 70, firsts(given, 1.0)) == 71  # its prompt is being read
    other = replace(given, id=3)
    assert lookups.join(other, 70, firsts(other)) == lookups.join(bare, 70, firsts(bare)) == NEVER
    assert lookups.due(replace(given, id=4), 70, firsts(given, 1.0)) == 70
    assert lookups.due(replace(given, id=5), 70, firsts(given)) > 70
    lookups.among(1, sampled=False, rests=False)  # a network drafts: nobody watches
    assert lookups.due(replace(given, id=6), 70, firsts(given)) == 70


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_text_that_goes_on_as_what_it_was_given_is_looked_at_at_once_among_however_many(
    temperature: float,
) -> None:
    params = SamplingParams(max_tokens=900, temperature=temperature)
    for call in ("join", "due"):
        lookups = Lookups(NgramDrafter())
        lookups.among(16, sampled=temperature > 0, rests=True)
        for _ in range(99):
            lookups.timed(0.2, 1.0, 0)  # looks are dear, and have brought nothing
        for sid, kept, at_once in ((1, 1.0, True), (2, 0.6, False), (3, None, False)):
            given = text(sid, [1, 2], reference=tuple(RUN), params=params)
            found = getattr(lookups, call)(given, 70, firsts(given, kept))
            assert (found <= 71) is at_once
        bare = text(4, [1, 2], params=params)
        found = getattr(lookups, call)(bare, 70, firsts(bare, 1.0))
        assert found > 71


def test_among_many_texts_looks_in_vain_take_little_of_the_time_whatever_becomes_due() -> None:
    lookups, given = Lookups(NgramDrafter()), text(1, [1, 2], reference=tuple(RUN))
    lookups.among(16, sampled=False, rests=True)
    assert lookups.join(given, 70, firsts(given, 1.0)) == 71
    lookups.timed(0.2, 1.0, 100)
    assert lookups.until == 104  # it has taken a fifth of a step: a twentieth of four
    assert lookups.join(given, 101, firsts(given, 1.0)) == 104
    assert lookups.next([1, 2, 3], 101) == 104
    for _ in range(40):
        lookups.timed(0.2, 1.0, 100)
    assert lookups.until == 150  # looks have brought nothing: a 250th of fifty
    lookups.timed(99.0, 1.0, 100)
    assert lookups.until == 100 + SPARING * LOOK
    lookups.among(3, sampled=False, rests=True)  # few texts cost little, and are watched
    assert lookups.until == 0
    assert lookups.next([1, 2, 3], 105) == NEVER


def test_what_a_watch_finds_has_to_wait_after_a_look_in_vain() -> None:
    texts = [text(sid, [*RUN, 7]) for sid in range(16)]
    auto, _ = resting(CHEAP, *texts)
    for ours in texts:
        ours.tokens += RUN[:24]
    begun = auto._now
    auto._lookups.timed(9.0, 1.0, begun)
    rows = [RowRecord(s.id, "none", 0, 0, [], b.NO_PROPOSAL) for s in texts]
    for steps, copied in ((SPARING * LOOK - 1, False), (1, True)):
        auto.observe(StepRecord(16, 1e-3, 0.0, 0.0, rows, times=steps))
        assert (auto.copies(texts, [16] * 16) is not None) is copied
    assert auto._now == begun + SPARING * LOOK


def test_what_is_looked_up_twice_for_the_same_tokens_is_searched_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter, ours, searched = NgramDrafter(), text(1, [*RUN, 7, *RUN[:8]]), []
    match = drafter.match
    monkeypatch.setattr(drafter, "match", lambda *a: searched.append(a) or match(*a))
    tokens, confidence = drafter.look(ours, 16)
    del tokens[2:]  # whoever asks may cut what it gets
    again, _ = drafter.look(ours, 16)
    assert (again, len(again), len(searched)) == (RUN[8:24], len(confidence), 1)
    ours.tokens.append(RUN[8])
    assert drafter.look(ours, 16)[0] == RUN[9:25]
    assert drafter.look(ours, 3)[0] == RUN[9:12]
    assert len(searched) == 3


def test_rungs_are_as_sure_as_what_is_looked_up() -> None:
    drafter = NgramDrafter()
    assert len(drafter.rungs) == len(LENGTHS)
    ours = text(1, [*RUN, 7, *RUN[:8]])
    assert drafter.look(ours, 16)[1] == drafter.rungs[LENGTHS.index(8)]
    assert all(low[0] < high[0] for low, high in zip(drafter.rungs, drafter.rungs[1:], strict=False))


def test_whether_copies_could_pay_is_judged_as_long_as_they_may_be() -> None:
    """Sixteen tokens that are kept may pay for what four do not."""
    costs = Profile((1, 2, 33), (1.0, 1.05, 2.6)).costs()
    copies, network = Kind("ngram", (0.9,), sequential=False), Kind("mtp", (0.9,))
    budget = b.Budget(costs, (copies, network), care=5.0)
    assert b.break_even(budget, copies, 1, 1, 1) < 1 < b.break_even(budget, network, 1, 1, 1)
