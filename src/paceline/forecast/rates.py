"""Times on the device that computes, by its own events on a GPU and by the clock on a CPU; and how fast it reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

GROUP = 0.02  # seconds that a group of calls should take, so that the end of one hides the launch of the next
READ = 2 << 30  # bytes that the bandwidth of a GPU is measured with, many times its cache


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


def read_bandwidth(megabytes: int = 256, seconds: float = 0.6) -> float:
    """Bytes per second that a sum over a large float32 array reads, the best of what fits in `seconds`."""
    data = torch.ones(megabytes * 262144, dtype=torch.float32)
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        data.sum()
        best = max(best, data.nbytes / (time.perf_counter() - begin))
    return best


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
