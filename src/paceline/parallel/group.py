"""The sum over ranks, by torch.distributed: gloo over loopback on CPUs, nccl on GPUs (which nobody has tried yet).

Each rank gathers what all have and adds it up in the order of the ranks. So all have the same bits, which an all-reduce
does not promise, and what a row becomes depends on no other row.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from paceline.errors import EngineLost, UsageError

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
