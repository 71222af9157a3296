"""Whole draft rounds on the device: forward, draw and hand-over of a step are one captured graph, replayed for each step.

All steps of a round, or of a piece of one, are enqueued before the host reads anything. Where a row's draft ends is said
afterwards, by the tokens and confidences of all rows. A row's tokens do not hang on which other rows went on.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from paceline.core import ForwardBatch
from paceline.kv.cache import KVCache
from paceline.ops.base import ChainStart, Drawn, RoundStart, Rule, Stop
from paceline.ops.cuda.context import Context
from paceline.ops.cuda.drawing import WORDS, Drawer, Logits, encode
from paceline.ops.cuda.kernels import chain
from paceline.ops.cuda.places import Ref
from paceline.ops.cuda.plan import Captured, Held, Plan
from paceline.ops.cuda.shape import Bucket, power, sections_of
from paceline.ops.rounds import Ends

PIECE = 4  # steps between two looks at who goes on, where confidences decide that
_BLOCK = 1024
_IDLE = Rule(0.0, 0, 0)


@dataclass(slots=True)
class _Step:
    """What is known of the step of a bucket; of no use once the plan holds another context for it."""

    held: Held
    uses: int = 0
    captured: Captured | None = None
    failed: bool = False


class Round:
    """Draft rounds over one plan, whose graph reads `hidden` and gives ([ids,] logits, hidden of the next step)."""

    def __init__(self, plan: Plan, moves: bool, ids: Tensor | None) -> None:
        """`moves`, `ids`: as in `RoundStart`."""
        self._plan, self._moves, self._ids = plan, moves, None if ids is None else ids[None]
        self._rows = self._steps = 0
        self._known: dict[Bucket, _Step] = {}

    def run(
        self, start: RoundStart, cache: KVCache, states: Tensor, rules: Seq[Rule], stops: Seq[Stop]
    ) -> Drawn:
        """Raises ValueError for a stop that does not say what a confidence is worth."""
        ends = Ends(stops)
        count, steps = len(start.tokens), max(stop.limit for stop in stops)
        numbers = start.tokens, start.positions, start.slots
        rows = ForwardBatch.of(numbers, list(range(count + 1)), _no_tensors)
        bucket = self._reaching(self._plan.load(rows, cache), start, steps if self._moves else 1)
        self._reserve(bucket.rows, steps)
        self._upload(rules, bucket.rows)
        self._begin(bucket, states, start.first)
        return self._steps_of(ends, bucket, count, steps, lambda step: bool(step) or start.first is None)

    def _steps_of(
        self, ends: Ends, bucket: Bucket, count: int, steps: int, prepare: Callable[[int], bool]
    ) -> Drawn:
        """All steps, as far as `ends` lets the rows; `prepare` says of each whether it is to be enqueued."""
        done, piece = 0, PIECE if any(stop.chance for stop in ends.stops) else steps
        while done < steps:
            until = min(done + piece, steps)
            for step in range(done, until):
                if prepare(step):
                    self._enqueue(bucket)
            read = self._log[done:until].cpu()  # the one read
            tokens, sure = read[:, 0, :count].tolist(), read[:, 1, :count].view(torch.float32).tolist()
            for own, confidence in zip(tokens, sure, strict=True):
                if not ends.take(own, confidence):
                    return ends.drawn
            done = until
        return ends.drawn

    def _reaching(self, bucket: Bucket, start: RoundStart, steps: int) -> Bucket:
        """The bucket with programs for all keys that any of the steps reads."""
        if steps == 1 or not bucket.few:
            return bucket
        runs, last = [0, 2], steps - 1
        sections = []
        for reach, least in zip(self._plan.reaches, bucket.sections, strict=True):
            spans = [sections_of(runs, [p, p + last], reach) for p in start.positions]
            sections.append(max(least, power(max(spans))))
        return Bucket(bucket.rows, bucket.tiles, tuple(sections), bucket.further)

    def _reserve(self, rows: int, steps: int) -> None:
        """Have room for so many rows and steps."""
        if rows <= self._rows and steps <= self._steps:
            return
        self._rows, self._steps = max(rows, self._rows, 8), max(steps, self._steps, 16)
        self._known.clear()
        device = self._plan.device
        self._drawer = Drawer(self._rows, self._scored().width, device)
        self._rules = torch.zeros(self._rows, WORDS, dtype=torch.int64, device=device)
        self._log = torch.zeros(self._steps, 2, self._rows, dtype=torch.int32, device=device)

    def _scored(self) -> Ref:
        """The result that a token is drawn from."""
        return self._plan.lowered.results[-2]

    def _upload(self, rules: Seq[Rule], rows: int) -> None:
        """Also of rows that only fill the bucket: each step counts theirs up, too, and with it where it notes a token."""
        words = encode([*rules, *[_IDLE] * (rows - len(rules))]).reshape(-1).view(np.int32)
        staging = self._plan.staging
        staging.take(len(words)).numpy()[: len(words)] = words
        staging.send(self._rules.view(-1).view(torch.int32), len(words))

    def _begin(self, bucket: Bucket, states: Tensor, first: Tensor | None) -> None:
        """The states that the first step reads; with `first` that is the second one, after a draw from these scores."""
        hidden = self._plan.lowered.givens["hidden"]
        context = self._plan.held(bucket).context
        if first is not None:
            hidden.rows(len(states)).copy_(states)
            self._drawer.enqueue(Logits(first, self._ids), self._rules[: len(first)])
            self._advance(context, len(first), hidden, moves=False)
            return
        chain.gather_kernel[bucket.rows, triton.cdiv(hidden.width, _BLOCK)](
            states,
            context.meta("slots"),
            hidden.data,
            hidden.width,
            states.stride(0),
            hidden.stride,
            B=_BLOCK,
        )

    def _enqueue(self, bucket: Bucket) -> None:
        """One step: replay what was captured, capture, or launch kernel by kernel."""
        held = self._plan.held(bucket)
        step = self._known.get(bucket)
        if step is None or step.held is not held:
            step = self._known[bucket] = _Step(held)
        step.uses += 1
        if step.captured is None and step.uses > 1 and not step.failed:
            step.captured = self._plan.captured(
                lambda: self._launch(bucket), f"a draft step of {bucket.rows} rows"
            )
            step.failed = step.captured is None
        if step.captured is None:
            self._launch(bucket)
        else:
            step.captured()

    def _launch(self, bucket: Bucket) -> None:
        plan, rows = self._plan, bucket.rows
        plan.launch(bucket)
        *first, scores, _ = plan.lowered.results
        ids = first[0].rows(rows) if first else self._ids
        self._drawer.enqueue(Logits(scores.rows(rows), ids), self._rules[:rows])
        self._advance(plan.held(bucket).context, rows, plan.lowered.results[-1], moves=self._moves)

    def _advance(self, context: Context, rows: int, after: Ref, *, moves: bool) -> None:
        hidden = self._plan.lowered.givens["hidden"]
        chain.advance_kernel[rows, triton.cdiv(hidden.width, _BLOCK)](
            after.data, hidden.data, context.meta("tokens"), context.meta("positions"), context.meta("ends"),
            self._drawer.tokens, self._drawer.confidence, self._rules, self._log,
            hidden.width, after.stride, hidden.stride, self._rows, int(moves), B=_BLOCK,
        )  # fmt: skip


class Chain(Round):
    """The tokens of blocks over one plan: a step without K/V, see `ChainStart`."""

    def __init__(self, plan: Plan, start: ChainStart) -> None:
        super().__init__(plan, False, start.ids)
        self._sure, self._state = start.sure, start.state

    def chain(self, start: ChainStart, rules: Seq[Rule], stops: Seq[Stop]) -> Drawn:
        """Raises ValueError for a stop that does not say what a confidence is worth."""
        count, steps = len(start.tokens), max(stop.limit for stop in stops)
        numbers = start.tokens, [0] * count, [0] * count
        bucket = self._plan.load(ForwardBatch.of(numbers, list(range(count + 1)), _no_tensors), None)
        self._plan.held(bucket)
        self._reserve(bucket.rows, steps)
        self._upload(rules, bucket.rows)
        givens = self._plan.lowered.givens
        if self._state:
            givens["state"].rows(count).zero_()
        fed = {name: start.given[name] for name in givens if name != "state"}

        def feed(step: int) -> bool:
            for name, value in fed.items():
                givens[name].rows(count).copy_(value.view(count, -1, value.shape[1])[:, step])
            return True

        return self._steps_of(Ends(stops), bucket, count, steps, feed)

    def _scored(self) -> Ref:
        return self._plan.lowered.results[0]

    def _launch(self, bucket: Bucket) -> None:
        plan, rows, results = self._plan, bucket.rows, self._plan.lowered.results
        plan.launch(bucket)
        self._drawer.enqueue(Logits(results[0].rows(rows), self._ids), self._rules[:rows])
        if self._sure:
            sure = torch.sigmoid(results[1].rows(rows)[:, 0].float())
            self._drawer.confidence[:rows].copy_(torch.nan_to_num(sure / (2.0 - sure)))  # as `shared_chance`
        after, state = (
            (results[-1], plan.lowered.givens["state"]) if self._state else (results[0], results[0])
        )
        context, width = plan.held(bucket).context, self._state
        chain.advance_kernel[rows, max(triton.cdiv(width, _BLOCK), 1)](
            after.data, state.data, context.meta("tokens"), context.meta("positions"), context.meta("ends"),
            self._drawer.tokens, self._drawer.confidence, self._rules, self._log,
            width, after.stride, state.stride, self._rows, 0, B=_BLOCK,
        )  # fmt: skip


def fits(plan: Plan, start: RoundStart) -> bool:
    """Whether a recording is one step of a draft round, which begins with states or scores that are there."""
    return (
        start.lead is None and len(plan.lowered.results) in (2, 3) and set(plan.lowered.givens) == {"hidden"}
    )


def _no_tensors(numbers: object) -> tuple[Tensor, Tensor, Tensor]:
    raise AssertionError("a plan reads the numbers of its rows")
