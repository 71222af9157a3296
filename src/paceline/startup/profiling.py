"""What steps and draft rounds take on this machine, timed at load through the engine itself.

Shapes take turns, so that a machine that is faster in one moment than in the next is so for all of them; medians count.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from paceline.control.base import DraftPlan, PlannedRow, PlanRow, Proposal, StepOutcome
from paceline.control.cost_model import CostTable, DraftCost, table_of
from paceline.control.fixed import FixedPolicy
from paceline.core import Draft, SamplingParams
from paceline.drafters.base import DraftContext, Drafter
from paceline.engine.engine import Engine, EngineParts

PROMPT = 8  # tokens of a request


class Shape(NamedTuple):
    """A step: each of `texts` requests verifies `k` drafted tokens, made by the network or out of thin air."""

    texts: int
    k: int
    network: bool = False

    @property
    def rows(self) -> int:
        return self.texts * (self.k + 1)


# The most telling first: a slow target may have no time for more
STEPS = tuple([Shape(1, k) for k in (0, 4, 1, 16, 2, 8)] + [Shape(2, 16)])
_WARM = 2  # turns after which nothing is recorded, compiled or captured any more
ROUNDS = (Shape(1, 4, network=True), Shape(1, 1, network=True), Shape(2, 4, network=True))


class Filler(Drafter):
    """Drafts tokens that cost nothing and are hardly ever right."""

    name, max_tokens = "filler", 16

    def draft(self, context: DraftContext) -> Draft:
        tokens = [[0] * limit for limit in context.limits]
        confidence = [[0.0] * limit for limit in context.limits]
        return Draft(tokens, confidence, None, ["no proposal"] * len(tokens), [self.name] * len(tokens))


class Prescribed(FixedPolicy):
    """Drafts as a shape says, and keeps what became of the last step."""

    def __init__(self, network: str) -> None:
        super().__init__(0)
        self._network = network
        self.shape = STEPS[0]
        self.last: StepOutcome | None = None

    def plan(
        self, rows: Seq[PlanRow], free_proposals: Seq[Proposal | None], prefill_rows: int = 0
    ) -> DraftPlan:
        drafter = self._network if self.shape.network else Filler.name
        limits = [min(self.shape.k, row.room) for row in rows]
        return DraftPlan(tuple([PlannedRow(drafter if limit else None, limit) for limit in limits]))

    def observe(self, outcome: StepOutcome) -> None:
        self.last = outcome


def measure_steps(parts: EngineParts, limit: float) -> CostTable | None:
    """Steps by target rows, and rounds of `parts.default_drafter`, within about `limit` seconds, or two steps.

    What cannot be seen is left out: a drafter that fails or says nothing, a batch that is not allowed. None without a
    plain step and another one.
    """
    policy = Prescribed(parts.default_drafter)
    drafters: dict[str, Drafter] = {Filler.name: Filler()}
    network = parts.drafters.get(parts.default_drafter)
    if network is not None:
        drafters[network.name] = network
    bare = replace(parts, policy=policy, drafters=drafters, default_drafter=Filler.name)
    engine = Engine(replace(bare, prefix_cache=False, forced=None, draft_tree=None))
    shapes = [s for s in (*STEPS, *(ROUNDS if network else ())) if s.texts <= parts.max_batch]
    seen: dict[Shape, list[StepOutcome]] = {}
    turn = first = _WARM if parts.target.device.type == "cuda" else 0
    try:
        # kernels are compiled and steps captured before anything is timed
        for shape in shapes if first else ():
            _timed(engine, policy, shape, warm=True)
        end = time.perf_counter() + limit
        while turn == first or time.perf_counter() < end:
            for n, shape in enumerate(shapes):
                if n > 1 and time.perf_counter() > end:
                    break
                outcome = _timed(engine, policy, shape, warm=turn > 0)
                if outcome is not None:
                    # the first step of a shape records the plan of the others: it counts only where nothing else does
                    seen[shape] = [outcome] if turn < _WARM else [*seen.get(shape, []), outcome]
            turn += 1
    finally:
        _clear(engine)
    return _table(seen, policy, network.name if network is not None else None)


def _timed(engine: Engine, policy: Prescribed, shape: Shape, *, warm: bool) -> StepOutcome | None:
    """A step of that shape, after another one; None if it cannot be run."""
    if not _seat(engine, policy, shape):
        return None
    policy.shape, policy.last = shape, None
    for _ in range(2 if warm else 1):
        engine.step()
    outcome = policy.last
    if outcome is None or len(outcome.rows) != shape.texts or outcome.drafted != shape.texts * shape.k:
        return None
    return outcome


def _seat(engine: Engine, policy: Prescribed, shape: Shape) -> bool:
    """Let just so many requests decode, with room for two such steps. False if there is none."""
    room = 2 * (shape.k + 1) + 1
    if PROMPT + room + 2 > engine.max_len:
        return False
    requests = list(engine.state.requests.values())
    if len(requests) == shape.texts and all(request.room(engine.max_len) > room for request in requests):
        return True
    _clear(engine)
    vocab = engine.state.target.vocab_size
    for i in range(shape.texts):
        prompt = [(7 * i + j) % vocab for j in range(PROMPT)]
        engine.add(f"profiling-{i}", prompt, SamplingParams(max_tokens=engine.max_len, ignore_eos=True))
    policy.shape = STEPS[0]
    for _ in range(4 * shape.texts * PROMPT):
        engine.step()
        if len(engine.state.requests) != shape.texts:
            return False
        if all(request.sequence.output_len for request in engine.state.requests.values()):
            return True
    return False


def _clear(engine: Engine) -> None:
    for name in {request.request_id for request in engine.state.requests.values()}:
        engine.cancel(name)


def _table(seen: dict[Shape, list[StepOutcome]], policy: Prescribed, network: str | None) -> CostTable | None:
    steps = {
        shape.rows: median([outcome.target_seconds for outcome in outcomes])
        for shape, outcomes in seen.items()
        if not shape.network
    }
    if len(steps) < 2 or 1 not in steps:
        return None
    rows = sorted(steps)
    drafts = {}
    if network is not None:
        rounds = {
            shape: median([outcome.draft_seconds.get(network, 0.0) for outcome in seen[shape]])
            for shape in ROUNDS
            if shape in seen
        }
        if rounds:
            drafts[network] = _draft_cost(rounds)
    return table_of(rows, [steps[n] for n in rows], drafts)


def _draft_cost(rounds: dict[Shape, float]) -> DraftCost:
    """Base, call and token from rounds of one and four calls, and of four for two requests."""
    four, one, two = (rounds.get(shape) for shape in ROUNDS)
    longest = four if four is not None else 4.0 * (one or 0.0)
    shortest = one if one is not None else longest / 4
    each = max(longest - shortest, 0.0) / 3
    token = min(max(two - longest, 0.0) / 4, each) if two is not None else each / 4
    return DraftCost(max(shortest - each, 0.0), each - token, token)
