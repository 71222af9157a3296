"""What the functions of a step share: the models, the cache, and the texts that are alive."""

from __future__ import annotations

import time
from ctypes import memmove
from dataclasses import dataclass, field
from typing import Literal

import torch

from paceline.control.base import DraftPolicy
from paceline.core import Delta, ForwardBatch, Sequence
from paceline.drafters import guard
from paceline.drafters.base import Drafter
from paceline.engine.forced import ForcedAcceptance
from paceline.engine.request import RequestState
from paceline.engine.scheduler import Scheduler
from paceline.kv.cache import KVCache
from paceline.kv.pages import OutOfPages
from paceline.models.base import Target, put_rows, rows_of
from paceline.models.drafters.base import FINAL
from paceline.soft_tokens import content_keys, whole_runs
from paceline.tree import Shape


@dataclass(slots=True, eq=False)
class EngineState:
    target: Target
    cache: KVCache
    drafters: dict[str, Drafter]
    policy: DraftPolicy
    scheduler: Scheduler
    max_len: int
    draft_tokens: int | Literal["auto"]
    share_prefixes: bool
    requests: dict[int, RequestState] = field(default_factory=dict)  # by sequence id
    hidden: torch.Tensor | None = None  # [max_sequences, H] the target's last hidden state, by cache slot
    hidden_at: dict[int, int] = field(default_factory=dict)  # slot -> the text position it belongs to
    failures: list[Delta] = field(default_factory=list)
    forced: ForcedAcceptance | None = None  # benchmarks only: see engine/forced.py
    commits: bool = False  # some drafter's `on_commit` is called,
    taps: bool = False  # with more than the states after the final norm
    observes: bool = False  # some drafter's `on_verify` is called
    tree: Shape | None = None  # of drafts, where drafter and cache can branch
    preemptions: int = 0
    steps: int = 0

    def __post_init__(self) -> None:
        wanted = {tap for drafter in self.drafters.values() for tap in drafter.taps}
        self.commits, self.taps = bool(wanted), bool(wanted - {FINAL})
        self.observes = any(drafter.observes for drafter in self.drafters.values())

    def most(self, sequence: Sequence, count: int) -> int:
        """How many of the next `count` tokens of a text belong in one forward."""
        count = self.cache.most(sequence.id, count)
        return whole_runs(sequence.media, sequence.committed, count) if sequence.media else count

    def look(self, rows: ForwardBatch) -> tuple[torch.Tensor, ...]:
        """Hidden states [N, H] of the rows: after the final norm, then after each tapped layer."""
        return self.target.states(rows, self.cache) if self.taps else (self.target.forward(rows, self.cache),)

    def admit(self, sequence: Sequence) -> bool:
        """Open a sequence in the cache, sharing a known prefix; False when there is no room yet."""
        if self.cache.open_sequences and not self.cache.fits(len(sequence.tokens) + 1):
            return False
        request = self.requests[sequence.id]
        drafter = self.drafter_of(request)
        tapping = drafter if drafter is not None and drafter.taps else None
        most = None if tapping is None else guard.begin(tapping, sequence, request.parked)
        try:
            keys = content_keys(sequence.tokens, sequence.media) if sequence.media else None
            share = self.share_prefixes and not (request.pool is not None and request.pool.wants_all)
            known = self.cache.open(
                sequence.id, sequence.tokens, sequence.salt, share=share, most=most, keys=keys
            )
        except OutOfPages:
            if tapping is not None:
                tapping.forget(sequence.id)
            return False
        sequence.committed = known
        if not request.admitted:
            request.admitted = time.perf_counter()
            request.stats.cached_prompt_tokens = known
        return True

    def drafter_of(self, request: RequestState) -> Drafter | None:
        """The network that drafts for a text, if its request asked for one and it has not failed."""
        name = request.network
        return None if name is None or name in request.parked else self.drafters.get(name)

    def keep_hidden(self, slots: list[tuple[int, int]], hidden: torch.Tensor, rows: list[int]) -> None:
        """Remember hidden[rows] for cache slots, given as (slot, text position of the row)."""
        if self.hidden is None or not rows:
            return
        self.hidden_at.update(slots)
        buffer = self.hidden
        if hidden.is_cpu and hidden.dtype is buffer.dtype and hidden.stride(1) == 1:
            size = (
                buffer.element_size()
            )  # a kilobyte or two: torch would take thirty microseconds to move them
            width, stride = buffer.shape[1] * size, hidden.stride(0) * size
            to, source = buffer.data_ptr(), hidden.data_ptr()
            for (slot, _), row in zip(slots, rows, strict=True):
                memmove(to + slot * width, source + row * stride, width)
            return
        put_rows(buffer, [slot for slot, _ in slots], rows_of(hidden, rows))

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's pages; it is computed again when there is room."""
        self.release(sequence)
        self.scheduler.preempt(sequence)
        self.preemptions += 1

    def release(self, sequence: Sequence, *, scrub: bool = False) -> None:
        """Free the cache and the drafters' memory of a running sequence."""
        self.hidden_at.pop(self.cache.slot(sequence.id), None)
        self.cache.close(sequence.id, scrub=scrub)
        for drafter in self.drafters.values():
            drafter.forget(sequence.id)

    def end(self, request: RequestState, *, scrub: bool = False) -> None:
        """Forget a text that is finished, cancelled or failed."""
        sequence = request.sequence
        if sequence in self.scheduler.running:
            self.release(sequence, scrub=scrub)
        self.scheduler.remove(sequence)
        self.policy.forget(sequence.id)
        del self.requests[sequence.id]

    def fail(self, request: RequestState, error: str, *, scrub: bool = False) -> None:
        """End one text with an error; its neighbours are untouched."""
        request.stats.seconds = time.perf_counter() - request.submitted
        self.end(request, scrub=scrub)
        name, index, stats = request.request_id, request.index, request.stats
        self.failures.append(Delta(name, index, "", [], [], finish_reason="error", stats=stats, error=error))

    def take_failures(self) -> list[Delta]:
        failures, self.failures = self.failures, []
        return failures
