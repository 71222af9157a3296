"""The controller's arithmetic: choices against brute force, learning, parking, probing, calibration, alarms."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core import SamplingParams, Sequence
from paceline.engine import acceptance as acc
from paceline.engine import budget as b
from paceline.engine import controller as controller_module
from paceline.engine import copies, learning
from paceline.engine.acceptance import NGRAM, Kind, fresh_arm, sober
from paceline.engine.audit import COLD, hopeful
from paceline.engine.budget import Budget
from paceline.engine.care import Care
from paceline.engine.choice import Before
from paceline.engine.controller import AutoController
from paceline.engine.costs import Costs, Profile, Step, staircase
from paceline.engine.fixed import FixedController
from paceline.engine.picker import StepPicker
from paceline.engine.records import RowRecord, StepRecord
from paceline.engine.rounds import DraftCost, Round
from paceline.engine.tempo import PACE, READING, Tempo

MTP = Kind("mtp", (0.75, 0.7, 0.65, 0.6))
FLAT = Profile((1, 5, 9, 17, 32), (1.0, 1.1, 1.3, 1.9, 3.0))
LINEAR = Profile((1, 2, 4, 8, 16, 32), (1.0, 2.0, 4.0, 8.0, 16.0, 32.0))


def sequence(sid: int, max_tokens: int = 1000, **params: object) -> Sequence:
    return Sequence(sid, [1, 2, 3], 3, SamplingParams(max_tokens=max_tokens, **params), seed=1)  # type: ignore[arg-type]


def row(sid: int, drafted: int, accepted: int, confidence: float = 0.8, drafter: str = "mtp") -> RowRecord:
    return RowRecord(
        sid, drafter, drafted, accepted, [confidence] * drafted, None if drafted else b.NO_CONFIDENCE
    )


def seen_rows(budget: Budget, rows: list[RowRecord]) -> Budget:
    return learning.of_all(learning.of_texts(budget, rows), rows)


def make(profile: Profile, draft: float = 0.05, kind: Kind = MTP) -> Budget:
    costs = profile.costs()
    for steps, tokens in ((1, 1), (4, 4), (1, 8), (4, 32), (8, 8)) * 8:
        costs = costs.observe_rounds(kind.name, [Round(steps, tokens, draft * steps)])
    return Budget(costs, (kind,))


@pytest.mark.parametrize(("rows", "texts", "masked"), [(1, 1, 0), (4, 4, 2), (16, 16, 0), (3, 2, 2)])
def test_prices_of_more_and_more_rows_are_those_of_each(rows: int, texts: int, masked: int) -> None:
    means = {
        READING: 0.4,
        PACE: 0.2,
        ("level", texts.bit_length(), 0): -0.1,
        ("spread of mtp", texts.bit_length(), 2): 0.3,
    }
    costs = replace(FLAT.costs(), tempo=Tempo(means), mask=0.25, text=0.1, reach=(1e-3, 1e-4, 200.0))
    here = costs.within(texts, 900, masked)
    prices = list(itertools.islice(here.targets(rows, "mtp"), 100))
    assert prices == [here.target(rows + more, "mtp") for more in range(100)]
    assert prices[::5] == list(itertools.islice(here.targets(rows, "mtp", more=5), 20))
    look = copies.Look("mtp", here, rows, texts, 1.0, slope=0.01)
    each = [
        (here.target(rows + n * texts, "mtp") - here.target(rows)) / texts + 0.01 * n for n in range(1, 17)
    ]
    assert [*look.upto(4)] == each[:4]
    assert look.upto(16) == each


def picker(auto: AutoController, ids: Iterable[int]) -> StepPicker:
    """Of a round for such texts."""
    lives: Any = [SimpleNamespace(rule="match", sequence=SimpleNamespace(id=i)) for i in ids]
    return StepPicker(lives, auto, 1)


def goes_on(auto: AutoController, sid: int, confidence: list[float]) -> bool:
    """Whether a draft of such tokens is worth a further one, where nobody else drafts."""
    alone, on = picker(auto, [sid]), [0]
    for step, sure in enumerate(confidence):
        alone.take(0, [0], [sure])
        on = alone.go_on([0], step)
    return bool(on)


def round_of(auto: AutoController, limits: list[int], law: dict[int, float]) -> list[int]:
    """Tokens that are drafted of so many at most, with a confidence that says what is kept."""
    drawn, chances, step = picker(auto, law), list(law.values()), 0
    on = [row for row, limit in enumerate(limits) if limit]
    while on:
        for row in on:
            drawn.take(row, [0], [chances[row]])
        on = drawn.go_on([row for row in on if step + 1 < limits[row]], step)
        step += 1
    return [len(tokens) for tokens in drawn.draft("mtp").tokens]


def simulate(
    auto: AutoController, law: dict[int, float], steps: int, draft: float = 0.05, seed: int = 0
) -> dict[str, float]:
    """Run a fake engine whose true costs are the profile's: row i keeps each token with chance law[i]."""
    rng, true = random.Random(seed), auto.budget.costs
    done = {"tokens": 0.0, "seconds": 0.0, "drafted": 0.0}
    for _ in range(steps):
        limits = auto.limits([sequence(i) for i in law], ["auto"] * len(law), 16)
        rows = []
        lengths = round_of(auto, [limit for limit, _ in limits], law)
        for (sid, chance), (limit, reason), drafted in zip(law.items(), limits, lengths, strict=True):
            assert (limit == 0) == (reason is not None)
            kept = next((j for j in range(drafted) if rng.random() >= chance), drafted)
            rows.append(RowRecord(sid, "mtp", drafted, kept, [chance] * drafted, reason))
        total, calls = sum(r.drafted for r in rows), max(r.drafted for r in rows)
        seconds = true.target(len(rows) + total)
        auto.observe(StepRecord(len(rows) + total, seconds, draft * calls, 0.0, rows))
        done["tokens"] += len(rows) + sum(r.accepted for r in rows)
        done["seconds"] += seconds + draft * calls
        done["drafted"] += total
    return done


def rate_of(budget: Budget, lengths: Mapping[int, int], rows: int, kind: Kind = MTP) -> float:
    """The objective, straight from its definition."""
    base, step, slope = budget.costs.drafting("mtp")
    arms = {i: b.arm_of(budget, i, kind) for i in lengths}
    tokens = sum(1 + sober(arms[i], len(lengths)) * sum(arms[i].survive[:k]) for i, k in lengths.items())
    drafted = sum(lengths.values())
    steps = max(lengths.values())
    drafting = (base if steps else 0.0) + step * steps + slope * drafted
    return tokens / (budget.costs.target(rows + drafted) + drafting)


