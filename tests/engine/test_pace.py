"""Prompts in steps beside texts that are being written: fewer tokens where steps take long, and the same texts."""

from __future__ import annotations

import pytest

from paceline.core import SamplingParams
from paceline.engine.pace import LEAST, Pace
from testing import Setup, make_engine


def test_rows_follow_what_steps_took() -> None:
    pace = Pace(longest=0.25)
    assert pace.rows(64) == 64  # nothing is known
    pace.observe(64, 0.2)
    assert pace.rows(64) == 64
    pace.observe(64, 1.0)
    assert pace.rows(64) == 16
    pace.observe(16, 100.0)
    assert pace.rows(64) == LEAST
    assert pace.rows(3) == 3


def test_it_grows_back_slowly_and_does_not_learn_of_a_prompts_end() -> None:
    pace = Pace(longest=0.25)
    pace.observe(64, 1.0)
    pace.observe(1, 9.0)
    pace.observe(0, 9.0)
    assert pace.rows(64) == 16
    rows = []
    for _ in range(12):
        pace.observe(16, 0.016)
        rows.append(pace.rows(64))
    assert rows == sorted(rows)
    assert 16 <= rows[0] < 32
    assert rows[-1] == 64


@pytest.mark.parametrize("drafter", ["oracle", "random"])
def test_a_slow_step_changes_when_a_text_comes_and_no_token(drafter: str) -> None:
    def written(pace: Pace | None) -> tuple[dict[str, list[int]], int]:
        engine = make_engine(Setup(drafter=drafter, prefill_chunk=30, step_tokens=50))
        engine.state.scheduler.pace = pace
        texts: dict[str, list[int]] = {"short": [], "long": []}
        engine.add("short", [2], SamplingParams(max_tokens=40))
        engine.step()
        engine.add("long", [2, 3, 4] * 20, SamplingParams(max_tokens=8))
        steps, begun = 0, 0
        while engine.has_work:
            steps += 1
            for delta in engine.step():
                texts[delta.request] += delta.token_ids
                begun = begun or (steps if delta.request == "long" else 0)
        return texts, begun

    class Slow(Pace):
        def observe(self, rows: int, seconds: float) -> None:
            super().observe(rows, 10.0 * rows)

    slow = Slow()
    slow.observe(LEAST, 0.0)
    wanted, early = written(None)
    got, late = written(slow)
    assert got == wanted
    assert late > early
