"""How well `draft_tokens="auto"` decides, without the noise of a clock: every step has a fixed price.

    python recipes/policy/simulate.py [--workload code] [--texts 16] [--batch 1] [--tokens 128] [--steep 1.0]
        [--belief 1.0] [--learn]

Texts are real, written by the bundled pair, `--batch` side by side, but a step costs what a table says, in plain steps of
one text, and the controller knows the table (`--belief 1.15`: it thinks what drafting adds 15% dearer than it is;
`--learn`: it finds out). So two runs of one build say the same, and a change of a percent can be seen, which a shared
machine hides. `--steep 0.5` is a machine on which further rows cost half as much. Prints, for each workload and
temperature, the speed of `auto` and of two fixed lengths over plain decoding.
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
from paceline.engine import controller as controlling
from paceline.engine import planner as planning
from paceline.engine.controller import AutoController
from paceline.engine.costs import Costs, Profile, default_profile, staircase
from paceline.engine.engine import Engine
from paceline.engine.lookups import Lookups
from paceline.engine.records import RowRecord, StepRecord
from paceline.engine.rounds import RoundCost

# In plain steps of `demo` on two cores with AVX-512: a step by its rows, what each further text takes beside them, a
# draft round (base, each step, each token); what the first plain step after a round and after copies takes longer, and
# what of that the next one does (the target's weights have left the caches); what the first round takes longer. And what
# deciding takes, translated to C, its code cold: a step in which somebody is asked, each text that is searched for
# something to copy, each copy that is found, a plan and each of its texts.
ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 48, 64)
STEPS = (1.0, 1.25, 1.4, 1.45, 1.58, 2.0, 2.2, 3.6, 3.8, 7.0, 10.5, 14.0)
TEXT = 0.12
ROUND: RoundCost = (0.5, 0.045, 0.08)
COLD, COPIED, WARMING, FIRST = 0.4, 0.1, 0.82, 0.3
ASK, LOOK, COPY, PLAN, PLAN_TEXT = 0.06, 0.02, 0.15, 0.4, 0.05
RESTING = 0.06  # a look at rest, of one text or many
UNIT = 1e-3  # seconds that a plain step is said to take
READ = 8192  # tokens of prompts in a step, so that all texts begin close to each other
FIXED = (2, 4)
WORKLOADS = ("code", "prose", "edit", "dictated", "json", "random", "long")


class KnownCosts(Costs):
    """Costs that no clock changes."""

    def observe_targets(self, seen: Any, each: int = 1, elapsed: float | None = None) -> Costs:
        return self

    def observe_rounds(self, kind: str, seen: Any) -> Costs:
        return self

    def idle(self, kind: str, steps: int) -> Costs:
        return self


class Clock:
    """What the controller reads instead of the machine's: it stands, but for what deciding takes."""

    now = 0.0

    @classmethod
    def perf_counter(cls) -> float:
        return cls.now


class Looks(Lookups):
    """They take what the table says: nothing passes on the clock while one is made."""

    def timed(self, look: float, step: float, now: int) -> None:
        super().timed(RESTING * UNIT, UNIT, now)


class Priced(AutoController):
    """Counts what the texts of one run would have cost, in plain steps."""

    table: tuple[float, ...] = ()
    batch = 1
    tokens = 0  # written while that many texts were,
    running = 0.0  # what the steps and draft rounds of it took,
    deciding = 0.0  # and plans and looks
    _deciding = 0.0  # in this step
    _cold = 0.0  # what the next plain step takes longer than a warm one
    _drafted = False  # in the step before

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lookups = Looks(self._lookups.copier)

    def takes(self, what: float) -> None:
        """So much longer."""
        self._deciding += what
        Clock.now += what * UNIT

    def limits(self, *args: Any, **kwargs: Any) -> Any:
        self.takes(ASK)
        return super().limits(*args, **kwargs)

    def rest(self, *args: Any) -> Any:
        self.takes(RESTING)
        return super().rest(*args)

    def copies(self, *args: Any) -> Any:
        self.takes(RESTING)
        return super().copies(*args)

    def join(self, *args: Any) -> Any:
        self.takes(RESTING)
        return super().join(*args)

    def _think(self, sequences: list[Sequence], *args: Any) -> Any:
        self.takes(PLAN + PLAN_TEXT * len(sequences))
        return super()._think(sequences, *args)

    def observe(self, record: StepRecord) -> None:
        if record.rows:  # none while prompts are read
            step, drafting = price(self.table, record.rows)
            cold, last = self._temperature(record)
            if len(record.rows) == self.batch:
                self.tokens += record.times * len(record.rows) + sum(row.accepted for row in record.rows)
                self.running += record.times * step + drafting + cold
                self.deciding += self._deciding
            typical = self._deciding if record.times == 1 else 0.0
            record.target_seconds, record.draft_seconds = (step + last) * UNIT, (drafting + typical) * UNIT
            record.mask_seconds = record.other_seconds = 0.0
            record.more_seconds = ((record.times - 1) * step + self._deciding - typical) * UNIT
        self._deciding = 0.0
        super().observe(record)

    def _temperature(self, record: StepRecord) -> tuple[float, float]:
        """What the steps of a record take longer since the code or weights that they need have left the caches: all of
        them, and the last."""
        drafters = {row.drafter for row in record.rows if row.drafted}
        if drafters:
            first = FIRST if "mtp" in drafters and not self._drafted else 0.0
            self._drafted, self._cold = True, COLD if "mtp" in drafters else max(COPIED, WARMING * self._cold)
            return first, first
        left = WARMING**record.times
        cold = self._cold * (1 - left) / (1 - WARMING)
        self._drafted, self._cold = False, self._cold * left
        return cold, self._cold / WARMING


