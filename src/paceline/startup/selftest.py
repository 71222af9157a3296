"""The load-time self-test of a pair: a few short texts, written through the engine itself, show what is kept.

It runs where nothing better is known (no calibration file, no kept profile) and only where it is cheap.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from paceline.control.acceptance import ALARM_SHARE, USUAL
from paceline.control.base import RowOutcome, StepOutcome
from paceline.control.confidence import BINS
from paceline.control.cost_model import CostModel, CostTable
from paceline.control.fixed import FixedPolicy
from paceline.core import SamplingParams
from paceline.engine.engine import Engine, EngineParts
from paceline.errors import UsageError
from paceline.startup.calibration_file import Known
from paceline.text.chat import ChatTemplate
from paceline.text.tokenizer import Tokenizer

LIMIT = 1.0  # seconds that it may take
LONGEST = 60.0  # where it was asked for, whatever it takes
DRAFT = 4  # tokens drafted at every step
WRITE = 32  # tokens of each text
ENOUGH = 24  # drafts, so that chance alone cannot make a good pair look bad
PRIOR = 4.0  # drafts that the usual acceptance of such a drafter counts for
PROMPTS = (
    "def moving_average(values, window):\n    \"\"\"Mean of the last `window` values at each position.\"\"\"\n",
    "Explain in a few sentences why the sky is blue and why sunsets are red.\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    '[\n  {"id": 1, "name": "Anna", "city": "Rome"},\n  {"id": 2, "name": "Ben", "city": "Oslo"},\n',
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tested:
    known: Known
    drafts: int  # how many first tokens were judged


class Recorder(FixedPolicy):
    """Drafts a fixed number and remembers what became of it."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.rows: list[RowOutcome] = []

    def observe(self, outcome: StepOutcome) -> None:
        self.rows += [row for row in outcome.rows if row.drafted]


def estimate(table: CostTable) -> float:
    """Seconds that the fewest steps that are evidence would take, at least."""
    texts = len(PROMPTS)
    return ENOUGH / texts * CostModel(table).step_seconds(texts * (DRAFT + 1), True) * 1.3


def run_selftest(parts: EngineParts, limit: float = LIMIT) -> Tested | None:
    """Greedy texts with the drafter `parts.default_drafter` for at most about `limit` seconds.

    None if too few drafts were judged to know anything. The cache is empty before and after.
    """
    assert parts.tokenizer is not None, "an assembled engine has a tokenizer"
    recorder = Recorder(DRAFT)
    engine = Engine(replace(parts, policy=recorder, prefix_cache=False, draft_tokens=DRAFT, draft_tree=None))
    end = time.perf_counter() + limit
    names: list[str] = []
    try:
        for prompt in _prompts(parts.tokenizer, engine.max_len - WRITE):
            names.append(f"self-test-{len(names)}")
            engine.add(names[-1], prompt, SamplingParams(max_tokens=WRITE, ignore_eos=True))
        while engine.has_work and time.perf_counter() < end:
            engine.step()
    finally:
        for name in names:
            engine.cancel(name)
    return summarise(recorder.rows)


def _prompts(tokenizer: Tokenizer, most: int) -> Iterator[list[int]]:
    """The prompts as token ids, in the model's chat template where it has one that takes them."""
    for text in PROMPTS:
        try:
            shown = ChatTemplate.of(tokenizer).render([{"role": "user", "content": text}])
            ids = tokenizer.encode(shown, add_bos=False)
        except UsageError:  # a model that was not made to chat
            ids = tokenizer.encode(text)
        if 0 < len(ids) < most:
            yield ids


def summarise(rows: list[RowOutcome]) -> Tested | None:
    """Acceptance by position, drawn to the usual one as far as the evidence is thin, and confidence bins."""
    if len(rows) < ENOUGH:
        return None
    acceptance = []
    for j in range(DRAFT):
        tried = sum(row.drafted > j and row.accepted >= j for row in rows)
        kept = sum(row.accepted > j for row in rows)
        acceptance.append((kept + PRIOR * USUAL[j]) / (tried + PRIOR))
    bins = [(0.0, 0.0)] * BINS
    for row in rows:
        for j, value in enumerate(row.confidence[: row.accepted + 1]):
            if 0.0 <= value <= 1.0:
                i = min(int(value * BINS), BINS - 1)
                bins[i] = bins[i][0] + (j < row.accepted), bins[i][1] + 1.0
    return Tested(Known(tuple(acceptance), tuple(bins)), len(rows))


def complaint(known: Known, drafter: str) -> str | None:
    """A warning if the pair keeps far less than such drafters usually do, else None."""
    kept, usual = known.acceptance[0], USUAL[0]
    if kept >= ALARM_SHARE * usual:
        return None
    trained = drafter in ("mtp", "eagle3")  # by `paceline train`
    return (
        f"drafter {drafter} hardly fits this target: about {kept:.0%} of its first tokens are kept, such drafters "
        f"reach about {usual:.0%}. It may be of another target, or the target was fine-tuned since. The text is still "
        + ("right; `paceline train` fits the drafter to the target" if trained else
           "right; give a smaller model of the target's own family, or the drafter ngram")
    )  # fmt: skip
