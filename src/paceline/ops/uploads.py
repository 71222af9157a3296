"""Small lists of integers on their way to a device."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch


def upload(values: Seq[int], device: torch.device | str, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """`values` on `device`. A GPU takes them out of pinned memory, so that nobody waits for what it still computes."""
    here = torch.tensor(values, dtype=dtype)
    return (
        here.pin_memory().to(device, non_blocking=True)
        if torch.device(device).type == "cuda"
        else here.to(device)
    )