def test_many_texts_share_the_benefit_of_the_doubt() -> None:
    """Each may be better than it seems, but hardly all of them at once."""
    fresh = fresh_arm(MTP)
    plain = fresh.accept[0] * (1 - fresh.hope)
    assert plain == pytest.approx(MTP.prior[0])
    assert fresh.accept[0] == 1.0  # at most
    assert sober(fresh, 1) == 1.0
    assert fresh.accept[0] * sober(fresh, 4) == pytest.approx((fresh.accept[0] + plain) / 2)
    assert fresh.accept[0] * sober(fresh, 10_000) == pytest.approx(plain, rel=0.01)
    steep = make(Profile((1, 2, 4, 8, 16, 32), (1.0, 1.6, 2.8, 5.2, 10.0, 19.0)), 0.0)
    limits = [b.choose(steep, MTP, dict.fromkeys(range(n), 1), n, n).limits.values() for n in (1, 16)]
    assert (any(limits[0]), any(limits[1])) == (True, False)
    never = fresh_arm(Kind("never", (0.0,)))
    assert (never.hope, sober(never, 4)) == (0.0, 1.0)


@pytest.mark.parametrize(
    "profile", [FLAT, LINEAR, Profile((1, 4, 5, 8, 9, 32), (1.0, 1.05, 1.6, 1.7, 2.6, 6.0))]
)
@pytest.mark.parametrize("draft", [0.0, 0.02, 0.1, 0.4])
def test_choice_is_as_good_as_brute_force(profile: Profile, draft: float) -> None:
    budget = make(profile, draft)
    for sid, chance in enumerate((0.95, 0.6, 0.2)):
        for _ in range(12):
            kept = 4 if chance > 0.9 else 1 if chance > 0.5 else 0
            budget = seen_rows(budget, [row(sid, 4, kept)])
    caps = dict.fromkeys(range(3), 6)
    plan = b.choose(budget, MTP, caps, 3, 3)
    best = max(rate_of(budget, dict(enumerate(k)), 3) for k in itertools.product(range(7), repeat=3))
    assert rate_of(budget, plan.limits, 3) >= 0.97 * best
    one = b.choose(budget, MTP, {0: 6}, 1, 1)  # a single row is solved exactly
    best = max(rate_of(budget, {0: k}, 1) for k in range(7))
    assert rate_of(budget, one.limits, 1) == pytest.approx(best)
    if any(one.limits.values()):
        assert 0.9 * best < one.rate < best  # without the benefit of the doubt
    else:
        assert one.rate == best


def test_linear_cost_means_zero_and_says_so() -> None:
    auto = AutoController(LINEAR, [MTP])
    assert auto.limits([sequence(1)], ["auto"], 16) == [(0, b.PARKED_BY_COST)]


def test_load_parks_and_less_load_brings_back() -> None:
    loaded = Profile((1, 8, 16, 32, 64), (1.0, 1.1, 2.0, 4.0, 8.0))
    auto = AutoController(loaded, [MTP])
    assert auto.limits([sequence(1)], ["auto"], 16)[0][0] >= 3
    many = [sequence(i) for i in range(16)]
    assert {limit for limit, _ in auto.limits(many, ["auto"] * 16, 16)} == {0}
    assert auto.limits([sequence(1)], ["auto"], 16)[0][0] >= 3


def test_bad_row_is_parked_beside_a_good_one() -> None:
    auto = AutoController(FLAT, [MTP])
    auto.budget = replace(auto.budget, costs=make(FLAT, 0.2).costs)
    for _ in range(30):
        auto.limits([sequence(1), sequence(2)], ["auto", "auto"], 16)
        auto.observe(StepRecord(10, FLAT.costs().target(10), 0.8, 0.0, [row(1, 4, 4), row(2, 4, 0, 0.1)]))
    (good, _), (bad, _reason) = auto.limits([sequence(1), sequence(2)], ["auto", "auto"], 16)
    assert good >= 4
    assert bad <= 1
    assert b.arm_of(auto.budget, 2, MTP).accept[0] < 0.35 < 0.9 < b.arm_of(auto.budget, 1, MTP).accept[0]


def test_never_slower_with_a_hopeless_drafter() -> None:
    auto = AutoController(FLAT, [MTP])
    auto.budget = replace(auto.budget, costs=make(FLAT, 0.5).costs)
    done = simulate(auto, {1: 0.02}, 2000, draft=0.5)
    plain = done["seconds"] / 2000
    assert plain / 1.0 < 1.01, f"{plain:.4f} seconds a step against 1.0 of plain decoding"
    assert done["drafted"] > 0  # it did probe


def test_a_probe_lasts_while_its_tokens_are_kept() -> None:
    auto = AutoController(FLAT, [MTP])
    auto.budget = replace(auto.budget, costs=make(FLAT, 0.5).costs)
    simulate(auto, {1: 0.0}, 200, draft=0.5)
    asked = []
    for step in range(900):
        ((limit, _),) = auto.limits([sequence(1)], ["auto"], 16)
        asked.append(limit)
        kept = int(limit > 0 and step > 400)
        auto.observe(StepRecord(1 + limit, 1.0, 0.5 * limit, 0.0, [row(1, limit, kept)]))
    probes = [step for step, limit in enumerate(asked[:400]) if limit]
    assert 0 < len(probes) <= 4
    assert all(not asked[step + 1] for step in probes)
    assert sum(limit > 0 for limit in asked[400:]) > len(probes)


def test_a_row_that_keeps_its_probe_goes_on_alone() -> None:
    auto = AutoController(FLAT, [MTP])
    auto.budget = replace(auto.budget, costs=make(FLAT, 0.5).costs)
    simulate(auto, {1: 0.0, 2: 0.0}, 200, draft=0.5)
    asked = []
    for _ in range(600):
        limits = [limit for limit, _ in auto.limits([sequence(1), sequence(2)], ["auto", "auto"], 16)]
        asked.append(tuple(limits))
        rows = [row(sid, limit, limit if sid == 1 else 0) for sid, limit in zip((1, 2), limits, strict=True)]
        auto.observe(StepRecord(2 + sum(limits), 1.0, 0.5 * max(limits), 0.0, rows))
        if asked[-2:-1] == [(1, 1)]:
            break
    assert asked[-1] == (1, 0)


