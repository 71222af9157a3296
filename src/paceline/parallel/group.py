"""The sum over ranks: through shared memory where the native kernels compute, else by torch.distributed, with gloo over
loopback on CPUs and nccl on GPUs (which nobody has tried yet).

Each rank gathers what all have and adds it up in the order of the ranks. So all have the same bits, which an all-reduce
does not promise, and what a row becomes depends on no other row.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from paceline.errors import EngineLost, UsageError
from paceline.ops.extension import extension

dist: Any = torch.distributed  # much of what is used here has no types
LOOPBACK = "127.0.0.1"
PATIENCE = 60.0  # seconds that ranks wait for each other within a forward


def open_store() -> Any:
    """Where the ranks of this machine find each other; `port` says where it listens. Raises UsageError."""
    if not dist.is_available() or not dist.is_gloo_available():
        raise UsageError(
            "tensor_parallel needs torch.distributed with gloo, which this PyTorch lacks: leave it out"
        )
    return dist.TCPStore(LOOPBACK, 0, None, True, timedelta(seconds=PATIENCE), wait_for_workers=False)


def join_store(port: int) -> Any:
    """The store of rank 0."""
    return dist.TCPStore(LOOPBACK, port, None, False, timedelta(seconds=PATIENCE))


def shared_memory(ranks: int) -> int | None:
    """A file in memory by which ranks of this machine exchange what native kernels compute; None: that is not there."""
    native = extension("exchange")
    if native is None or not hasattr(os, "memfd_create"):
        return None
    file = os.memfd_create("paceline")
    os.ftruncate(file, native.exchange_bytes(ranks))
    return file


class MemoryGroup:
    """Implements `Group` without a message: see native/exchange.h."""

    def __init__(self, rank: int, ranks: int, file: int, look: Callable[[], None] = lambda: None) -> None:
        """`look` raises if it sees that a rank is gone."""
        native = extension("exchange")
        assert native is not None, "it is built for all ranks or for none"
        self.rank, self.ranks, self._look, self._native = rank, ranks, look, native
        memory = mmap.mmap(file, native.exchange_bytes(ranks))
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        self._turn = 0

    def connect(self, store: Any, device: torch.device) -> None:
        """Nothing is to be done."""

    def add(self, x: torch.Tensor) -> None:
        assert x.dtype == torch.float32
        assert x.stride(1) == 1
        most = int(self._native.exchange_slot) // (4 * x.shape[1])
        for first in range(0, len(x), most):
            rows = x[first : first + most]
            self._turn += 1
            self._exchange((rows.data_ptr(), rows.shape[0], rows.shape[1], rows.stride(0)))

    def _exchange(self, rows: tuple[int, int, int, int]) -> None:
        base, end, begin = self._memory.data_ptr(), time.monotonic() + PATIENCE, True
        while not self._native.exchange(base, self.rank, self.ranks, self._turn, rows, begin, 0.2):
            begin = False
            self._look()
            if time.monotonic() > end:
                raise EngineLost("another rank does not answer")


class TorchGroup:
    """Implements `Group`, once `connect` has been called at all ranks. It leaves torch's default group alone."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self._group: Any = None
        self._parts = torch.empty(0)

    def connect(self, store: Any, device: torch.device) -> None:
        """Raises EngineLost if not all come within `PATIENCE`."""
        try:
            if device.type == "cuda":
                self._group = dist.ProcessGroupNCCL(store, self.rank, self.ranks)
                return
            gloo = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=LOOPBACK)]
            options._timeout = timedelta(seconds=PATIENCE)
            self._group = gloo(store, self.rank, self.ranks, options)
        except RuntimeError as error:
            raise EngineLost(f"the ranks cannot connect ({first_line(error)})") from error

    def add(self, x: torch.Tensor) -> None:
        count = x.numel() * self.ranks
        if self._parts.numel() < count or self._parts.dtype != x.dtype:
            self._parts = torch.empty(count, dtype=x.dtype, device=x.device)
        parts = self._parts[:count]
        try:
            self._group._allgather_base(parts, x.contiguous().view(-1)).wait()
        except RuntimeError as error:
            raise EngineLost(f"another rank is gone ({first_line(error)})") from error
        each = parts.view(self.ranks, *x.shape)
        torch.add(each[0], each[1], out=x)
        for part in each[2:]:
            x.add_(part)


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]
