"""What steps and draft rounds take on this machine, timed at load through the engine itself.

Where there is a network, it drafts before the target verifies, as it will when texts are written: both are timed in that
rhythm. Shapes take turns, so that a machine that is faster in one moment than in the next is so for all of them; medians
count. The first turn only warms what it touches.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from paceline.control.base import NGRAM, DraftPlan, PlannedRow, PlanRow, Proposal, StepOutcome
from paceline.control.cost_model import CostTable, DraftCost, table_of
from paceline.control.fixed import FixedPolicy
from paceline.core import Draft, SamplingParams
from paceline.drafters.base import DraftContext, Drafter
from paceline.engine.engine import Engine, EngineParts

PROMPT = 8  # tokens of a request
OFTEN = 3  # times that a shape is timed at least, where there is time
STEPS, LONGEST = 50.0, 15.0  # plain steps that it may take, and seconds at most
SHORT = 5e-3  # seconds of a step below which what went before it shows: then each shape follows itself
ALIKE = 1.3  # a median above this multiple of the least time is of a machine that did something else


class Shape(NamedTuple):
    """A step: each of `texts` requests verifies `k` drafted tokens, made by the network or out of thin air."""

    texts: int
    k: int
    network: bool = False

    @property
    def rows(self) -> int:
        return self.texts * (self.k + 1)


PLAIN = Shape(1, 0)
# The most telling first: without these nothing is trusted, and a slow target has no time for more
BARE = tuple([Shape(1, k) for k in (0, 4, 1, 16, 2, 8)] + [Shape(2, 16)])
DRAFTED = (
    *(PLAIN, Shape(1, 4, network=True), Shape(1, 1, network=True), Shape(1, 2, network=True)),
    *(Shape(1, 8, network=True), Shape(2, 4, network=True), Shape(1, 16), Shape(2, 16)),
)
NEEDED = 3  # of either


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
        self.shape = PLAIN
        self.last: StepOutcome | None = None

    def plan(
        self, rows: Seq[PlanRow], free_proposals: Seq[Proposal | None], prefill_rows: int = 0
    ) -> DraftPlan:
        drafter = self._network if self.shape.network else Filler.name
        limits = [min(self.shape.k, row.room) for row in rows]
        return DraftPlan(tuple([PlannedRow(drafter if limit else None, limit) for limit in limits]))

    def observe(self, outcome: StepOutcome) -> None:
        self.last = outcome


class Bench:
    """An engine that runs steps of given shapes, and what they took."""

    def __init__(self, parts: EngineParts) -> None:
        network = parts.drafters.get(parts.default_drafter) if parts.default_drafter != NGRAM else None
        self.network = network.name if network is not None else None
        drafters: dict[str, Drafter] = {Filler.name: Filler()}
        if network is not None:
            drafters[network.name] = network
        self.policy = Prescribed(parts.default_drafter)
        bare = replace(parts, policy=self.policy, drafters=drafters, default_drafter=Filler.name)
        self.engine = Engine(replace(bare, prefix_cache=False, forced=None, draft_tree=None))
        shapes = DRAFTED if network is not None else BARE
        self.shapes = [shape for shape in shapes if shape.texts <= parts.max_batch]
        self.seen: dict[Shape, list[StepOutcome]] = {}
        self.warmed: dict[Shape, StepOutcome] = {}

    def run(self, shape: Shape, *, warming: bool = False) -> None:
        """A step of that shape. One that cannot be run is not tried again; a network's is then timed without it."""
        outcome = self._timed(shape)
        if outcome is None:
            at = self.shapes.index(shape)
            bare = Shape(shape.texts, shape.k)
            self.shapes[at : at + 1] = [bare] if shape.network and bare not in self.shapes else []
        elif warming:
            self.warmed[shape] = outcome
        else:
            self.seen.setdefault(shape, []).append(outcome)

    def _timed(self, shape: Shape) -> StepOutcome | None:
        before = set(self.engine.state.requests)
        if not self._seat(shape):
            return None
        new = shape.network and before != set(self.engine.state.requests)  # the drafter has to read it first
        self.policy.shape, self.policy.last = shape, None
        for _ in range(2 if new or self.plain < SHORT else 1):
            self.engine.step()
        outcome = self.policy.last
        if outcome is None or len(outcome.rows) != shape.texts or outcome.drafted != shape.texts * shape.k:
            return None
        return outcome

    @property
    def plain(self) -> float:
        """Seconds of a plain step, as far as they are known."""
        outcomes = self.seen.get(PLAIN) or [
            outcome for shape, outcome in self.warmed.items() if shape == PLAIN
        ]
        return median([outcome.target_seconds for outcome in outcomes]) if outcomes else 0.0

    def _seat(self, shape: Shape) -> bool:
        """Let just so many requests decode, with room for two such steps. False if there is none."""
        engine, room = self.engine, 2 * (shape.k + 1) + 1
        if PROMPT + room + 2 > engine.max_len:
            return False
        requests = list(engine.state.requests.values())
        if len(requests) == shape.texts and all(request.room(engine.max_len) > room for request in requests):
            return True
        self.clear()
        vocab = engine.state.target.vocab_size
        for i in range(shape.texts):
            prompt = [(7 * i + j) % vocab for j in range(PROMPT)]
            params = SamplingParams(max_tokens=engine.max_len, ignore_eos=True)
            engine.add(f"profiling-{i}", prompt, params)
        self.policy.shape = PLAIN
        for _ in range(4 * shape.texts * PROMPT):
            engine.step()
            if len(engine.state.requests) != shape.texts:
                return False
            if all(request.sequence.output_len for request in engine.state.requests.values()):
                return True
        return False

    def clear(self) -> None:
        for name in {request.request_id for request in self.engine.state.requests.values()}:
            self.engine.cancel(name)

    def table(self) -> CostTable | None:
        """None without a plain step and another one."""
        outcomes = {shape: self.seen.get(shape) or [outcome] for shape, outcome in self.warmed.items()}
        steps: dict[int, list[float]] = {}
        for shape, some in outcomes.items():
            steps.setdefault(shape.rows, []).append(median([outcome.target_seconds for outcome in some]))
        if len(steps) < 2 or 1 not in steps:
            return None
        rows = sorted(steps)
        drafts = {}
        rounds = {
            shape: median([outcome.draft_seconds.get(self.network or "", 0.0) for outcome in some])
            for shape, some in outcomes.items()
            if shape.network
        }
        if self.network is not None and rounds:
            drafts[self.network] = _draft_cost(rounds)
        table = table_of(rows, [min(steps[n]) for n in rows], drafts)
        return replace(table, trusted=all(self._settled(shape) for shape in self.shapes[:NEEDED]))

    def _settled(self, shape: Shape) -> bool:
        """Whether a shape was timed often enough, and alike."""
        for part in (_target, _drafting):
            times = [part(outcome) for outcome in self.seen.get(shape, [])]
            if len(times) < OFTEN or median(times) > ALIKE * min(times):
                return False
        return True


