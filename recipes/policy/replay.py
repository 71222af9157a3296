"""How well `draft_tokens="auto"` decides on what a real pair said: each text beside every fixed length.

    python recipes/policy/replay.py TRACES.json [--draft 0.4] [--rows 1 0.95 1 1.15 1.33 1.55 1.8 2.0 2.2] [--step 40]

TRACES.json is of `recipes/real/trace.py`: at each position of each text what a draft model said and how much of it was
kept. So the tokens of any policy are exact, and only times are made up: a plain step takes `--step` milliseconds, one of
more rows what `--rows` says in plain steps, a drafted token `--draft` plain steps, each with noise. The texts follow each
other in one engine that begins without knowing the pair, or knowing it (`--known`), with prices that are right or not
(`--belief`: what the policy takes a drafted token to cost, over what it costs).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.control.adaptive import AdaptivePolicy, KnownPair
from paceline.control.base import DraftPolicy, PlanRow, RowOutcome, StepOutcome, heat_of
from paceline.control.cost_model import CostTable, DraftCost
from paceline.control.fixed import FixedPolicy
from paceline.control.reasons import NoDraftReason
from paceline.ops.base import Stop
from paceline.ops.rounds import Ends

FIXED = (1, 2, 3, 4, 6, 8)
NOISE = 0.03  # standard deviation of a time's logarithm
SWITCH = 0.05  # chance of each step that a busy machine gets slow, or fast again


@dataclass(frozen=True, slots=True)
class Prices:
    step: float  # seconds of a plain step
    rows: tuple[float, ...]  # what 1, 2, ... rows take, in plain steps; the last slope goes on
    draft: float  # of a drafted token, in plain steps
    busy: float = 1.0  # how much slower everything is now and then

    def target(self, rows: int) -> float:
        known = self.rows
        if rows <= len(known):
            return self.step * known[rows - 1]
        return self.step * (known[-1] + (known[-1] - known[-2]) * (rows - len(known)))

    def table(self, belief: float) -> CostTable:
        rows = (1, 2, 3, 5, 9, 17)
        unit = self.step * self.draft * belief
        return CostTable(rows, tuple([self.target(n) for n in rows]), {"model": DraftCost(0.0, unit, 0.0)})


def write(text: dict[str, Any], id: int, policy: DraftPolicy, prices: Prices, rng: random.Random) -> float:
    """Tokens per second of one text, as if the machine were never slow; the policy sees it as it is."""
    kept, confidence, heat = text["kept"], text["confidence"], heat_of(text["temperature"])
    at, seconds, depth = 0, 0.0, len(confidence[0])
    gone, slow = False, 1.0
    while at < len(kept):
        if rng.random() < SWITCH:
            slow = prices.busy if slow == 1.0 else 1.0
        begin = time.thread_time()
        room = min(len(kept) - at - 1, 16)
        row = PlanRow(id, "auto", room, None if gone else "model", depth, heat)
        plan = policy.plan([row], [None])
        seconds += time.thread_time() - begin
        (planned,) = plan.rows
        gone |= planned.reason is NoDraftReason.GIVEN_UP
        said = confidence[at]
        drafted = 0
        if planned.limit:
            rule = plan.stop
            ends = Ends([Stop(planned.limit, planned.chance[1:], planned.worth, rule.price, rule.call)])
            active = [0]
            while active:
                active = ends.go_on(active, drafted, [said[drafted]])
                drafted += 1
        right = min(kept[at], drafted)
        step = prices.target(drafted + 1) * rng.lognormvariate(0, NOISE)
        drafting = prices.step * prices.draft * drafted * rng.lognormvariate(0, NOISE)
        outcome = RowOutcome(id, planned.drafter, drafted, right, tuple(said[:drafted]))
        seconds += step + drafting
        seen = {"model": slow * drafting} if drafted else {}
        policy.observe(StepOutcome((outcome,), slow * step, seen))
        at += right + 1
    policy.forget(id)
    return len(kept) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", type=Path)
    parser.add_argument("--step", type=float, default=40.0, help="milliseconds of a plain step")
    parser.add_argument(
        "--rows", type=float, nargs="+", default=[1, 0.95, 1, 1.15, 1.33, 1.55, 1.78, 2.0, 2.23]
    )
    parser.add_argument("--draft", type=float, default=0.4, help="a drafted token, in plain steps")
    parser.add_argument("--busy", type=float, default=1.0, help="times that everything takes now and then")
    parser.add_argument("--belief", type=float, default=1.0)
    parser.add_argument("--known", type=float, nargs="+", default=[], help="acceptance by position")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--texts", action="store_true", help="print every text")
    args = parser.parse_args()
    texts = json.loads(args.traces.read_text(encoding="utf-8"))
    prices = Prices(args.step / 1000, tuple(args.rows), args.draft, args.busy)
    known = {("model", False): KnownPair(tuple(args.known)), ("model", True): KnownPair(tuple(args.known))}
    plain: dict[tuple[float, str], list[float]] = {}
    best: dict[tuple[float, str], list[float]] = {}
    for temperature in sorted({text["temperature"] for text in texts}):
        own = [text for text in texts if text["temperature"] == temperature]
        ratios = [([], []) for _ in own]
        for seed in range(args.seeds):
            policy = AdaptivePolicy(prices.table(args.belief), known if args.known else None)
            order = list(range(len(own)))
            if seed:  # the first one has them as they are
                random.Random(seed).shuffle(order)
            for i in order:
                text = own[i]
                auto = write(text, i, policy, prices, random.Random(seed))
                fixed = {k: write(text, i, FixedPolicy(k), prices, random.Random(seed)) for k in (0, *FIXED)}
                ratios[i][0].append(auto / fixed[0])
                ratios[i][1].append(auto / max(fixed.values()))
        for text, (over, of_best) in zip(own, ratios, strict=True):
            a, b = statistics.mean(over), statistics.mean(of_best)
            if args.texts:
                print(
                    f"  T={temperature:g} {text['kind']} {text['question']}: over plain {a:.3f}, over the best {b:.3f}"
                )
            plain.setdefault((temperature, text["kind"]), []).append(a)
            best.setdefault((temperature, text["kind"]), []).append(b)
    for (temperature, kind), over in plain.items():
        of_best = best[temperature, kind]
        print(
            f"T={temperature:g} {kind}: over plain {statistics.median(over):.3f}, worst {min(over):.3f}; "
            f"over the best fixed length {statistics.median(of_best):.3f}, worst {min(of_best):.3f}"
        )


if __name__ == "__main__":
    main()
