"""The product on one screen: draft, look with the target, keep what it would have said itself, emit.

Plain decoding is this with an empty draft, prefill is this with nothing to say yet. Nothing is emitted from a round
whose cache is not committed.
"""

from __future__ import annotations

import time

from paceline.core import Delta
from paceline.engine.emit import emit
from paceline.engine.judge import judge
from paceline.engine.propose import propose
from paceline.engine.reserve import reserve
from paceline.engine.rest import ALIKE, Ran, Took, told
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
    paused = state.rest is not None and state.rest.paused
    odd = paused or any(delta.finish_reason is not None for delta in deltas)
    end = time.perf_counter()
    took = Took.between(begin, drafted, looked, end, judged.masking)
    ran = Ran(work, judged.records, rows.count, took, odd)
    if state.rest is None or not (paused or draft is state.rest.empty):
        state.controller.observe(told(ran))
    else:
        state.rest.untold.add(ran)
        if state.rest.untold.steps == ALIKE:
            state.tell()
    return deltas
