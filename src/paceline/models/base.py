"""What the engine asks of a target, and what it asks of an MTP drafter's network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.core import ForwardBatch
from paceline.kv.cache import KVCache, StoreType
from paceline.kv.layout import Layout
from paceline.ops.base import Drawn, RoundStart, Rule, Stop


class Target(Protocol):
    """A causal language model over a paged K/V cache. Holds no state of any sequence."""

    layout: Layout
    vocab_size: int
    readable: (
        int  # tokens below are read and written; fewer than vocab_size where a table was not resized with it
    )
    hidden_size: int
    max_len: int  # positions that the model was made for
    eos_token_ids: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype  # of activations
    kv_dtype: StoreType  # of the K/V cache

    def forward(self, rows: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """Write the rows' K/V into `cache` and return hidden states after the final norm, [N, hidden_size]."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, hidden_size] -> [M, vocab_size], float32, soft-capped."""
        ...


@dataclass(slots=True)
class HeadOutput:
    """A drafter's scores: dense (ids None, logits [B, V]) or of a few candidates (ids [B, C], logits [B, C])."""

    logits: torch.Tensor
    ids: torch.Tensor | None
    hidden: torch.Tensor  # [B, target hidden_size], feeds the next draft step


class AssistantNet(Protocol):
    """The Gemma 4 assistant: Q-only layers over the target's K/V."""

    def step(self, rows: ForwardBatch, hidden: torch.Tensor, cache: KVCache) -> HeadOutput:
        """One draft step for B rows: rows.tokens the last tokens [B], rows.positions constant over a round."""
        ...

    def draft_round(
        self, start: RoundStart, states: torch.Tensor, cache: KVCache, rules: list[Rule], stops: list[Stop]
    ) -> Drawn | None:
        """A whole round with its draws in one go, each row as far as its stop says; None where that is not possible."""
        ...


def rows_of(hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """hidden[rows], which torch would copy with threads of its own for a few kilobytes. They spin for milliseconds after
    it, where those of the next forward have to run: steps of 16 texts took half as long again.
    """
    return hidden.index_select(0, torch.tensor(rows, device=hidden.device))