def test_kept_probes_bring_a_row_back() -> None:
    auto = AutoController(FLAT, [MTP])
    simulate(auto, {1: 0.0}, 300)
    assert b.arm_of(auto.budget, 1, MTP).parked or auto.limits([sequence(1)], ["auto"], 16)[0][0] <= 1
    done = simulate(auto, {1: 0.9}, 300)
    assert done["tokens"] / done["seconds"] > 2.0


def test_to_begin_takes_more_of_a_promise_than_to_go_on() -> None:
    kind = replace(MTP, known=True)

    def promise(draft: float) -> float:
        budget = make(FLAT, draft, kind)
        limits = b.choose(budget, kind, {1: 16}, 1, 1, 0.0).limits
        return rate_of(budget, limits, 1, kind) * budget.costs.target(1)

    nearly = next(draft for draft in (x / 400 for x in range(1, 800)) if promise(draft) < b.START)
    assert promise(nearly) > 1.0
    costs = make(FLAT, nearly, kind).costs
    new = AutoController(FLAT, [kind])
    new.budget = replace(new.budget, costs=costs)
    assert new.limits([sequence(1)], ["auto"], 16)[0][0] == 0
    old = AutoController(FLAT, [kind])
    old.budget = replace(old.budget, costs=make(FLAT, 0.01, kind).costs)
    assert old.limits([sequence(1)], ["auto"], 16)[0][0] > 0
    old.budget = replace(old.budget, costs=costs)
    for _ in range(8):
        old.observe(StepRecord(0, 0.0, 0.0, 0.0, []))
    assert old.limits([sequence(1)], ["auto"], 16)[0][0] > 0


def test_sampled_text_is_thought_to_keep_what_the_pair_is_known_for() -> None:
    """Greedy texts differ, so a new one may be better than it seems; sampled ones hardly do: no benefit of the doubt."""
    kind = replace(MTP, known=True, sampled=MTP.prior)
    greedy, sampled = fresh_arm(kind), fresh_arm(kind, True)
    assert sampled.accept[: len(MTP.prior)] == pytest.approx(MTP.prior)
    assert greedy.accept[0] > sampled.accept[0]
    assert (sampled.hope, sober(sampled, 4)) == (0.0, 1.0)
    half = acc.learn(sampled, [(1, 0), (1, 1)] * 12)
    assert half.hope == 0.0
    assert 0.5 < half.accept[0] < MTP.prior[0]


@pytest.mark.parametrize(("texts", "temperature"), [(1, 0.0), (1, 0.8), (2, 0.0), (2, 0.8)])
def test_what_nearly_pays_is_to_be_tried_but_not_of_several_sampled_texts(
    texts: int, temperature: float
) -> None:
    kind = replace(MTP, known=True, prior=(0.6, 0.6), sampled=(0.6, 0.6))
    rows = [sequence(i, temperature=temperature) for i in range(texts)]
    tried, left = list[float](), list[float]()
    for draft in range(1, 200):
        auto = AutoController(FLAT, [kind])
        auto.budget = replace(auto.budget, costs=make(FLAT, draft / 50, kind).costs)
        if any(limit for limit, _ in auto.limits(rows, ["auto"] * texts, 16)):
            continue  # it pays as it is
        assert auto._choice is not None
        hoping = replace(auto.budget, costs=hopeful(auto.budget.costs.within(texts, 3 * texts)))
        plan = b.choose(hoping, kind, dict.fromkeys(range(texts), 16), texts, texts)
        promised = rate_of(hoping, plan.limits, texts, kind) * hoping.costs.target(texts) / texts
        (tried if auto._choice.trial_due < float("inf") else left).append(promised)
    if (texts, temperature) == (2, 0.8):
        assert not tried
        return
    assert min(tried) >= b.TRIED > max(left)


@pytest.mark.parametrize("chance", [0.2, 0.5, 0.7, 0.9, 0.97])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_auto_reaches_the_best_fixed_length(chance: float, rows: int) -> None:
    written = seconds = 0.0
    for seed in range(3):
        done = simulate(AutoController(FLAT, [MTP]), dict.fromkeys(range(rows), chance), 700, seed=seed)
        written, seconds = written + done["tokens"], seconds + done["seconds"]
    true = FLAT.costs()
    fixed = max(
        rows * sum(chance**j for j in range(k + 1)) / (true.target(rows * (k + 1)) + 0.05 * k)
        for k in range(17)
    )
    assert written / seconds > 0.95 * fixed


def test_requests_do_not_learn_from_each_other() -> None:
    budget = make(FLAT)
    for _ in range(20):
        budget = seen_rows(budget, [row(1, 4, 0)])
    assert b.arm_of(budget, 2, MTP) == acc.fresh_arm(MTP)
    assert not learning.forget(budget, {1}).arms


def test_request_settings_and_room() -> None:
    rows = [sequence(1), sequence(2), sequence(3, max_tokens=1), sequence(4, max_tokens=3)]
    want: list[b.Want] = [0, 5, 4, 16]
    for controller in (FixedController(3), AutoController(FLAT, [MTP])):
        assert controller.limits(rows, want, 8) == [(0, b.DISABLED), (5, None), (0, b.NO_ROOM), (2, None)]
        assert controller.limits(rows[:1], ["auto"], 0) == [(0, b.NO_DRAFTER)]
    assert FixedController(3).limits(rows[:1], ["auto"], 8) == [(3, None)]


def copied(sid: int, kept: int) -> RowRecord:
    return RowRecord(sid, "ngram", 4, kept, [0.9] * 4, None)


