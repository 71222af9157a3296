"""The product on one screen: draft, verify with the target, keep what it would have said itself, emit.

Plain decoding is this with an empty draft, prefill is this with nothing to say yet. Nothing is emitted from a round
whose cache is not committed.
"""

from __future__ import annotations

import time

from paceline.core import Delta
from paceline.engine.emit import emit
from paceline.engine.observe import outcome_of
from paceline.engine.propose import propose
from paceline.engine.reserve import reserve
from paceline.engine.state import EngineState
from paceline.engine.verify import verify
from paceline.soft_tokens import media_rows


def step(state: EngineState) -> list[Delta]:
    """Advance every sequence that takes part by one step; the deltas of those that emitted."""
    begin = time.perf_counter()
    work = state.scheduler.plan(state.admit, state.most)
    proposed = propose(state, work)
    work, draft, tail = reserve(state, work, proposed.draft)
    if tail is None:
        return state.take_failures()
    with tail:
        rows = tail.rows(state.target.device)
        if any(w.sequence.media for w in work):
            media, firsts = zip(*((w.sequence.media, w.sequence.committed) for w in work), strict=True)
            rows.media = media_rows(media, firsts, rows.starts)
        states = state.look(rows)
        hidden = states[0]  # [N, H]
        verified = verify(state, work, draft, hidden, rows.starts)
        tail.commit(verified.keep, verified.paths)
    state.keep_hidden(verified.hidden_slots, hidden, verified.hidden_rows)
    deltas = state.take_failures() + emit(state, work, draft, verified)
    if state.listens:
        state.tell(work, verified.keep, verified.paths, states, rows.starts)
    if verified.seen:
        state.show(verified.seen)
    ended = any(delta.finish_reason is not None for delta in deltas)
    seconds = time.perf_counter() - begin
    state.policy.observe(outcome_of(work, draft, verified, proposed, seconds, timed=not ended))
    return deltas
