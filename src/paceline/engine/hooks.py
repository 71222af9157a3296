"""The two hooks of a drafter, called after each step: `on_commit` with the rows that were kept and the target's hidden
states of them, `on_verify` with the target's tokens at all rows of a draft, refused ones included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from paceline.drafters import guard
from paceline.drafters.base import Drafter, Kept, Seen
from paceline.engine.plan import StepPlan, StepResult
from paceline.engine.request import RequestState
from paceline.engine.state import EngineState
from paceline.models.base import rows_of
from paceline.models.drafters.base import FINAL

T = TypeVar("T", Kept, Seen)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of one text in a step."""

    start: int  # the first of them
    count: int  # how many are kept
    path: list[int] | None  # what is kept of a tree


def notify(
    state: EngineState,
    plan: StepPlan,
    result: StepResult,
    states: tuple[torch.Tensor, ...],
    starts: list[int],
) -> None:
    """`states` as `EngineState.look` gives them, `starts` [B + 1] row offsets. Texts that have ended are left out."""
    if state.commits:
        committed: list[tuple[RequestState, Drafter, Kept]] = []
        for request, count, path, start in zip(
            plan.requests, result.keep, result.paths, starts, strict=False
        ):
            drafter = state.drafter_of(request)
            if count and drafter is not None and drafter.taps and request.sequence.id in state.requests:
                committed.append(
                    (request, drafter, _kept(state, drafter, request, states, _Rows(start, count, path)))
                )
        _call(guard.on_commit, committed)
    verified: list[tuple[RequestState, Drafter, Seen]] = []
    for request, seen in result.seen:
        drafter = state.drafter_of(request)
        if drafter is not None and drafter.observes and request.sequence.id in state.requests:
            verified.append((request, drafter, seen))
    _call(guard.on_verify, verified)


def _kept(
    state: EngineState, drafter: Drafter, request: RequestState, states: tuple[torch.Tensor, ...], rows: _Rows
) -> Kept:
    """What the drafter is given of the kept rows."""
    start, count, path = rows.start, rows.count, rows.path
    places = [0 if tap == FINAL else 1 + state.target.tapped.index(tap) for tap in drafter.taps]
    first = request.sequence.committed - count
    if path is None:
        return Kept(request.sequence, first, [states[place] for place in places], range(start, start + count))
    at = [start, *(start + 1 + node for node in path)]
    return Kept(request.sequence, first, [rows_of(states[place], at) for place in places])


def _call(
    hook: Callable[[Drafter, list[T], list[dict[str, str]]], None],
    news: list[tuple[RequestState, Drafter, T]],
) -> None:
    """Call a hook once for each drafter, with what is new of its texts."""
    for drafter in {id(drafter): drafter for _, drafter, _ in news}.values():
        own = [(item, request.parked) for request, whose, item in news if whose is drafter]
        hook(drafter, [item for item, _ in own], [parked for _, parked in own])
