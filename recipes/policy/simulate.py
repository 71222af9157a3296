"""How well `draft_tokens="auto"` decides, without the noise of a clock: every step has a fixed price.

    python recipes/policy/simulate.py [--texts 16] [--tokens 128] [--steep 1.0] [--belief 1.0] [--learn]

Texts are real, written by the bundled pair, but a step costs what a table says, in plain steps, and the controller
knows the table (`--belief 1.15`: it thinks what drafting adds 15% dearer than it is; `--learn`: it finds out). So two
runs of one build say the same, and a change of a percent can be seen, which a shared machine hides. `--steep 0.5` is a
machine on which further rows cost half as much. Prints, for each workload and temperature, the speed of `auto` and of two
fixed lengths over plain decoding.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from typing import Any

from paceline.assembly import build_engine
from paceline.bench import workloads
from paceline.config import EngineConfig
from paceline.core import SamplingParams, Sequence
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.portfolio import Portfolio
from paceline.engine.controller import AutoController
from paceline.engine.costs import Costs, Profile, RoundCost, default_profile, staircase
from paceline.engine.engine import Engine
from paceline.engine.records import RowRecord, StepRecord

# In plain steps of `demo` on two cores: a step by its rows, a draft round (base, each step, each token), a look for
# something to copy and one that finds something, a new plan.
ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 16, 17, 32)
STEPS = (1.0, 1.22, 1.5, 1.85, 2.05, 2.3, 3.0, 3.3, 4.9, 5.3, 10.0)
ROUND: RoundCost = (0.28, 0.13, 0.02)
LOOK, COPY, PLAN = 0.04, 0.15, 0.45
UNIT = 1e-3  # seconds that a plain step is said to take
FIXED = (2, 4)
WORKLOADS = ("code", "prose", "edit", "json", "random", "long")


class KnownCosts(Costs):
    """Costs that no clock changes."""

    def observe_targets(self, seen: Any, each: int = 1) -> Costs:
        return self

    def observe_rounds(self, kind: str, seen: Any) -> Costs:
        return self

    def idle(self, kind: str, steps: int) -> Costs:
        return self


class Priced(AutoController):
    """Counts what the texts of one run would have cost, in plain steps."""

    table: tuple[float, ...] = ()
    learns = False  # from what it is billed
    running = 0.0  # steps and draft rounds
    deciding = 0.0  # plans and looks

    def _think(self, *args: Any) -> Any:
        self.deciding += PLAN
        self._plan_seconds = PLAN * UNIT
        return super()._think(*args)

    def observe(self, record: StepRecord) -> None:
        for row in record.rows:  # none while a prompt is read
            step, drafting = price(self.table, row)
            self.running += step + drafting
            if self.learns:
                record.target_seconds, record.draft_seconds = step * UNIT, drafting * UNIT
                record.other_seconds = 0.0
        super().observe(record)


def price(table: tuple[float, ...], row: RowRecord) -> tuple[float, float]:
    """Of a step with one text and of its draft, in plain steps."""
    if not row.drafted:
        return 1.0, 0.0
    base, step, token = ROUND
    return table[row.drafted], base + (step + token) * row.drafted if row.drafter == "mtp" else COPY


def prepared(steep: float, belief: float, learns: bool) -> tuple[Engine, Priced]:
    """The bundled pair under a controller that counts."""
    engine = build_engine(EngineConfig(target="demo", drafter="mtp+ngram", draft_tokens=FIXED[0]))
    both = engine.state.drafters["mtp+ngram"]
    known = engine.state.controller
    assert isinstance(both, Portfolio)
    assert isinstance(both.free, NgramDrafter)
    assert isinstance(known, AutoController)
    peek = both.free.peek

    def counted(sequence: Sequence) -> bool:
        controller.deciding += LOOK
        return peek(sequence)

    controller = Priced(default_profile(), known.budget.kinds, default=("mtp", "ngram"), peek=counted)
    steps = [1 + (value - 1) * steep for value in STEPS]
    controller.table = staircase(ROWS, steps)
    controller.budget = replace(known.budget, costs=believed(steps, belief, learns))
    controller.learns = learns
    engine.state.controller = controller
    engine.state.drafters["mtp+ngram"] = Portfolio(both.free, both.paid, controller)
    return engine, controller


def believed(steps: list[float], belief: float, learns: bool) -> Costs:
    """What the controller thinks that steps with so many rows cost, where a plain one costs 1."""
    base, step, token = (value * UNIT * belief for value in ROUND)
    rounds = {"mtp": (base, step, token), "ngram": (COPY * UNIT, 0.0, 0.0)}
    seconds = tuple((1 + (value - 1) * belief) * UNIT for value in steps)
    costs = Profile(ROWS, seconds, rounds=rounds).costs()
    return costs if learns else KnownCosts(costs.table, draft=costs.draft, rounds=costs.rounds)


def speed(
    engine: Engine, controller: Priced, prompts: list[workloads.Prompt], params: SamplingParams
) -> float:
    """Of all texts, one after the other, over plain decoding."""
    taken = []
    for seed, prompt in enumerate(prompts):
        controller.running, controller.deciding, tokens = 0.0, 0.0, 0
        own = replace(params, seed=seed, reference=prompt.reference, constraint=prompt.constraint)
        engine.add("text", prompt.tokens, own)
        while engine.has_work:
            tokens += sum(len(delta.token_ids) for delta in engine.step())
        deciding = controller.deciding if params.draft_tokens == "auto" else 0.0
        taken.append((controller.running + deciding) / tokens)
    return 1 / statistics.mean(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--texts", type=int, default=16, help="of each workload")
    parser.add_argument("--tokens", type=int, default=128, help="of a text")
    parser.add_argument(
        "--steep", type=float, default=1.0, help="what further rows cost, over demo on two cores"
    )
    parser.add_argument(
        "--belief", type=float, default=1.0, help="what the controller thinks they cost, over that"
    )
    parser.add_argument(
        "--learn", action="store_true", help="let it learn what they cost from what it is billed"
    )
    args = parser.parse_args()
    if not (args.texts >= 1 and 1 <= args.tokens <= 1000 and args.steep > 0 and args.belief > 0):
        parser.error("give at least one text, 1 to 1000 tokens, and numbers above 0 for --steep and --belief")
    engine, controller = prepared(args.steep, args.belief, args.learn)
    assert engine.tokenizer is not None
    bounds = workloads.Bounds(engine.state.target.vocab_size, engine.max_len - args.tokens - 20)
    start = controller.budget
    print("speed over plain decoding, and of auto over the best of none and the fixed lengths")
    for temperature in (0.0, 0.8):
        controller.budget = replace(start, step=controller.budget.step)
        ratios = []
        for name in WORKLOADS:
            prompts = workloads.prompts(name, engine.tokenizer, bounds, args.texts)[: args.texts]
            params = SamplingParams(max_tokens=args.tokens, temperature=temperature, ignore_eos=True)
            auto, *fixed = (
                speed(engine, controller, prompts, replace(params, draft_tokens=k)) for k in ("auto", *FIXED)
            )
            ratios.append((auto, auto / max(1.0, *fixed)))
            others = "  ".join(f"{k}: {value:.3f}" for k, value in zip(FIXED, fixed, strict=True))
            print(
                f"T={temperature} {name:7} auto {auto:.3f}  {others}  over the best {ratios[-1][1]:.3f}",
                flush=True,
            )
        none, best = (statistics.geometric_mean(column) for column in zip(*ratios, strict=True))
        print(f"T={temperature} means   auto {none:.3f}  over the best {best:.3f}")


if __name__ == "__main__":
    main()
