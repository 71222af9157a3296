"""What drafters ask of a network: the one of Gemma 4's assistant, and those that read hidden states of the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.core import ForwardBatch
from paceline.kv.cache import KVCache
from paceline.ops.base import ChainStart, Drawn, Lead, RoundStart, Rule, Stop

FINAL = -1  # a tap: hidden states after the final norm


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


class TappedNet(Protocol):
    """A small network with K/V of its own that reads hidden states of the target: entry p holds the states of row p and
    tokens up to p + `shift`.
    """

    taps: tuple[int, ...]  # the states it reads, side by side: after that many layers of the target, or FINAL
    ids: torch.Tensor | None  # [C] the tokens that its scores are of; None: all
    shift: int
    parallel: int  # tokens that it drafts of one row, side by side; 0: it works as `shift` says
    device: torch.device


class StateNet(TappedNet, Protocol):
    """One that drafts token by token, each from its own state for the one before: `shift` is 1."""

    def absorb(
        self, rows: ForwardBatch, states: torch.Tensor, cache: KVCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write K/V of rows [N] whose `states` [N, width] the target has computed.

        Returns what `step` and what `logits` take for each of them, both [N, H].
        """
        ...

    def feed(self, rows: ForwardBatch, states: torch.Tensor, cache: KVCache) -> None:
        """Write the same K/V, and compute nothing else that is not needed for them."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, H] -> [M, C]"""
        ...

    def step(
        self, rows: ForwardBatch, hidden: torch.Tensor, cache: KVCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One more token of a draft, from the network's own state [B, H]: (logits [B, C], state of the next step)."""
        ...

    def draft_round(
        self, start: RoundStart, states: torch.Tensor, cache: KVCache, rules: list[Rule], stops: list[Stop]
    ) -> Drawn | None:
        """All `step`s of a round with their draws in one go; None where that is not possible."""
        ...

    def lead(self, rows: ForwardBatch, last: list[int]) -> Lead:
        """That `draft_round` shall begin with `absorb` of `rows`, and `logits` of those `last`."""
        ...


class SeeingNet(StateNet, Protocol):
    """One that may take soft tokens (`ForwardBatch.media`) in place of embeddings in `absorb`."""

    sees: bool  # whether it does


class ChainNet(TappedNet, Protocol):
    """One of `shift` stages with K/V of their own, of which each drafts one token: stage k reads what stage k - 1 gives
    for row p beside token p + k.
    """

    def stage(self, depth: int, rows: ForwardBatch, states: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Write a stage's K/V of rows [N] from the states [N, H] that the one before gives for them; its own [N, H]."""
        ...

    def stage_logits(self, depth: int, hidden: torch.Tensor) -> torch.Tensor:
        """[M, H] -> [M, C], scores of the token at this depth."""
        ...


class BlockNet(TappedNet, Protocol):
    """One that drafts a block in one forward: `shift` is 0, since no token goes into an entry."""

    block: int  # rows of a block: the text's last token, and `mask`s
    mask: int
    first: int  # the row that gives the first token of a draft

    def absorb(self, rows: ForwardBatch, states: torch.Tensor, cache: KVCache) -> None:
        """Write K/V of rows [N] whose `states` [N, width] the target has computed."""
        ...

    def block_states(self, rows: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """Of whole blocks of rows [N] what `logits` takes, [N, H]."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, H] -> [M, C]"""
        ...


class ChainedNet(BlockNet, Protocol):
    """A block whose tokens are scored one after the other, each beside the one before it."""

    chained: bool  # whether it does; else it is a `BlockNet`
    confident: bool  # `chain` gives confidences
    state_width: int  # of what a step hands to the next one; 0: nothing

    def chain(
        self, tokens: ForwardBatch, given: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """One step of N blocks: of the tokens before, `base` (what `logits` gives), `hidden` (what it takes) and `state`
        the scores [N, C], the logit of a confidence [N, 1], the next state.
        """
        ...

    def chain_round(self, start: ChainStart, rules: list[Rule], stops: list[Stop]) -> Drawn | None:
        """All steps of a round with their draws in one go; None where that is not possible."""
        ...


class PathNet(BlockNet, Protocol):
    """A block of whose `top_k` best tokens of each row one is chosen, by how well it follows the one before it, too."""

    top_k: int

    def projected(self, hidden: torch.Tensor) -> torch.Tensor:
        """What `follows` takes of [M, H], on the host."""
        ...

    def follows(self, before: int, projected: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """What is added to the scores of `tokens` [K] after the token `before`, by a row of `projected`; [K]."""
        ...


class SlotsNet(StateNet, Protocol):
    """One that drafts side by side: each further token from a row of `mask` and `mask_states` behind the text's own."""

    mask: int
    mask_states: torch.Tensor  # [1, width]

    def look(self, rows: ForwardBatch, states: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Write K/V of rows [N] with their `states` [N, width]; what `logits` takes [N, H]."""
        ...


class ParallelNet(TappedNet, Protocol):
    """One of heads side by side over the same states: `shift` is 1, though no token goes into an entry, so that the row
    before a text's last token is always given.
    """

    def feed(self, rows: ForwardBatch, states: torch.Tensor, cache: KVCache) -> None:
        """Write all heads' K/V of rows [N] whose `states` [N, width] the target has computed."""
        ...

    def look(self, rows: ForwardBatch, states: torch.Tensor, cache: KVCache) -> tuple[torch.Tensor, ...]:
        """The same, and what `logits` takes [N, H] of each head, that for the nearest token first."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, H] -> [M, C]"""
        ...
