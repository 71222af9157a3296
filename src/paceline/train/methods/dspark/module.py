"""DSpark, differentiable: DFlash's block, whose rows are scored beside the text's own token before (teacher forcing).

A state is a row of the block and W1's row of the token before, side by side; the head has W2 beside it. So a score is one
product, as the loss wants it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from paceline.models.drafters.dspark import DSparkConfig
from paceline.train.methods.dflash.module import DFlashModule
from paceline.train.parallel import Captured


class MarkovHead(nn.Module):
    def __init__(self, vocab: int, draft_vocab: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab, bias=False)


class ConfidenceHead(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)


class DSparkModule(DFlashModule):
    """A trainable DSpark drafter with a Markov head of the kind `vanilla` and a confidence head."""

    def __init__(
        self, config: DSparkConfig, ids: torch.Tensor | None, head: torch.Tensor | None, mask: torch.Tensor
    ) -> None:
        """As `DFlashModule`. A head of its own is a copy that stays as it is."""
        super().__init__(config.block, ids, head, mask)
        layers = config.block.layers
        self.kind = f"dspark {self.kind} {config.rank}"
        self.markov_head = MarkovHead(layers.vocab_size, config.block.draft_vocab, config.rank)
        self.confidence_head = ConfidenceHead(layers.hidden_size + config.rank)
        if head is None:
            self.lm_head.requires_grad_(False)

    @property
    def head(self) -> torch.Tensor:
        """[C, H + rank]"""
        return torch.cat((super().head, self.markov_head.markov_w2.weight), 1)

    @property
    def outside(self) -> list[torch.Tensor]:
        return [*self.markov_head.parameters(), *self.confidence_head.parameters()]

    def unroll(self, captured: Captured, anchors: torch.Tensor, steps: int) -> list[torch.Tensor]:
        rows = torch.arange(anchors.shape[0], device=anchors.device)[:, None]
        states = super().unroll(captured, anchors, steps)
        before = [self.markov_head.markov_w1(captured.tokens[rows, anchors + i]) for i in range(steps)]
        return [torch.cat((h, e.to(h.dtype)), -1) for h, e in zip(states, before, strict=True)]

    def sureness(self, states: torch.Tensor) -> torch.Tensor:
        """Of states [M, H + rank] the logit [M] that a token drawn from such scores is kept."""
        proj = self.confidence_head.proj
        return F.linear(states.float(), proj.weight, proj.bias)[:, 0]
