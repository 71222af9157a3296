"""Times on the device that computes: by its own events on a GPU, by the clock on a CPU. And what a step launches."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from paceline.bench.meters import read_bandwidth
from paceline.core import ForwardBatch
from paceline.engine.engine import Engine
from paceline.models.target import GraphTarget

GROUP = 0.02  # seconds that a group of calls should take, so that the end of one hides the launch of the next
READ = 2 << 30  # bytes that the bandwidth of a GPU is measured with, many times its cache
_FIRST = -1000  # ids of sequences of ours; the engine's own count from 0


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_each(call: Callable[[], object], device: torch.device, budget: float = 0.3) -> float:
    """Median seconds of a call where many follow each other: of the device, unless the host is slower."""
    alone = seconds_alone(call, device, budget / 3, least=2)
    count = max(1, min(200, round(GROUP / alone)))
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 100):
        times.append(_group(call, device, count))
    return median(times)


def _group(call: Callable[[], object], device: torch.device, count: int) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - begin) / count
    first: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    last: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    first.record()
    for _ in range(count):
        call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / count


def seconds_alone(
    call: Callable[[], object], device: torch.device, budget: float = 0.3, least: int = 3
) -> float:
    """Median seconds of a call that is waited for, its launch included. Two calls before it do not count."""
    for _ in range(2):
        call()
    synchronize(device)
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < least or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return median(times)


def read_rate(device: torch.device) -> float:
    """Bytes per second that the device reads at best: sums and a matrix times a vector, over far more than it caches."""
    if device.type != "cuda":
        return read_bandwidth()
    free = torch.cuda.mem_get_info(device)[0]
    rows = max(1, min(READ, free // 4) >> 17)
    data = torch.empty(rows, 1 << 16, dtype=torch.bfloat16, device=device).normal_()
    return float(data.nbytes / min(seconds_each(call, device, 0.15) for call in readers(data)))


def readers(data: Tensor) -> tuple[Callable[[], object], ...]:
    """Calls that read all of `data` [N, M] bfloat16 and write next to nothing."""
    x, wide = torch.ones(data.shape[1], dtype=data.dtype, device=data.device), data.view(torch.int32)
    return (lambda: torch.mv(data, x), wide.max, wide.view(-1).sum)


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
