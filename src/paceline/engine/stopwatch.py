"""What a draft round costs on this machine, timed at start-up through the engine itself.

A cost that is only guessed has to be found out while users wait, and the first round of all, which records the
drafter's plan, would be taken for the price of drafting.
"""

from __future__ import annotations

import time
from dataclasses import replace

from paceline.core import SamplingParams
from paceline.engine.budget import StepRecord
from paceline.engine.controller import FixedController
from paceline.engine.costs import DraftCost, RoundCost
from paceline.engine.engine import Engine, EngineParts

SHAPES = ((1, 1), (1, 4), (4, 4), (4, 1))  # (texts, tokens drafted for each)
REPEATS = 3  # rounds of each shape; the first one warms up and does not count
WEIGHT = 8  # of a measured round against what is guessed
PROMPT, WRITE = 8, 160  # tokens; more are written by no drafter in the rounds of all shapes


class Stopwatch(FixedController):
    """Drafts `k` tokens and keeps how long the rounds of the last step took."""

    def __init__(self) -> None:
        super().__init__(1)
        self.last: StepRecord | None = None

    def observe(self, record: StepRecord) -> None:
        self.last = record


def measure_rounds(parts: EngineParts, limit: float) -> RoundCost | None:
    """(base, per step, per token) seconds of a round of `parts.default_drafter`, in about `limit` seconds at most.

    None where too little could be seen: a drafter that fails or has nothing to say, or a very short context. The cache
    is empty before and after.
    """
    watch, cost = Stopwatch(), None
    engine = Engine(replace(parts, controller=watch, prefix_cache=False, draft_tokens="auto"))
    if engine.max_len <= PROMPT + WRITE:
        return None
    end = time.perf_counter() + limit
    names: list[str] = []
    try:
        for texts, watch.k in [shape for shape in SHAPES if shape[0] <= parts.max_batch]:
            while len(names) < texts:
                names.append(f"stopwatch-{len(names)}")
                prompt = [(7 * len(names) + i) % parts.target.vocab_size for i in range(PROMPT)]
                engine.add(names[-1], prompt, SamplingParams(max_tokens=WRITE, ignore_eos=True))
            seconds, tokens = _time(engine, watch, texts, end)
            if seconds is None:
                break
            for _ in range(WEIGHT):
                cost = (cost or DraftCost.like(seconds)).add(watch.k, tokens, seconds, decay=1.0)
    finally:
        for name in names:
            engine.cancel(name)
    return None if cost is None else cost.fit()


def _time(engine: Engine, watch: Stopwatch, texts: int, end: float) -> tuple[float | None, int]:
    """(seconds of the fastest round in which all texts draft, its tokens); (None, 0) if there was none in time."""
    best, tokens, seen = None, 0, 0
    for _ in range(4 * REPEATS):  # steps that read a prompt do not draft
        watch.last = None
        engine.step()
        record = watch.last
        if record is not None and len(record.rows) == texts and all(row.drafted for row in record.rows):
            seen += 1
            if seen > 1 and (best is None or record.draft_seconds < best):
                best, tokens = record.draft_seconds, sum(row.drafted for row in record.rows)
        if seen == REPEATS or (time.perf_counter() > end and seen > 1):
            break
    return best, tokens
