"""The product on one screen: draft, verify with the target, keep what it would have said itself, emit.

Plain decoding is this with an empty draft, prefill is this with nothing to say yet. Nothing is emitted from a round
whose cache is not committed.
"""

from __future__ import annotations

import time

from paceline.core import Delta
from paceline.engine.emit import embed, emit
from paceline.engine.hooks import notify
from paceline.engine.observe import outcome_of
from paceline.engine.plan import plan_step
from paceline.engine.propose import propose
from paceline.engine.reserve import reserve
from paceline.engine.state import EngineState
from paceline.engine.verify import verify


def step(state: EngineState) -> list[Delta]:
    """Advance every sequence that takes part by one step; the deltas of those that emitted."""
    begin = time.perf_counter()
    plan = plan_step(state)
    propose(state, plan)
    tail = reserve(state, plan)
    if tail is None:
        return state.take_failures()
    with tail:
        rows = tail.rows(state.target.device)
        rows.media, rows.adapters = plan.media(rows.starts), plan.adapters(rows.starts)
        states = state.look(rows)
        result = verify(state, plan, states[0], rows.starts)
        tail.commit(result.keep, result.paths)
    state.keep_hidden(result.hidden_slots, states[0], result.hidden_rows)
    deltas = state.take_failures() + emit(state, plan, result)
    deltas += embed(state, plan, states[0], rows.starts)
    notify(state, plan, result, states, rows.starts)
    ended = any(delta.finish_reason is not None for delta in deltas)
    seconds = time.perf_counter() - begin
    state.policy.observe(outcome_of(plan, result, seconds, timed=not ended))
    if state.scheduler.pace is not None:
        state.scheduler.pace.observe(plan.prefill_rows, seconds)
    return deltas
