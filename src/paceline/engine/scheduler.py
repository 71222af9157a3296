"""Which sequences take part in the next step, and with how many tokens. Host integers only: no torch.

Rows that decode always take part. Prefill fills what the step's token budget leaves, in small chunks while others
decode, in smaller ones where such steps take long (pace.py), so that a long prompt cannot starve them.
First come, first served; the newest is preempted first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from paceline.core import Sequence
from paceline.engine.pace import Pace


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Feed the first `count` pending tokens of a sequence. `last`: they are all, so a token is sampled after them."""

    sequence: Sequence
    count: int
    last: bool


class Scheduler:
    def __init__(
        self, *, max_batch: int, step_tokens: int, prefill_chunk: int, pace: Pace | None = None
    ) -> None:
        """Most prompt tokens of a step: `step_tokens` where nothing decodes, else `prefill_chunk` or as `pace` says."""
        self.max_batch, self.step_tokens, self.prefill_chunk = max_batch, step_tokens, prefill_chunk
        self.pace = pace
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._leaders: dict[int, Sequence] = {}  # sequence id -> the sibling whose prompt pages it waits for

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence, leader: Sequence | None = None) -> None:
        """Queue a sequence. With a `leader` it waits until that one's prompt is in the cache, to share it."""
        self.waiting.append(sequence)
        if leader is not None:
            self._leaders[sequence.id] = leader

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that is finished or cancelled."""
        self._leaders.pop(sequence.id, None)
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue; its K/V are computed again later."""
        self.running.remove(sequence)
        sequence.committed = 0
        self.waiting.appendleft(sequence)

    def plan(self, admit: Callable[[Sequence], bool], most: Callable[..., int]) -> list[ScheduledChunk]:
        """The next step. `admit` opens a sequence if there is room, `most` says how long its chunk is."""
        decoding = [s for s in self.running if len(s.tokens) - s.committed == 1]
        work = [ScheduledChunk(s, 1, True) for s in decoding]
        left = self._beside if decoding else self.step_tokens
        for sequence in self.running:
            pending = len(sequence.tokens) - sequence.committed
            if pending > 1 and left > 0:
                count = most(sequence, min(pending, left))
                work.append(ScheduledChunk(sequence, count, count == pending))
                left -= count
        while left > 0 and len(self.running) < self.max_batch:
            newcomer = self._next_waiting()
            if newcomer is None or not admit(newcomer):
                break
            self.waiting.remove(newcomer)
            self._leaders.pop(newcomer.id, None)
            self.running.append(newcomer)
            pending = len(newcomer.tokens) - newcomer.committed
            count = most(newcomer, min(pending, left))
            work.append(ScheduledChunk(newcomer, count, count == pending))
            left -= count
        return work

    @property
    def _beside(self) -> int:
        """Tokens of prompts in a step in which others decode."""
        return self.prefill_chunk if self.pace is None else self.pace.rows(self.prefill_chunk)

    def _next_waiting(self) -> Sequence | None:
        for sequence in self.waiting:
            leader = self._leaders.get(sequence.id)
            if leader is None or leader.committed >= leader.prompt_len or not self._alive(leader):
                return sequence
        return None

    def _alive(self, sequence: Sequence) -> bool:
        return sequence in self.running or sequence in self.waiting
