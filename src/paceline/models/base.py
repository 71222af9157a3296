"""What the engine asks of a target, and what it asks of an MTP drafter's network."""

from __future__ import annotations

from typing import Protocol

import torch

from paceline.core import ForwardBatch
from paceline.kv.cache import KVCache
from paceline.kv.layout import Layout
from paceline.kv.store import StoreType
from paceline.ops.uploads import upload


class Cached(Protocol):
    """What has keys and values of its own."""

    layout: Layout
    max_len: int  # positions that it was made for
    device: torch.device
    kv_dtype: StoreType  # of its K/V cache


class Target(Cached, Protocol):
    """A causal language model over a paged K/V cache. Holds no state of any sequence."""

    vocab_size: int
    readable: (
        int  # tokens below are read and written; fewer than vocab_size where a table was not resized with it
    )
    hidden_size: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype  # of activations
    tapped: tuple[int, ...]  # layers after which `states` gives hidden states, too, in order

    def forward(self, rows: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """Write the rows' K/V into `cache` and return hidden states after the final norm, [N, hidden_size]."""
        ...

    def states(self, rows: ForwardBatch, cache: KVCache) -> tuple[torch.Tensor, ...]:
        """What `forward` gives, then the hidden states after each of `tapped` layers, before any norm."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, hidden_size] -> [M, vocab_size], float32, soft-capped."""
        ...


def rows_of(hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """hidden[rows], which torch would copy with threads of its own for a few kilobytes. They spin for milliseconds after
    it, where those of the next forward have to run: steps of 16 texts took half as long again.
    """
    return hidden.index_select(0, upload(rows, hidden.device))


def put_rows(table: torch.Tensor, places: list[int], rows: torch.Tensor) -> None:
    """table[places] = rows, of any dtype"""
    table.index_copy_(0, upload(places, table.device), rows.to(table.dtype))
