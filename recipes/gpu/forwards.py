"""Forwards of an idle engine, one by one, and what a call sends to a GPU."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch.autograd import DeviceType

from paceline.core import ForwardBatch
from paceline.engine.engine import Engine
from paceline.forecast.rates import synchronize
from paceline.models.target import GraphTarget

_FIRST = -1000  # ids of sequences of ours; the engine's own count from 0


class Launches(NamedTuple):
    """What a call sends to a GPU."""

    kernels: int
    reads: int  # copies to the host


def launches(call: Callable[[], object], device: torch.device) -> Launches | None:
    """Counted by the profiler, kernels of replayed graphs included. None on a CPU, or where nothing is traced."""
    if device.type != "cuda":
        return None
    call()
    synchronize(device)
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        call()
        synchronize(device)
    return counted([event.name for event in profile.events() if event.device_type == DeviceType.CUDA])


def counted(names: Seq[str]) -> Launches | None:
    """Of what the profiler saw on a device."""
    copies = [name for name in names if name.startswith(("Memcpy", "Memset"))]
    return Launches(len(names) - len(copies), sum("DtoH" in name for name in copies)) if names else None


class Forwards:
    """Forwards of texts that have `context` tokens in the cache of an idle engine, random numbers as their K/V."""

    def __init__(self, engine: Engine, context: int, texts: int = 1) -> None:
        self.engine, self.context, self._ids = engine, context, [_FIRST - i for i in range(texts)]
        state = engine.state
        assert isinstance(state.target, GraphTarget), "what an assembled engine loads"
        self.target, self.cache, self.device = state.target, state.cache, state.target.device
        for store in (*self.cache.k, *self.cache.v):
            if store.is_floating_point():
                store.normal_()
        for sequence in self._ids:
            self.cache.open(sequence, self._tokens(context), share=False)
            done = 0
            while done < context:  # so that pages out of a window's reach are given back on the way
                part = self._tokens(context)[done : done + 512]
                with self.cache.tail([(sequence, part)]) as tail:
                    tail.commit([len(part)])
                done += len(part)

    def _tokens(self, count: int) -> list[int]:
        return [(37 * i) % (self.target.vocab_size - 10) + 5 for i in range(count)]

    def rows(self, count: int) -> ForwardBatch:
        """The next `count` tokens of each text. Valid until other rows are asked for."""
        items = [(sequence, self._tokens(count)) for sequence in self._ids]
        with self.cache.tail(items) as tail:
            return tail.rows(self.device)

    def step(self, count: int) -> Callable[[], object]:
        """A call that computes them, logits of all of them included."""
        rows = self.rows(count)
        return lambda: self.target.logits(self.target.forward(rows, self.cache))

    def prompt(self, count: int) -> Callable[[], object]:
        """The same with logits of the last one only."""
        rows = self.rows(count)
        return lambda: self.target.logits(self.target.forward(rows, self.cache)[-1:])

    def close(self) -> None:
        for sequence in self._ids:
            self.cache.close(sequence)