@pytest.mark.parametrize("kept", [0, 4])
def test_whether_a_first_copy_is_kept_is_learnt_from_those_of_texts_of_its_kind(kept: int) -> None:
    """Later copies of the same texts were all kept, and all look the same."""
    costs = Profile((1, 5, 17), (1.0, 2.6, 6.8)).costs()
    budget, look = Budget(costs, (NGRAM,)), copies.Look("ngram", costs, 1, 1, 1.0)
    texts = [replace(sequence(sid), reference=(7, 8)) for sid in range(20)]
    budget = b.meet(budget, NGRAM, texts)

    def tokens(own: int = 0, reference: tuple[int, ...] = (7, 8), **law: Any) -> int:
        """Of the next copy of a text that is new, after so many others of which the first was refused."""
        stranger = replace(sequence(99, temperature=law.get("temperature", 0.0)), reference=reference)
        stranger.constraint = law.get("constraint")
        met = b.meet(budget, NGRAM, [stranger])
        if own:
            met = seen_rows(met, [copied(99, 0), *[copied(99, 4)] * (own - 1)])
        return copies.offer(met, NGRAM, b.arm_of(met, 99, NGRAM), look, [0.9] * 16)[0]

    assert tokens() == 4
    for text in texts:
        budget = seen_rows(budget, [copied(text.id, kept)])
        budget = seen_rows(budget, [copied(text.id, 4)])
    assert tokens() == 4 * kept  # as many as there are where nearly all are kept
    assert tokens(own=1) == 4  # what its next copies are worth is another question
    assert tokens(own=3) > 4  # two of its own were kept: they may be longer
    assert tokens(reference=()) == tokens(temperature=0.8) == tokens(constraint=object()) == 4
    assert budget.firsts == {"ngram of a reference": (20.0 if kept else 0.0, 20.0)}


def test_copies_are_judged_together() -> None:
    """Each of them gains a little; a step with copies takes something whoever has one, and its first rows most."""
    costs = Profile((1, 2, 5, 17, 33), (1.0, 1.8, 2.0, 2.6, 6.8)).costs()
    budget = b.meet(Budget(costs, (NGRAM,)), NGRAM, [sequence(1)])
    look = copies.Look("ngram", costs, 1, 8, 1.0, base=0.5)
    one = copies.offer(budget, NGRAM, b.arm_of(budget, 1, NGRAM), look, [0.5] * 16)
    assert (one.tokens, one.gain > 0) == (2, True)
    assert one.kept == pytest.approx(0.5 + 0.25)
    assert not copies.together(budget, look, [one], wakes=False)
    assert not copies.together(budget, look, [copies.Offer()] * 8, wakes=False)
    assert copies.together(budget, look, [one] * 8, wakes=False)
    assert not copies.together(replace(budget, wake={4: 8.0}), look, [one] * 8, wakes=True)


def test_copies_that_pay_together_only_are_checked_together() -> None:
    auto = AutoController(Profile((1, 2, 5, 17, 33), (1.0, 1.8, 2.0, 2.6, 6.8)), [NGRAM])
    texts = [sequence(sid) for sid in range(8)]
    copy: tuple[list[int], list[float]] = ([7] * 16, [0.5] * 16)

    def checked(found: list[tuple[list[int], list[float]]], *, anyway: bool = False) -> list[int]:
        auto.limits(texts, ["auto"] * 8, 16)
        return [tokens for tokens, _ in auto.offers(texts, "ngram", found, anyway=anyway)]

    assert all(checked([copy] * 8))
    alone: list[tuple[list[int], list[float]]] = [copy, *[([], [])] * 7]
    assert checked(alone) == [0] * 8
    assert [n > 0 for n in checked(alone, anyway=True)] == [True, *[False] * 7]  # others draft, too
    auto.limits(texts, ["auto"] * 8, 16)
    assert auto._choice is not None
    auto._choice.limits["ngram"] = {0: 16}  # the only one that is due to be looked at
    assert auto.offers(texts, "ngram", alone, anyway=False) == [(0, 0.0)] * 8
    others = [sequence(sid) for sid in range(8, 16)]
    auto.limits(others, [3, *["auto"] * 7], 16)
    given = auto.offers(others, "ngram", [([7] * 3, [0.5] * 3), copy, *[([], [])] * 6], anyway=False)
    assert given[0][0] == 3  # as many as were asked for, whatever they gain
    assert given[1][0] > 0 == given[2][0]


def test_what_plain_steps_are_off_by_from_what_is_typical_is_no_price_of_waking() -> None:
    """Accidents only make steps longer: the mean of a few lies above their median, with copies before them or without."""
    costs = Profile((1, 5, 17), (1.0, 2.6, 6.8)).costs()
    budget = b.meet(Budget(costs, (NGRAM,)), NGRAM, [sequence(1)])
    plain = [replace(copied(1, 0), drafted=0)]
    warm = StepRecord(1, 1.0, 0.0, 0.0, plain, times=64, more_seconds=76.0 - 1.0, alike=200)
    uneven = learning.observe(budget, [warm] * 60).uneven
    assert uneven == {1: pytest.approx(76 / 64, rel=0.01)}
    many = learning.observe(replace(budget, uneven=uneven), [replace(warm, draft_seconds=0.1)] * 60)
    assert many.costs.target(1) == pytest.approx(1.1 * 76 / 64, rel=0.05)  # on average, all of it
    copy = StepRecord(5, costs.target(5), 0.0, 0.0, [copied(1, 0)], alike=1)
    rest = StepRecord(1, 1.0, 0.0, 0.0, plain, times=7, more_seconds=7 * 76 / 64 - 1.0, alike=7)
    known = replace(budget, uneven=uneven)
    naive, right = (learning.observe(one, [copy, rest] * 20).wake for one in (budget, known))
    assert naive[1] > 1.0
    assert right[1] == pytest.approx(0.0, abs=0.01)
    slow = replace(warm, more_seconds=1e6)  # the machine slept
    assert learning.observe(budget, [slow] * 99).uneven[1] <= learning.MOST_UNEVEN


def test_of_the_odds_of_a_copy_its_texts_own_ones_speak() -> None:
    """As far as they were other than promised: long matches that were kept say nothing of short ones."""
    lines = acc.calibration(None)  # a confidence means what it says

    def chances(confidence: float, kept: int) -> list[float]:
        """Of an unsure copy, and a sure one, after eight of one token."""
        arm = acc.followed(acc.fresh_arm(NGRAM), [([confidence], int(i < kept)) for i in range(8)], lines)
        assert (arm.hits[0], arm.tries[0]) == (kept, 8)
        assert arm.promised[0] == pytest.approx(8 * confidence)
        assert acc.in_text(arm, 1, 0.5) == pytest.approx(0.5)  # of its second token nothing was seen
        return [acc.in_text(arm, 0, chance) for chance in (0.0, 0.5, 0.9, 1.0)]

    assert chances(0.75, 6) == pytest.approx([0.0, 0.5, 0.9, 1.0])  # as promised
    never, unsure, sure, always = chances(0.98, 8)
    assert 0.5 < unsure < 0.53
    assert (never, always) == (0.0, 1.0)
    assert chances(0.5, 8)[1] > 0.75
    assert chances(0.5, 0)[1] < 0.25
    assert sure < chances(0.5, 8)[2] < 1.0
    long = acc.followed(acc.fresh_arm(NGRAM), [([0.5], 1)] * 400, lines)
    assert acc.in_text(long, 0, 0.5) < 0.97  # it remembers so many only
    assert long.tries[0] == pytest.approx(acc.WINDOW)
    rested = acc.parked(long, 7)
    assert rested.promised[0] == pytest.approx(rested.tries[0] / 2) == acc.PARKED_WINDOW / 2