def price(table: tuple[float, ...], rows: list[RowRecord]) -> tuple[float, float]:
    """Of a step of some texts and of its drafts, in plain steps of one text."""
    base, step, token = ROUND
    network = [row.drafted for row in rows if row.drafter == "mtp" and row.drafted]
    copies = sum(row.drafter == "ngram" and row.drafted > 0 for row in rows)
    target = table[len(rows) + sum(row.drafted for row in rows) - 1] + TEXT * (len(rows) - 1)
    return target, COPY * copies + (base + step * max(network) + token * sum(network) if network else 0.0)


def prepared(batch: int, steep: float, belief: float, learns: bool) -> tuple[Engine, Priced]:
    """The bundled pair under a controller that counts."""
    config = EngineConfig(
        target="demo",
        drafter="mtp+ngram",
        draft_tokens=FIXED[0],
        max_batch=batch,
        prefill_chunk=READ,
        step_tokens=READ,
    )
    engine = build_engine(config)
    controlling.time = planning.time = Clock  # type: ignore[assignment]
    both = engine.state.drafters["mtp+ngram"]
    known = engine.state.controller
    assert isinstance(both, Portfolio)
    assert isinstance(both.free, NgramDrafter)
    assert isinstance(known, AutoController)
    peek, copier = both.free.peek, both.free

    def counted(sequence: Sequence) -> bool:
        controller.takes(LOOK)
        return peek(sequence)

    copier.peek = counted  # type: ignore[method-assign]
    controller = Priced(default_profile(), known.budget.kinds, default=("mtp", "ngram"), copier=copier)
    steps = [1 + (value - 1) * steep for value in STEPS]
    controller.batch = batch
    controller.table = staircase(ROWS, steps, 17 * batch)
    controller.budget = replace(known.budget, costs=believed(steps, belief, learns))
    engine.state.controller = controller
    engine.state.drafters["mtp+ngram"] = Portfolio(both.free, both.paid, controller)
    return engine, controller


def believed(steps: list[float], belief: float, learns: bool) -> Costs:
    """What the controller thinks that steps with so many rows cost, where a plain one costs 1."""
    base, step, token = (value * UNIT * belief for value in ROUND)
    rounds = {"mtp": (base, step, token), "ngram": (COPY * UNIT, 0.0, 0.0)}
    seconds = tuple((1 + (value - 1) * belief) * UNIT for value in steps)
    costs = Profile(ROWS, seconds, rounds=rounds, text=TEXT * UNIT).costs()
    return (
        costs if learns else KnownCosts(costs.table, text=costs.text, draft=costs.draft, rounds=costs.rounds)
    )


def speed(
    engine: Engine, controller: Priced, prompts: list[workloads.Prompt], params: SamplingParams, batch: int
) -> float:
    """Of all texts, `batch` at a time, over plain decoding: while so many are being written."""
    plain = controller.table[batch - 1] + TEXT * (batch - 1)
    controller.running, controller.deciding, controller.tokens = 0.0, 0.0, 0
    for first in range(0, len(prompts), batch):
        for seed, prompt in enumerate(prompts[first : first + batch], first):
            own = replace(params, seed=seed, reference=prompt.reference, constraint=prompt.constraint)
            engine.add(f"text {seed}", prompt.tokens, own)
        while engine.has_work:
            engine.step()
    return controller.tokens * plain / batch / (controller.running + controller.deciding)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--texts", type=int, default=16, help="of each workload")
    parser.add_argument("--batch", type=int, default=1, help="texts side by side")
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="default: all of them")
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
    if not 1 <= args.batch <= args.texts or args.texts % args.batch:
        parser.error("--texts must be a multiple of --batch")
    engine, controller = prepared(args.batch, args.steep, args.belief, args.learn)
    assert engine.tokenizer is not None
    bounds = workloads.Bounds(engine.state.target.vocab_size, engine.max_len - args.tokens - 20)
    start = controller.budget
    print("speed over plain decoding, and of auto over the best of none and the fixed lengths")
    for temperature in (0.0, 0.8):
        controller.budget = replace(start, step=controller.budget.step)
        ratios = []
        for name in args.workload or WORKLOADS:
            prompts = workloads.prompts(name, engine.tokenizer, bounds, args.texts)[: args.texts]
            params = SamplingParams(max_tokens=args.tokens, temperature=temperature, ignore_eos=True)
            auto, *fixed = (
                speed(engine, controller, prompts, replace(params, draft_tokens=k), args.batch)
                for k in ("auto", *FIXED)
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
