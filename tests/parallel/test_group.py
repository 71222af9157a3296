"""The sum over ranks, which are threads here: the same bits at each, added up in the order of the ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from paceline.errors import EngineLost
from paceline.parallel import group as groups
from paceline.parallel.group import MemoryGroup, TorchGroup, join_store, open_store, shared_memory

RANKS = 3
PARTS = [1e8 * torch.randn(300, 700, generator=torch.Generator().manual_seed(r)) ** 3 for r in range(RANKS)]


def by_gloo() -> Callable[[int], Any]:
    first = open_store()

    def make(rank: int) -> TorchGroup:
        group = TorchGroup(rank, RANKS)
        group.connect(first if rank == 0 else join_store(first.port), torch.device("cpu"))
        return group

    return make


def by_memory() -> Callable[[int], Any]:
    file = shared_memory(RANKS)
    if file is None:
        pytest.skip("the native kernels, or files in memory, are not there")
    return lambda rank: MemoryGroup(rank, RANKS, file)


@pytest.mark.parametrize("way", [by_gloo, by_memory])
def test_all_have_the_same_sum_in_the_order_of_the_ranks(way: Callable[[], Callable[[int], Any]]) -> None:
    """Also of rows that lie apart, of one row, and of more than are exchanged at once."""
    make = way()

    def one(rank: int) -> list[torch.Tensor]:
        group, outs = make(rank), []
        for rows in (300, 1, 7, 300, 2):
            x = torch.zeros(rows, 716)[:, :700]
            x.copy_(PARTS[rank][:rows])
            group.add(x)
            outs.append(x)
        return outs

    with ThreadPoolExecutor(RANKS) as pool:
        each = list(pool.map(one, range(RANKS)))
    want = PARTS[0] + PARTS[1] + PARTS[2]
    assert not torch.equal(want, PARTS[2] + PARTS[1] + PARTS[0])  # else the order would not be seen
    for outs in each:
        assert all(torch.equal(x, want[: len(x)]) for x in outs)


def test_a_rank_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is gone is seen within a second, one that hangs after a while."""
    file, other = shared_memory(2), shared_memory(2)
    if file is None or other is None:
        pytest.skip("the native kernels, or files in memory, are not there")
    looked = threading.Event()

    def look() -> None:
        looked.set()
        raise EngineLost("it is gone")

    with pytest.raises(EngineLost, match="it is gone"):
        MemoryGroup(0, 2, file, look).add(torch.zeros(1, 8))
    assert looked.is_set()
    monkeypatch.setattr(groups, "PATIENCE", 0.1)
    with pytest.raises(EngineLost, match="does not answer"):
        MemoryGroup(1, 2, other).add(torch.zeros(1, 8))
