"""What steps and draft rounds cost on this machine, timed at start-up through the engine itself.

A cost that is only guessed has to be found out while users wait, and the first round of all, which records the
drafter's plan, would be taken for the price of drafting.
"""

from __future__ import annotations

import time
from dataclasses import replace

from paceline.core import SamplingParams
from paceline.engine.acceptance import Kind
from paceline.engine.budget import StepRecord
from paceline.engine.controller import FixedController
from paceline.engine.costs import DraftCost, Profile
from paceline.engine.engine import Engine, EngineParts

TEXTS = (1, 4)
BLOCK = {
    0: 12,
    4: 6,
    1: 6,
}  # by tokens drafted for each text: steps that follow each other, as they do in use
LENGTHS, WARM = tuple(BLOCK), 3  # the first steps of a block warm up
TURNS = 3  # of all lengths, so that a slow moment hits them all
WEIGHT = 32  # of a measured round against what is guessed
PROMPT, WRITE = 8, 200  # tokens; more are written by no drafter in all turns

Shape = tuple[int, int]


class Stopwatch(FixedController):
    """Drafts `k` tokens and keeps the record of the last step."""

    def __init__(self) -> None:
        super().__init__(0)
        self.last: StepRecord | None = None

    def observe(self, record: StepRecord) -> None:
        self.last = record


def measure_steps(parts: EngineParts, kind: Kind | None, profile: Profile, limit: float) -> Profile:
    """`profile` with what a step costs besides a bare forward, and a round of `parts.default_drafter`, of this kind.

    Takes about `limit` seconds. What cannot be seen stays as it was: a drafter that fails or has nothing to say, a very
    short context. The cache is empty before and after.
    """
    seen = _run(parts, limit, LENGTHS if kind is not None else LENGTHS[:1])
    table = profile.costs()
    plain = {texts: record.target_seconds for (texts, k), record in seen.items() if not k}
    if 1 not in plain:
        return profile
    base, slope = _line([(table.target(texts), seconds) for texts, seconds in sorted(plain.items())])
    profile = replace(profile, base=base, slope=slope)
    drafted = {shape: record for shape, record in seen.items() if shape[1]}
    if kind is None or not drafted:
        return profile
    costs, extra = profile.costs(), dict[int, list[float]]()
    price = DraftCost.like(plain[1])
    for (texts, k), record in drafted.items():
        extra.setdefault(texts, []).append(record.target_seconds - costs.target(record.target_rows))
        tokens = sum(row.drafted for row in record.rows)
        for _ in range(WEIGHT):
            price = price.add(k, tokens, record.draft_seconds, decay=1.0)
    mean = {texts: max(sum(seconds) / len(seconds), 0.0) for texts, seconds in sorted(extra.items())}
    (few, first), *_, (many, last) = [*mean.items(), *mean.items()]
    more = max(last - first, 0.0) / (many - few) if many > few else 0.0
    return replace(profile, rounds={kind.name: price.fit()}, chill={kind.name: (first, more)})


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """(base, slope), none negative, through (forward, step) seconds of the fewest and the most texts."""
    (x, y), (far_x, far_y) = points[0], points[-1]
    slope = min(max((far_y - y) / (far_x - x), 0.5), 2.0) if far_x > x else 1.0
    slope = min(slope, y / x)
    return y - slope * x, slope


def _run(parts: EngineParts, limit: float, lengths: tuple[int, ...]) -> dict[Shape, StepRecord]:
    """A typical step of each shape in the fastest of its blocks, as far as there is time."""
    out: dict[Shape, StepRecord] = {}
    watch = Stopwatch()
    engine = Engine(replace(parts, controller=watch, prefix_cache=False, draft_tokens="auto"))
    if engine.max_len <= PROMPT + WRITE:
        return {}
    end = time.perf_counter() + limit
    names: list[str] = []
    try:
        for texts in [n for n in TEXTS if n <= parts.max_batch]:
            while len(names) < texts:
                names.append(f"stopwatch-{len(names)}")
                prompt = [(7 * len(names) + i) % parts.target.vocab_size for i in range(PROMPT)]
                engine.add(names[-1], prompt, SamplingParams(max_tokens=WRITE, ignore_eos=True))
            for _ in range(TURNS):
                for watch.k in lengths:
                    steps = [_step(engine, watch, texts) for _ in range(BLOCK[watch.k])]
                    records = sorted((r for r in steps[WARM:] if r is not None), key=_seconds)
                    known = out.get((texts, watch.k))
                    if records:
                        typical = records[len(records) // 2]
                        out[texts, watch.k] = typical if known is None else min(known, typical, key=_seconds)
                if time.perf_counter() > end:
                    return out
    finally:
        for name in names:
            engine.cancel(name)
    return out


def _step(engine: Engine, watch: Stopwatch, texts: int) -> StepRecord | None:
    """A step in which all texts did what they were told. Prompts are read before."""
    for _ in range(2):
        engine.step()
        record = watch.last
        if record is not None and len(record.rows) == texts:
            told = all(bool(row.drafted) == (watch.k > 0) for row in record.rows)
            return record if told else None
    return None


def _seconds(record: StepRecord) -> float:
    return record.draft_seconds + record.target_seconds
