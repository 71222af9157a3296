"""The product on one screen: draft, look with the target, keep what it would have said itself, emit.

Plain decoding is this with an empty draft, prefill is this with nothing to say yet. Nothing is emitted from a round
whose cache is not committed.
"""

from __future__ import annotations

import time

from paceline.core import Delta
from paceline.engine.emit import emit
from paceline.engine.judge import Judged, judge
from paceline.engine.propose import propose
from paceline.engine.records import StepRecord
from paceline.engine.reserve import reserve
from paceline.engine.scheduler import Work
from paceline.engine.state import EngineState


def step(state: EngineState) -> list[Delta]:
    """Advance every sequence that takes part by one step; the deltas of those that emitted."""
    begin = time.perf_counter()
    work = state.scheduler.plan(state.admit)
    draft = propose(state, work)
    drafted = time.perf_counter()
    work, draft, tail = reserve(state, work, draft)
    if tail is None:
        return state.take_failures()
    with tail:
        rows = tail.rows(state.target.device)
        hidden = state.target.forward(rows, state.cache)  # [N, H]
        judged = judge(state, work, draft, hidden, rows.starts)
        looked = time.perf_counter()
        tail.commit(judged.keep)
    state.keep_hidden(judged.hidden_slots, hidden, judged.hidden_rows)
    deltas = state.take_failures() + emit(state, work, draft, judged)
    _observe(state, work, judged, (begin, drafted, looked, rows.count))
    return deltas


def _observe(
    state: EngineState, work: list[Work], judged: Judged, clock: tuple[float, float, float, int]
) -> None:
    begin, drafted, looked, rows = clock
    records = judged.records if all(w.last for w in work) else []
    seconds = (looked - drafted, drafted - begin, time.perf_counter() - looked)
    context = sum([w.sequence.committed for w in work])
    masked = any(w.sequence.constraint is not None for w in work)
    state.controller.observe(StepRecord(rows, *seconds, records, context, masked))
