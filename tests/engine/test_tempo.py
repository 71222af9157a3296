"""What steps take now: the filter behind the prices. What it does to decisions is in test_audit.py and test_budget.py."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from paceline.engine.costs import Profile, Step
from paceline.engine.tempo import FASTEST, LAWS, LONG, PACE, READING, SPREAD, Tempo, parts

PLAIN = parts(1, 0, "")


def test_a_step_tells_of_its_own_parts_only() -> None:
    assert parts(1, 0, "") == (READING, PACE)
    assert parts(3, 0, "") == (READING, PACE, ("level", 3, 0))
    drafted = parts(3, 2, "mtp")
    assert drafted == (READING, PACE, ("level", 3, 0), ("drag", 3, 0), ("spread of mtp", 3, 2))
    tempo = Tempo().seen(drafted, 0.5, [1.5])
    assert tempo.times(3, 2, "mtp", 0.5) > tempo.times(3, 1, "mtp", 0.5) > tempo.times(3, 0, "", 0.5) > 1.0
    assert tempo.times(3, 2, "ngram", 0.5) == tempo.times(
        3, 1, "mtp", 0.5
    )  # after a look caches hold the weights
    assert tempo.means[READING] > tempo.means[PACE] > 0.0
    assert Tempo().times(3, 2, "mtp", 0.5) == Tempo().drag(3) == Tempo().pace == 1.0


def test_whatever_steps_take_it_stays_within_bounds_and_knows_how_sure_it_is() -> None:
    rng, tempo = random.Random(0), Tempo()
    for _ in range(3000):
        size, spread = rng.randint(1, 5), rng.choice((0, 0, 1, 2, 3))
        ratio = math.exp(rng.gauss(0.0, 2.0 if rng.random() < 0.1 else 0.3))
        told = parts(size, spread, "mtp")
        tempo = tempo.after(rng.expovariate(1 / 30)).seen(told, rng.uniform(0.05, 1.0), [ratio])
        for (name, _, _), value in tempo.means.items():
            bound = LAWS.get(name, SPREAD).bound
            assert (FASTEST if name == "reading" else -bound) <= value <= bound
        assert tempo.times(size, spread, "mtp", 1.0) > 0.0
    assert len(tempo.means) == 2 + 4 + 5 + 15
    assert np.allclose(tempo.covariance, tempo.covariance.T)
    assert np.linalg.eigvalsh(tempo.covariance).min() > 0.0
    assert tempo.dearer(3, 1.2).drag(3) == pytest.approx(1.2 * tempo.drag(3))


def test_what_was_not_seen_for_long_is_thought_as_before_and_less_sure() -> None:
    """A drag that wore off made drafts seem 7 to 20% cheaper than they were each time that other texts had run before."""
    tempo, drafted = Tempo(), parts(1, 1, "mtp")
    for _ in range(50):
        tempo = tempo.seen(PLAIN, 1.0, [1.0] * 8).seen(drafted, 0.8, [1.5] * 8)
    later = tempo.after(LONG)
    assert np.all(np.diag(later.covariance) > np.diag(tempo.covariance))
    assert later.means == tempo.means
    assert later.drag(1) == pytest.approx(1.5, rel=0.05)
    assert np.allclose(tempo.after(1e12).covariance, later.covariance)  # the machine slept
    now, then = (t.seen(PLAIN, 1.0, [1.0] * 8).seen(drafted, 0.8, [1.2] * 8) for t in (tempo, later))
    assert abs(then.drag(1) - 1.2) < abs(now.drag(1) - 1.2)


def test_another_machine_is_found_out_and_an_accident_is_forgotten() -> None:
    known = Tempo()
    for _ in range(50):
        known = known.after(8.0).seen(PLAIN, 1.0, [1.0] * 8)
    shock = known.after(8.0).seen(PLAIN, 1.0, [40.0])
    assert shock.times(1, 0, "", 1.0) < 2.0
    back = shock.after(8.0).seen(PLAIN, 1.0, [1.0] * 8)
    assert back.times(1, 0, "", 1.0) == pytest.approx(1.0, rel=0.1)
    for _ in range(20):
        shock = shock.after(8.0).seen(PLAIN, 1.0, [40.0] * 8)
    assert shock.times(1, 0, "", 1.0) == pytest.approx(40.0, rel=0.1)


def test_steps_take_what_they_do_on_average_but_for_accidents() -> None:
    def learnt(ratios: list[float]) -> float:
        known = Tempo()
        for _ in range(50):
            known = known.after(8.0).seen(PLAIN, 1.0, ratios)
        return known.times(1, 0, "", 1.0)

    assert learnt([1.0] * 6 + [1.4] * 4) == pytest.approx(1.16, rel=0.03)
    assert learnt([1.0] * 9 + [40.0]) == pytest.approx(1.05, rel=0.03)


def test_texts_shorter_than_usual_never_have_steps_that_take_no_time() -> None:
    costs = Profile((1, 9), (1.0, 2.0), reach=(1e-3, 0.0, 1000.0)).costs()
    for _ in range(50):
        costs = costs.observe_targets([Step(1, 0.01, texts=1, context=1)] * 8)
    assert 0.0 < costs.within(1, 1).target(1) < 0.3
    assert costs.within(1, 1000).target(1) > costs.within(1, 1).target(1)