def test_what_a_copy_is_worth_rises_with_what_it_can_be_sure_of() -> None:
    costs = Profile((1, 5, 17), (1.0, 2.6, 6.8)).costs()
    budget, look = (
        b.meet(Budget(costs, (NGRAM,)), NGRAM, [sequence(1)]),
        copies.Look("ngram", costs, 1, 1, 1.0),
    )
    arm, rungs = b.arm_of(budget, 1, NGRAM), [[sure] * 16 for sure in (0.1, 0.5, 0.7, 0.95)]
    gains = copies.worth(budget, NGRAM, arm, look, rungs)
    assert gains[0] == 0.0 < gains[2] < gains[3]
    assert gains == sorted(gains)
    assert gains[3] == copies.offer(budget, NGRAM, arm, look, rungs[3]).gain
    assert copies.worth(budget, NGRAM, arm, look, []) is gains  # it is worked out once for a plan
    dear = replace(look, base=0.5, worths={})
    assert copies.needed(budget, look) == 0.0
    assert copies.needed(replace(budget, wake={1: 0.25}), dear) == pytest.approx(0.5 + 0.25)


def test_a_copy_pays_for_waking_unless_others_follow() -> None:
    costs = Profile((1, 5, 17), (1.0, 2.6, 6.8)).costs()
    budget, look = (
        b.meet(Budget(costs, (NGRAM,)), NGRAM, [sequence(1)]),
        copies.Look("ngram", costs, 1, 1, 1.0),
    )

    def pays(confidence: float, *, wakes: bool, texts: int = 1) -> bool:
        offer = copies.offer(budget, NGRAM, b.arm_of(budget, 1, NGRAM), look, [confidence] * 16)
        return copies.together(budget, replace(look, texts=texts), [offer], wakes=wakes)

    assert pays(0.7, wakes=True)
    alone = StepRecord(3, costs.target(3) + 0.5, 0.0, 0.0, [replace(copied(1, 0), drafted=2)], alike=1)
    after = StepRecord(1, 1.2, 0.1, 0.0, [replace(copied(1, 0), drafted=0)], alike=1)
    rest = StepRecord(1, 1.0, 0.0, 0.0, after.rows, times=20, more_seconds=19.4, alike=21)
    following = replace(alone, alike=2)
    assert learning.observe(budget, [following]).wake == {}
    reading = replace(alone, target_rows=9)
    assert learning.observe(budget, [reading, after]).wake == {}  # of a prompt's rows nothing is known
    budget = replace(budget, wake=learning.observe(budget, [alone, following, after, rest] * 20).wake)
    # the first step, and those until all is warm, for two steps with copies; at rest it is slowly forgotten
    assert budget.wake == {1: pytest.approx((0.5 + 0.3 + 0.4) / 2, rel=0.1)}
    forgotten = learning.observe(budget, [replace(rest, alike=1000, times=1000)]).wake
    assert forgotten[1] == pytest.approx(budget.wake[1] * learning.FORGET**1000)
    assert not pays(0.7, wakes=True)
    assert pays(0.7, wakes=False)
    assert pays(0.99, wakes=True)
    assert pays(0.7, wakes=True, texts=2)  # of so many nothing is known


def test_drafts_of_a_length_that_was_asked_for_teach_of_texts_of_their_kind() -> None:
    auto = AutoController(FLAT, [NGRAM])
    sampled = replace(sequence(1, temperature=0.8), reference=(7, 8))
    assert auto.limits([sampled], [4], 16) == [(4, None)]
    for _ in range(3):
        auto.observe(StepRecord(5, 1.1, 0.0, 0.0, [copied(1, 2)]))
    auto._learn()
    law = NGRAM.law(True, given=True)
    assert set(auto.budget.bins) == {NGRAM.law(True), law}
    assert auto.budget.firsts == {law: (1.0, 1.0)}


def test_calibration_learns_what_confidence_means() -> None:
    budget = make(FLAT)
    nothing = acc.calibration(budget.bins.get("mtp"))
    assert acc.calibrated(nothing, 0.9) == 0.9
    assert acc.calibrated(nothing, math.nan) == 0.0
    rng = random.Random(1)
    for _ in range(3000):  # a drafter that is twice as sure as it should be
        c = rng.random()
        budget = seen_rows(budget, [row(1, 1, int(rng.random() < c / 2), c)])
    seen = budget.bins["mtp"]
    for c in (0.2, 0.5, 0.8):
        worth = acc.calibrated(acc.calibration(seen), c)
        assert worth == pytest.approx(c / 2, abs=0.08)
        assert acc.calibrated(acc.calibration(None, seen), c) == pytest.approx(worth)  # as of others
        assert acc.calibrated(acc.calibration(seen, ((0.0, 99.0),) * acc.BINS), c) < worth + 1e-9


def test_drafting_stops_when_unsure_and_goes_on_when_sure() -> None:
    auto = AutoController(Profile((1, 5, 32), (1.0, 1.4, 4.0)), [MTP])
    auto.budget = replace(auto.budget, costs=make(Profile((1, 5, 32), (1.0, 1.4, 4.0)), 0.1).costs)
    auto.limits([sequence(1)], ["auto"], 16)
    assert not goes_on(auto, 1, [0.02])
    auto.limits([sequence(1)], ["auto"], 16)
    assert goes_on(auto, 1, [0.99])
    assert not goes_on(auto, 1, [0.99, 0.02])


