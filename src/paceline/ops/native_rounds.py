"""Draft rounds on the CPU: all steps with their draws in one native call, and before them what they go on from.

See native/round.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from paceline.errors import UsageError
from paceline.kv.cache import KVCache
from paceline.ops.base import ChainStart, Drawn, Graph, Lead, RoundStart, Rule, Stop
from paceline.ops.binding import address, refusal
from paceline.ops.segments import whole

STATE = "state"  # the input of a chain that each step hands to the next one


class Recording(Protocol):
    """What a round needs of a plan of ops/native.py, whose methods say more."""

    program: Any
    capacity: int

    def ready(self, count: int, cache: KVCache | None) -> None: ...

    def give(self, given: dict[str, torch.Tensor], count: int) -> None: ...

    def input(self, name: str) -> tuple[int, int] | None: ...

    def inputs(self) -> dict[str, tuple[int, int]]: ...

    def places(self) -> list[tuple[int, int, int]]: ...


class Rounds:
    """Of one graph, which reads `hidden` and gives ([ids,] logits, hidden of the next step)."""

    def __init__(self, plan_of: Callable[[Graph], Recording], graph: Graph) -> None:
        self._plan_of, self._graph = plan_of, graph
        self._states: torch.Tensor | None = (
            None  # a table that stays the same from round to round, and where it lies
        )
        self._ids: torch.Tensor | None = None  # the same
        self._states_at = self._ids_at = 0
        self._places: dict[
            Graph, tuple[int, list[tuple[int, int, int]]]
        ] = {}  # with the capacity that they are of

    def run(
        self, start: RoundStart, cache: KVCache, states: torch.Tensor, rules: list[Rule], stops: list[Stop]
    ) -> Drawn | None:
        """As `Runner.draft_round`."""
        if states.dtype != torch.float32 or not states.is_cpu or start.first is not None:
            return None
        plan, count = self._plan_of(self._graph), len(start.tokens)
        hidden = plan.input("hidden")
        if hidden is None:
            return None
        plan.ready(count, cache)
        *ids, logits, after = self._found(self._graph, plan)
        known = self._known(start.ids, logits[2]) if start.ids is not None else ids[0][:2] if ids else (0, 0)
        lead = None if start.lead is None else self._lead(start.lead, count, cache, states)
        status, drawn, sure = whole(plan.program).draft_round(
            (start.tokens, start.positions, start.slots),
            (*hidden, *((0, 0) if lead else self._table(states, max(start.slots), hidden[1]))),
            (*after[:2], *logits, *known, start.moves),
            rules,
            stops,
            lead,
        )
        if status:
            raise UsageError(refusal("draft round", status))
        split = [slice(i, i + count) for i in range(0, len(drawn), count)]
        return Drawn([drawn[s] for s in split], [sure[s] for s in split])

    def _known(self, ids: torch.Tensor, width: int) -> tuple[int, int]:
        """(address, elements between rows) of the ids of all rows' logits."""
        if self._ids is not ids:
            self._ids_at, self._ids = address(ids, torch.int64, width, "ids"), ids
        return self._ids_at, 0

    def _table(self, states: torch.Tensor, last: int, width: int) -> tuple[int, int]:
        """(address, rows) of the states that a round begins with, of which it reads `last` and ones before."""
        if self._states is not states:
            if states.dim() != 2 or states.shape[1] != width:
                raise UsageError(f"states must be [slots, {width}], not {tuple(states.shape)}")
            self._states_at = address(states, torch.float32, last + 1, "states")
            self._states = states
        return self._states_at, self._states.shape[0]

    def _lead(self, lead: Lead, count: int, cache: KVCache, states: torch.Tensor) -> tuple[Any, ...]:
        """As native code takes it: see `LeadTuple` in native/bind.cpp."""
        look, head, rows = self._plan_of(lead.graph), self._plan_of(lead.head), lead.rows
        look.ready(rows.count, cache)
        look.give({"states": states}, rows.count)
        head.ready(count, None)
        after, seen = self._found(lead.graph, look)
        (logits,) = self._found(lead.head, head)
        numbers = rows.numbers or (rows.tokens.tolist(), rows.positions.tolist(), rows.slots.tolist())
        return (
            whole(look.program), numbers, lead.last, (*after[:2], *seen[:2]),
            whole(head.program), head.input("hidden"), logits[:2],
        )  # fmt: skip

    def _found(self, graph: Graph, plan: Recording) -> list[tuple[int, int, int]]:
        capacity, places = self._places.get(graph, (0, []))
        if capacity != plan.capacity:
            places = plan.places()
            self._places[graph] = plan.capacity, places
        return places


def chain_round(plan: Recording, start: ChainStart, rules: list[Rule], stops: list[Stop]) -> Drawn | None:
    """As `Runner.chain_round`."""
    if any(value.dtype != torch.float32 or not value.is_cpu for value in start.given.values()):
        return None
    count, inputs = len(start.tokens), plan.inputs()
    plan.ready(count, None)
    feeds = []
    for name, (buffer, width) in inputs.items():
        if name == STATE:
            continue
        value = start.given[name].contiguous()
        steps = value.shape[0] // count
        feeds.append((buffer, address(value, torch.float32, count * steps, name), width, steps))
    logits, *more = plan.places()
    sure = more.pop(0) if start.sure else (0, 0, 0)
    after = more.pop(0) if start.state else (0, 0, 0)
    ids = 0 if start.ids is None else address(start.ids, torch.int64, logits[2], "ids")
    status, drawn, confidence = whole(plan.program).chain_round(
        start.tokens,
        feeds,
        (*inputs.get(STATE, (-1, 0)), *after[:2]),
        (*logits, ids, *sure[:2]),
        rules,
        stops,
    )
    if status:
        raise UsageError(refusal("draft round", status))
    split = [slice(i, i + count) for i in range(0, len(drawn), count)]
    return Drawn([drawn[s] for s in split], [confidence[s] for s in split])
