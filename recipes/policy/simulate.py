"""How well `draft_tokens="auto"` decides, in a world where every price and every chance is known.

    python recipes/policy/simulate.py [--steps 3 5 40 150] [--seeds 1 2 3] [--tokens 6000] [--blind] [--cells]

Requests of 64 to 256 tokens come and go, `batch` side by side. A draft token is kept by a chance that varies around
its request's mean; the drafter's confidence is that chance (`--blind`: the mean). Steps and draft rounds take what a
table says, with noise; the policy believes that table, or that what drafting adds is 40% cheaper. The processor time of
`plan` and `observe` counts. Each cell is compared with the best fixed length, chosen in hindsight, and with none.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from paceline.control.adaptive import AdaptivePolicy, KnownPair
from paceline.control.base import DraftPlan, DraftPolicy, PlanRow, RowOutcome, StepOutcome
from paceline.control.cost_model import CostTable, DraftCost
from paceline.control.fixed import FixedPolicy
from paceline.control.reasons import NoDraftReason
from paceline.ops.base import Stop
from paceline.ops.rounds import Ends

ROWS = (1, 2, 3, 5, 9, 17, 33, 64)
# In plain steps of one row: what each further row adds up to 8 rows and beyond, and a draft round
SHAPES = {
    "flat": (0.03, 0.05, DraftCost(0.03, 0.06, 0.004)),
    "steep": (0.12, 0.16, DraftCost(0.05, 0.08, 0.02)),
}
FITS = {
    "fits": (0.75, 0.75, 0.75),
    "mixed": (0.2, 0.95, 0.6),
    "does not": (0.15, 0.15, 0.75),
}  # low, high, known
FIXED = (0, 1, 2, 3, 4, 6, 8)
SPREAD = 3.0  # concentration of a token's chance around its request's mean
NOISE = 0.05  # standard deviation of a time's logarithm
MOST = 16


@dataclass(frozen=True, slots=True)
class World:
    seed: int
    milliseconds: float  # of a plain step of one row
    shape: str
    fit: str
    batch: int
    cheap: float  # what the policy believes that drafting adds, over what it does
    tokens: int
    blind: bool

    def table(self, belief: float = 1.0) -> CostTable:
        near, far, cost = SHAPES[self.shape]
        unit = self.milliseconds / 1000
        steps = [unit * (1 + belief * (near * (min(n, 8) - 1) + far * max(n - 8, 0))) for n in ROWS]
        draft = DraftCost(*[unit * belief * part for part in cost])
        return CostTable(ROWS, tuple(steps), {"network": draft})


@dataclass(slots=True)
class Request:
    id: int
    left: int
    mean: float
    gone: bool = False  # its drafter was given up


def requests(world: World, rng: random.Random) -> Iterator[Request]:
    low, high, _ = FITS[world.fit]
    number = 0
    while True:
        yield Request(number, rng.randint(64, 256), rng.uniform(low, high))
        number += 1


def draft(plan: DraftPlan, live: list[Request], world: World, rng: random.Random) -> list[RowOutcome]:
    """What the network drafts within the plan, and what is kept of it."""
    confidence: list[list[float]] = [[] for _ in live]
    rule = plan.stop
    ends = Ends([Stop(row.limit, row.chance[1:], row.worth, rule.price, rule.call) for row in plan.rows])
    kept = [0] * len(live)
    active = [i for i, row in enumerate(plan.rows) if row.limit]
    for j in range(MOST):
        for i in active:
            mean = live[i].mean
            chance = mean if world.blind else rng.betavariate(SPREAD * mean, SPREAD * (1 - mean))
            kept[i] += kept[i] == j and rng.random() < chance
            confidence[i].append(chance)
        active = ends.go_on(active, j, [confidence[i][-1] for i in active])
    return [
        RowOutcome(request.id, row.drafter, len(c), n, tuple(c))
        for request, row, c, n in zip(live, plan.rows, confidence, kept, strict=True)
    ]


def speed(world: World, policy: DraftPolicy, *, counted: bool) -> float:
    """Tokens per second."""
    rng = random.Random(world.seed)
    source, table = requests(world, random.Random(world.seed + 1)), world.table()
    steps, cost = table.dense(17 * world.batch + 1), table.drafts["network"]
    live = [next(source) for _ in range(world.batch)]
    written, seconds = 0, 0.0
    while written < world.tokens:
        begin = time.thread_time()
        rows = [
            PlanRow(r.id, "auto", min(r.left - 1, MOST), None if r.gone else "network", MOST) for r in live
        ]
        plan = policy.plan(rows, [None] * len(rows))
        deciding = time.thread_time() - begin
        for request, row in zip(live, plan.rows, strict=True):
            request.gone |= row.reason is NoDraftReason.GIVEN_UP
        outcomes = draft(plan, live, world, rng)
        tokens, calls = sum(o.drafted for o in outcomes), max(o.drafted for o in outcomes)
        step = steps[len(live) + tokens - 1] * rng.lognormvariate(0, NOISE)
        drafting = cost.base + cost.call * calls + cost.token * tokens if calls else 0.0
        drafting *= rng.lognormvariate(0, NOISE)
        begin = time.thread_time()
        policy.observe(StepOutcome(tuple(outcomes), step, {"network": drafting} if calls else {}))
        deciding += time.thread_time() - begin
        seconds += step + drafting + (deciding if counted else 0.0)
        for i, outcome in enumerate(outcomes):
            live[i].left -= outcome.accepted + 1
            written += outcome.accepted + 1
            if live[i].left <= 0:
                policy.forget(live[i].id)
                live[i] = next(source)
    return written / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--steps", type=float, nargs="+", default=[3.0, 5.0, 40.0, 150.0], help="milliseconds of a plain step"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--tokens", type=int, default=6000, help="of each cell, times the batch's square root"
    )
    parser.add_argument(
        "--blind", action="store_true", help="the drafter's confidence says nothing of a token"
    )
    parser.add_argument("--cells", action="store_true", help="print every cell")
    args = parser.parse_args()
    if args.tokens < 1:
        parser.error("give at least one token")
    print("step     drafter   over the best fixed length   over none: mean   worst")
    for milliseconds, fit in product(args.steps, FITS):
        ratios: list[tuple[float, float]] = []
        for seed, shape, batch, cheap in product(args.seeds, SHAPES, (1, 4, 16), (1.0, 0.6)):
            tokens = int(args.tokens * batch**0.5)
            world = World(seed, milliseconds, shape, fit, batch, cheap, tokens, args.blind)
            known = {("network", False): KnownPair((FITS[fit][2],))}
            auto = speed(world, AdaptivePolicy(world.table(cheap), known), counted=True)
            fixed = [speed(world, FixedPolicy(k), counted=False) for k in FIXED]
            ratios.append((auto / max(fixed), auto / fixed[0]))
            if args.cells:
                best = FIXED[fixed.index(max(fixed))]
                print(
                    f"  {world} best {best}: {ratios[-1][0]:.3f}, over none {ratios[-1][1]:.3f}", flush=True
                )
        over, none = ([r[i] for r in ratios] for i in (0, 1))
        print(
            f"{milliseconds:4.0f} ms  {fit:8}  {statistics.geometric_mean(over):.3f}"
            f"                        {statistics.geometric_mean(none):.3f}             {min(none):.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