def test_alarm_comes_once_and_only_for_a_known_pair() -> None:
    said: list[str] = []
    known = replace(MTP, known=True)
    auto = AutoController(FLAT, [known], said.append)
    other = AutoController(FLAT, [MTP], said.append)
    for _ in range(300):
        for controller in (auto, other):
            controller.observe(StepRecord(5, 1.0, 0.1, 0.0, [row(1, 4, 0)]))
    assert len(said) == 1
    assert "Likely causes" in said[0]
    said.clear()
    good = AutoController(FLAT, [known], said.append)
    for _ in range(300):
        good.observe(StepRecord(5, 1.0, 0.1, 0.0, [row(1, 4, 2)]))
    assert not said


def test_a_rest_says_for_how_long_limits_would_say_the_same() -> None:
    """Asked at every step or only after its rests, the controller drafts the same."""
    law = {0: 0.1, 1: 0.05}

    def drafts(*, rests: bool) -> list[tuple[int, ...]]:
        auto, out, left = AutoController(FLAT, [MTP]), [], 0
        for step in range(400):
            limits = [(0, "same")] * 2
            if left == 0:
                limits = auto.limits([sequence(i) for i in law], ["auto"] * 2, 16)
                left = max(auto.rest([sequence(i) for i in law], [16] * 2)[0] - 1, 0) if rests else 0
            else:
                left -= 1
            lengths = tuple(limit for limit, _ in limits)
            rows = [
                row(i, k, int(k > 0 and (7 * step + i) % 10 < 10 * law[i])) for i, k in enumerate(lengths)
            ]
            seconds = FLAT.costs().target(2 + sum(lengths))
            auto.observe(StepRecord(2 + sum(lengths), seconds, 0.05 * max(lengths), 0.0, rows))
            out.append(lengths)
        return out

    assert drafts(rests=True) == drafts(rests=False)
    assert AutoController(FLAT, [MTP]).rest([], []) == (0, None)
    assert FixedController(0).rest([], []) == (0, None)


@pytest.mark.parametrize(("kept", "every"), [(4, True), (0, False)])
def test_a_row_that_drafts_is_looked_up_in_every_step_one_that_rests_is_not(kept: int, every: bool) -> None:
    """There is never anything to copy: a look is cheap beside a draft round, and dear beside a plain step."""
    steep, looks = Profile((1, 5, 32), (1.0, 2.0, 9.0)), []
    auto = AutoController(steep, [replace(MTP, known=True), NGRAM])
    for _ in range(120):
        ((limit, reason),) = auto.limits([sequence(1)], ["auto"], 16)
        looks.append(limit > auto.kind_limit(1, "mtp") or reason == b.MEASURING)
        drafted = min(limit, auto.kind_limit(1, "mtp"), 4)
        done = [row(1, drafted, min(kept, drafted))]
        seconds = steep.costs().target(1 + drafted)
        auto.observe(StepRecord(1 + drafted, seconds, 0.1, 0.0, done))
    assert all(looks[20:]) if every else 0 < sum(looks[60:]) < 20  # one trial


def test_costs_follow_the_machine_and_ignore_a_hiccup() -> None:
    costs = FLAT.costs()
    for _ in range(30):
        costs = costs.observe_targets([Step(5, 2.2)] * 8)  # twice as slow as profiled
    assert costs.target(5) == pytest.approx(2.2, rel=0.05)
    assert costs.target(1) == pytest.approx(2.0, rel=0.2)  # how much of it is the drafts' is not known
    hiccup = costs.observe_targets([Step(5, 2.2), Step(5, 100.0), Step(5, 2.2)])
    assert hiccup.target(5) < 1.2 * costs.target(5)
    assert costs.observe_targets([Step(0, 1.0), Step(5, math.nan), Step(900, 1.0)]) is costs


def test_what_masks_take_is_priced_by_row_and_not_the_machines_pace() -> None:
    """Of four texts two are under a constraint, each with a draft of four tokens now and then."""
    budget, rows = make(FLAT), [row(i, 0, 0) for i in range(4)]
    drafting = [row(i, 4, 2) if i < 2 else row(i, 0, 0) for i in range(4)]
    usual = budget.costs.within(4, 0)
    seen = [
        StepRecord(count, usual.target(count), 0.0, 0.0, of, masked=2, mask_seconds=0.25 * count, alike=COLD)
        for count, of in ((4, rows), (12, drafting))
    ] * 30
    seen[7] = replace(seen[7], mask_seconds=999.0)  # it prepared itself
    costs = learning.observe(budget, seen).costs
    assert costs.pace == pytest.approx(budget.costs.pace, rel=0.02)
    two, all_four = costs.within(4, 0, 2), costs.within(4, 0, 4)
    for count in (4, 12):
        assert two.target(count) == pytest.approx(usual.target(count) + 0.25 * count, rel=0.02)
        assert all_four.target(count) == pytest.approx(usual.target(count) + 0.5 * count, rel=0.02)
        assert costs.within(4, 0).target(count) == pytest.approx(usual.target(count), rel=0.02)
    dear = [replace(record, mask_seconds=2 * record.mask_seconds) for record in seen]
    assert learning.observe(replace(budget, costs=costs), dear).costs.mask == pytest.approx(1.0, rel=0.05)
    slow = [replace(r, target_seconds=50.0, masked=0, mask_seconds=0.0) for r in seen]
    assert learning.observe(budget, slow).costs.within(4, 0).target(4) > 2 * usual.target(4)


def test_dear_masks_make_long_drafts_pay_less() -> None:
    lengths = []
    for mask in (0.0, 0.5):
        auto = AutoController(FLAT, [MTP])
        auto.budget = replace(auto.budget, costs=replace(make(FLAT).costs, mask=mask))
        text = replace(sequence(1), constraint=object())  # type: ignore[arg-type]
        lengths.append(auto.limits([text], ["auto"], 16)[0][0])
    assert lengths[0] > lengths[1]