def _target(outcome: StepOutcome) -> float:
    return outcome.target_seconds


def _drafting(outcome: StepOutcome) -> float:
    return sum(outcome.draft_seconds.values())


def measure_steps(parts: EngineParts, limit: float) -> CostTable | None:
    """Steps by target rows, and rounds of `parts.default_drafter`, within about `limit` seconds, or more where a step is
    slow: `STEPS` plain ones, `LONGEST` seconds at most.

    What cannot be seen is left out: a drafter that fails or says nothing, a batch that is not allowed. None without a
    plain step and another one. A table that is not timed often enough, or not alike, is not `trusted`.
    """
    bench = Bench(parts)
    begin = time.perf_counter()

    def late() -> bool:
        return time.perf_counter() - begin > max(limit, min(STEPS * bench.plain, LONGEST))

    def turn(first: int, last: int | None, *, warming: bool = False) -> None:
        for n, shape in enumerate(bench.shapes[first:last], first):
            if (n >= NEEDED or bench.seen) and late():
                return
            bench.run(shape, warming=warming)

    try:
        # kernels are compiled, plans recorded and weights touched before anything counts
        for _ in range(2 if parts.target.device.type == "cuda" else 1):
            turn(0, NEEDED, warming=True)
        for _ in range(OFTEN):
            turn(0, NEEDED)
        turn(NEEDED, None, warming=True)
        while not late():
            turn(NEEDED, None)
            turn(0, NEEDED)
    finally:
        bench.clear()
    return bench.table()


def _draft_cost(rounds: dict[Shape, float]) -> DraftCost:
    """Base, call and token from rounds of one and four calls, and of four for two requests."""
    four, one, two = (rounds.get(Shape(*shape, network=True)) for shape in ((1, 4), (1, 1), (2, 4)))
    longest = four if four is not None else 4.0 * (one or 0.0)
    shortest = one if one is not None else longest / 4
    each = max(longest - shortest, 0.0) / 3
    token = min(max(two - longest, 0.0) / 4, each) if two is not None else each / 4
    return DraftCost(max(shortest - each, 0.0), each - token, token)
