"""The native inner loops of the controller against their Python: the same numbers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import MAX_DRAFT_TOKENS
from paceline.engine import acceptance as acc
from paceline.engine import copies
from paceline.engine.budget import Budget
from paceline.engine.costs import Profile
from paceline.ops.extension import extension

pytestmark = pytest.mark.skipif(extension("learn") is None, reason="the extension is not built")

KIND = acc.NGRAM
outcomes = st.lists(
    st.integers(0, MAX_DRAFT_TOKENS).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=8
)
chances = st.one_of(st.floats(0, 1), st.sampled_from([math.nan, -1.0, 2.0, 1.0]))


@given(st.sampled_from(acc.KINDS), st.booleans(), st.booleans(), st.lists(outcomes, max_size=6))
def test_what_is_learnt_from_outcomes(kind, sampled, parked, rounds):
    native = reference = acc.fresh_arm(kind, sampled)._replace(parked=parked, copied=True, wait=7, due=9)
    for seen in rounds:
        native = acc.learn(native, seen)
        reference = acc.counted(reference, acc.PARKED_WINDOW if parked else acc.WINDOW, seen)
    assert native._replace(law="") == reference._replace(law="")
    assert native.law == reference.law == kind.law(sampled)


@given(
    outcomes,
    st.lists(st.lists(chances, max_size=MAX_DRAFT_TOKENS), min_size=1, max_size=5),
    st.lists(st.tuples(st.lists(chances, max_size=6), st.integers(0, 6)), max_size=4),
    st.one_of(
        st.none(), st.tuples(st.floats(0, 32), st.floats(0, 32)).map(lambda pair: (min(pair), max(pair)))
    ),
    st.floats(0.01, 3.0),
)
def test_what_a_copy_is_worth(seen, proposals, told, firsts, rate):
    lines = acc.calibration(acc.calibrate(None, told))
    own = [([0.9] * drafted, accepted) for drafted, accepted in seen]
    arm = acc.followed(acc.fresh_arm(KIND)._replace(copied=firsts is None), own, lines)
    prices = [0.1 + 0.02 * n for n in range(MAX_DRAFT_TOKENS)]
    known = firsts or (0.0, 0.0)
    first = (0.0 if firsts is None else acc.FIRST_WEIGHT, *known)
    found = extension("offers").offers(
        proposals, lines, first, (arm.hits, arm.tries, arm.promised, arm.weight), prices, rate
    )
    wanted = [copies.judged(confidence, lines, known, arm, prices, rate) for confidence in proposals]
    assert found == [tuple(one) for one in wanted]


def test_without_the_extension_the_same_is_decided(monkeypatch):
    costs = Profile((1, 5, 17), (1.0, 1.6, 3.8)).costs()
    lines = acc.calibration(None)
    arm = acc.followed(acc.fresh_arm(KIND), [([0.7] * 4, 4), ([0.8] * 8, 8), ([0.9] * 12, 3)], lines)

    def decided():
        look = copies.Look(KIND.name, costs, 1, 1, 1.0)
        budget = Budget(costs, (KIND,))
        rungs = [[n / 6] * 16 for n in range(6)]
        return copies.offer(budget, KIND, arm, look, [0.9] * 16), copies.worth(
            budget, KIND, acc.fresh_arm(KIND), look, rungs
        )

    native = decided()
    assert native[0].tokens > 4
    assert native[1][0] == 0 < native[1][-1]
    monkeypatch.setattr(copies, "extension", lambda name: None)
    monkeypatch.setattr(acc, "extension", lambda name: None)
    assert decided() == native
    assert acc.learn(arm, [(4, 1)]) == acc.counted(arm, acc.WINDOW, [(4, 1)])


@pytest.mark.parametrize("wrong", [((), (), ()), ((1.0,), (1.0, 2.0), (0.5,))])
def test_wrong_shapes_are_refused(wrong):
    with pytest.raises(ValueError, match="each position"):
        extension("learn").learn(*wrong, 3.0, 1.5, 48.0, [(1, 1)])
    with pytest.raises(ValueError, match="confidence is worth"):
        extension("offers").offers([[0.5]], (), (0.0, 0.0, 0.0), ((0.1,), (0.5,), (0.2,), 3.0), [0.1], 1.0)