def test_what_a_round_does_to_the_step_after_it_is_a_cost_of_the_round() -> None:
    plain = replace(FLAT, rounds={"mtp": (0.1, 0.1, 0.0)})
    chilled = replace(plain, chill={"mtp": (0.5, 0.1)}).costs()
    assert chilled.drafting("mtp")[0] == pytest.approx(0.6)
    assert chilled.drafting("mtp", 4)[0] == pytest.approx(0.9)
    assert chilled.observe_targets([Step(5, 1.6, "mtp", 1)] * 8).pace == pytest.approx(1.0)
    assert chilled.observe_targets([Step(5, 1.7, "mtp", 2)] * 8).pace == pytest.approx(1.0)
    assert chilled.observe_targets([Step(5, 1.6)] * 8).pace > 1.05
    slow = replace(chilled, tempo=Tempo({READING: 0.0, PACE: math.log(2.0)}))
    assert slow.drafting("mtp") == pytest.approx((1.2, 0.2, 0.0))
    same = slow.observe_rounds("mtp", [Round(1, 1, 0.4)])  # as measured, at this pace
    assert same.drafting("mtp") == pytest.approx(slow.drafting("mtp"))


def test_each_further_text_costs_more_than_its_rows() -> None:
    costs = replace(FLAT, text=0.25).costs()
    assert costs.within(1, 100).target(5) == FLAT.costs().target(5)
    assert costs.within(4, 400).target(4) == pytest.approx(FLAT.costs().target(4) + 3 * 0.25)
    assert costs.within(4, 400).adding(4, 4, "mtp") == pytest.approx(
        FLAT.costs().adding(4, 4, "mtp")
    )  # rows cost what they cost
    seen = [Step(4, FLAT.costs().target(4) + 3 * 0.25, texts=4, context=400)] * 8
    assert costs.observe_targets(seen).pace == pytest.approx(1.0)


def test_what_is_wrong_with_the_price_of_many_texts_is_told_where_their_number_changes() -> None:
    """A model of costs that is wrong about 8 texts made each batch of them, and each text after it, a new machine."""
    costs, one, eight = FLAT.costs(), Step(1, 1.0, texts=1), Step(8, 2.5, texts=8)  # believed: 1.25

    def at_eight(costs: Costs) -> float:
        return costs.within(8, 8).target(8)

    known = costs.observe_targets([one] * 64)
    first = known.observe_targets([eight] * 16)
    assert at_eight(first) == pytest.approx(2.5, rel=0.15)
    assert first.target(1) == pytest.approx(1.0, rel=0.15)  # the machine is what it was
    for _ in range(8):
        costs = costs.observe_targets([one] * 64).observe_targets([eight] * 64)
    assert (at_eight(costs), costs.target(1)) == (pytest.approx(2.5, rel=0.02), pytest.approx(1.0, rel=0.02))
    assert costs.within(8, 8).adding(8, 8, "mtp") == pytest.approx(
        2 * FLAT.costs().adding(8, 8, "mtp"), rel=0.05
    )
    mixed = FLAT.costs().observe_targets([one] * 64 + [eight] * 16)  # told at once
    assert at_eight(mixed) == pytest.approx(2.5, rel=0.15)
    assert mixed.target(1) == pytest.approx(1.0, rel=0.15)


def test_what_many_texts_take_is_not_put_down_to_their_drafts() -> None:
    table = FLAT.costs().table
    plain, drafted = Step(8, 2 * table[7], texts=8), Step(16, 2 * table[15], "ngram", 4, 8)
    seen = [plain] * 16 + [drafted] * 16  # told at once
    costs = FLAT.costs().observe_targets(seen).within(8, 8)
    assert costs.drag == pytest.approx(1.0, abs=0.1)
    assert costs.target(16) == pytest.approx(2 * table[15], rel=0.15)
    assert costs.table == table


def test_the_staircase_stays_whatever_steps_take() -> None:
    """Pace, levels and drags tell what they differ by; a staircase that was bent, too, drifted away within an hour."""
    rng, first = random.Random(0), FLAT.costs()
    costs, table = first, first.table
    for _ in range(400):
        texts, seen = rng.choice((1, 4, 8)), []
        for more in rng.choices((0, 1, 2, 4), k=8):
            taken = (
                1.5 * table[texts + more * texts - 1] * (1.3 if more else 1.0) * rng.lognormvariate(0.0, 0.3)
            )
            seen.append(Step(texts * (1 + more), taken, "mtp" if more else None, 1, texts))
        costs = costs.observe_targets(seen)
    assert costs.table == table
    for texts, more in ((1, 1), (1, 4), (4, 4), (8, 32)):
        now = costs.within(texts, 0)
        true = 1.3 * table[texts + more - 1] / table[texts - 1]
        assert now.target(texts + more) / now.target(texts) == pytest.approx(true, rel=0.4)


def test_a_machine_that_gets_slower_amid_many_texts_gets_slower_for_all() -> None:
    costs = FLAT.costs()
    for _ in range(16):
        costs = costs.observe_targets([Step(1, 1.0, texts=1)] * 8).observe_targets(
            [Step(8, 1.25, texts=8)] * 8
        )
    slow = costs
    for _ in range(25):
        slow = slow.observe_targets([Step(8, 2.5, texts=8)] * 8)
    assert slow.within(8, 8).target(8) == pytest.approx(2.5, rel=0.02)
    assert 1.7 < slow.target(1) < 2.6
    assert costs.observe_targets([Step(8, 1e9, texts=8)] * 16).within(8, 8).target(8) < 100


def test_a_long_context_is_paid_once_by_each_text_and_a_little_by_each_row() -> None:
    costs = replace(FLAT, reach=(1e-3, 1e-4, 100.0)).costs()
    usual = costs.within(2, 200)
    assert [usual.target(n) for n in (2, 8)] == pytest.approx([costs.target(n) for n in (2, 8)])
    long = costs.within(2, 2000)
    assert long.target(2) - costs.target(2) == pytest.approx(2 * 0.9)
    assert long.target(8) - costs.target(8) == pytest.approx(2 * 0.9 + 6 * 0.09)
    assert long.target(100) - costs.target(100) == pytest.approx(2 * 0.9 + 98 * 0.09)
    assert FLAT.costs().within(2, 2000).target(2) == FLAT.costs().target(2)
    steep = replace(FLAT, reach=(1.0, 1e-4, 100.0)).costs()
    assert steep.within(4, 4).target(4) > 0
    seen = Step(8, long.target(8), texts=2, context=2000)
    assert costs.observe_targets([seen] * 8).pace == pytest.approx(1.0)
    assert costs.observe_targets([seen._replace(context=200)] * 8).pace > 1.05


