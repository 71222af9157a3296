"""Small values on their way to a device: to a GPU out of pinned memory, so that nobody waits for what it computes."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch


def upload(values: Seq[int], device: torch.device | str, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A list on `device`."""
    return to_device(torch.tensor(values, dtype=dtype), device)


def to_device(values: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A tensor of the host on `device`."""
    pinned = torch.device(device).type == "cuda" and values.is_cpu
    return values.pin_memory().to(device, non_blocking=True) if pinned else values.to(device)