def test_drafts_pay_at_a_long_context_where_they_do_not_at_a_short_one() -> None:
    profile = replace(LINEAR, reach=(0.01, 0.0, 100.0))
    limits = []
    for context in (100, 4000):
        auto = AutoController(profile, [MTP])
        auto.budget = replace(auto.budget, costs=make(profile).costs)
        text = sequence(1)
        text.committed = context
        limits.append(auto.limits([text], ["auto"], 16)[0][0])
        assert auto.budget.costs.here == (1, 0.0, 0.0, 0.0)
    assert limits[0] == 0
    assert limits[1] > 1


def test_staircase_is_monotone_and_hits_its_rungs() -> None:
    table = staircase((1, 2, 4, 8), (1.0, 1.4, 1.2, 2.0), 16)
    assert all(x <= y for x, y in itertools.pairwise(table))
    assert table[0] == 1.0
    assert table[7] == 2.0
    assert table[15] > 3.0
    assert Costs(table).target(100) > Costs(table).target(50)


def test_draft_cost_finds_base_steps_and_tokens() -> None:
    def at(cost: DraftCost, steps: int, tokens: int) -> float:
        base, step, token = cost.fit()
        return base + step * steps + token * tokens

    cost = DraftCost.like(1.0)
    for steps, rows in ((1, 1), (2, 1), (4, 1), (8, 1), (2, 4), (4, 4), (1, 16)) * 8:
        cost = cost.add([(steps, steps * rows, 0.4 + 0.18 * steps + 0.03 * steps * rows)])
    assert at(cost, 4, 4) == pytest.approx(1.24, rel=0.1)
    assert at(cost, 2, 8) == pytest.approx(1.0, rel=0.1)
    alone = DraftCost.like(1.0)
    alone = alone.add([(4, 4, 1.1)] * 40)  # one length only: it cannot know the slopes, but must know the sum
    assert at(alone, 4, 4) == pytest.approx(1.1, rel=0.05)
    assert min(alone.fit()) >= 0


def test_a_plan_beside_a_prompt_holds_for_its_step_and_the_next_one_lasts() -> None:
    auto, plans = AutoController(FLAT, [MTP]), []
    for others in (512, 64, 0, 0):  # a prompt is read, then no more
        auto.limits([sequence(1)], ["auto"], 16, others)
        auto.observe(StepRecord(1 + others, 1.0, 0.0, 0.0, [row(1, 0, 0)]))
        plans.append(auto.planned)
    assert plans == [1, 2, 3, 3]


def test_what_deciding_takes_is_a_part_of_what_drafts_cost() -> None:
    """Nothing is decided in steps without drafts; with one text of a small model it was 8% of a step."""
    costs = Profile((1, 2, 5, 9), (1.0, 1.05, 1.2, 1.4), rounds={"mtp": (0.1, 0.1, 0.0)}).costs()
    quick = b.meet(Budget(costs, (MTP,)), MTP, [sequence(1)])
    slow = replace(quick, care=0.8)
    plans = [b.choose(budget, MTP, {1: 8}, 1, 1) for budget in (quick, slow, replace(quick, care=9.0))]
    assert plans[0].rate > plans[1].rate > plans[2].rate == 1.0
    assert [plan.limits[1] > 0 for plan in plans] == [True, True, False]
    assert b.break_even(slow, MTP, 1, 1, 1) > b.break_even(quick, MTP, 1, 1, 1)
    assert copies.look(slow, "mtp", 1, 1, 1.0).base == pytest.approx(
        copies.look(quick, "mtp", 1, 1, 1.0).base + 0.8
    )


def test_deciding_is_timed_where_something_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def tick() -> float:  # each look at the clock takes a hundredth of a plain step
        clock[0] += 0.01
        return clock[0]

    monkeypatch.setattr(controller_module.time, "perf_counter", tick)
    auto = AutoController(FLAT, [MTP])
    resting = StepRecord(1, 1.0, 0.0, 0.0, [RowRecord(1, "none", 0, 0, [], b.NO_CONFIDENCE)])
    auto.limits([sequence(1)], ["auto"], 16)
    auto.observe(resting)
    auto.limits([sequence(2)], ["auto"], 16)
    assert auto.budget.care == 0.0
    for sid in range(2, 200):
        auto._before = Before()  # a plan for each
        auto.limits([sequence(sid)], ["auto"], 16)
        auto.observe(StepRecord(3, 1.2, 0.3, 0.0, [RowRecord(sid, "mtp", 2, 1, [0.8, 0.8], None)]))
    assert auto.budget.care == pytest.approx(0.03, rel=0.1)  # a plan takes two looks, hearing of a step one
    auto.limits([sequence(300 + i) for i in range(8)], ["auto"] * 8, 16)
    assert auto.budget.care == 0.0  # that was of one text
    auto.observe(replace(resting, times=1000))
    auto.limits([sequence(400)], ["auto"], 16)
    assert 0.0 < auto.budget.care < 0.02  # what was dear once may be tried again


def test_what_learning_takes_is_shared_by_the_steps_that_it_was_learnt_from() -> None:
    """To learn from 500 steps at one go took 15 milliseconds, thirty steps; right after that nothing seemed to pay."""
    care = Care()
    for _ in range(200):
        care.over(1, 1, 0.01)
    assert care.of(1) == pytest.approx(0.01, rel=0.01)
    for _ in range(20):
        care.thought += 15.01
        care.learnt(1, 500, 15.0)
        assert care.taken() == 15.01
        care.over(1, 1, 15.01)
        assert care.of(1) == pytest.approx(0.04, rel=0.01)
    care.learnt(1, 0, 99.0)  # of steps without drafts: no part of what these cost
    care.over(1, 700, None)
    assert care.of(1) == pytest.approx(0.02, rel=0.02)
    assert care.of(8) == 0.0


def test_what_confidence_is_worth_is_told_by_some_of_many_drafts_and_all_of_few() -> None:
    few, many = learning.ENOUGH // 2, 8 * learning.ENOUGH
    for drafts, told in ((few, few), (many, -(-many // 9))):
        rows = [row(sid, 1, sid % 2, 0.5) for sid in range(drafts)]
        budget = seen_rows(Budget(FLAT.costs(), (MTP,)), rows)
        hits, tries = budget.bins[b.arm_of(budget, 0, MTP).law][acc.BINS // 2]
        assert tries == told
        assert hits == pytest.approx(told / 2, abs=1)
        assert budget.totals["mtp"] == acc.Totals(drafts, drafts // 2, drafts, drafts // 2)
