"""DFlash (a block of masked positions drafted in one forward), differentiable, for all rounds of a text at once.

Entry p holds keys and values of the target's states of row p. A round with token t pending sees the entries before t
and the rows of its own block: token t, then masks at the positions behind it. These see each other. Parameters carry the
names of the `speculators` format: export is a plain dump.
"""

from __future__ import annotations

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.models.drafters.dflash import DFlashConfig
from paceline.models.layers.decoder_config import DecoderConfig
from paceline.train.methods.own_kv import Attention, FeedForward
from paceline.train.parallel import Captured, DraftModule, Norm, seen_keys


class BlockAttention(Attention):
    def over(
        self, x: torch.Tensor, positions: torch.Tensor, entries: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor
    ) -> torch.Tensor:  # fmt: skip
        """x [B, A, K, hidden] at positions [B, A, K], over K and V [B, kv_heads, T, d] of all entries, of which `mask`
        [B, 1, A, T] lets some be seen, and over its own block -> as x.
        """
        (batch, rounds, size, _), (k0, v0) = x.shape, entries
        count, shape = k0.shape[2], (batch, self.kv_heads, -1, rounds, size, self.head_dim)
        flat, places = x.flatten(1, 2), positions.flatten(1, 2)
        q = self.queries(flat, places).view(shape)
        k, v = (part.view(shape) for part in self.keys(flat, places))
        far = (q.flatten(2, 4) @ k0.mT).view(*q.shape[:-1], count).float()
        far = far.masked_fill(~mask[:, :, None, :, None], -torch.inf)
        shares = torch.cat([far, (q @ k.mT).float()], -1).softmax(-1).to(q.dtype)
        out = (shares[..., :count].flatten(2, 4) @ v0).view(q.shape) + shares[..., count:] @ v
        mixed: torch.Tensor = self.o_proj(out.permute(0, 3, 4, 1, 2, 5).flatten(3))
        return mixed


class Layer(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.eps)
        self.self_attn = BlockAttention(config, config.hidden_size)
        self.post_attention_layernorm = Norm(config.hidden_size, config.eps)
        self.mlp = FeedForward(config)


class DFlashModule(DraftModule):
    """A trainable DFlash drafter."""

    unscaled = 1.0  # what the captured embeddings are multiplied with

    def __init__(
        self, config: DFlashConfig, ids: torch.Tensor | None, head: torch.Tensor | None, mask: torch.Tensor
    ) -> None:
        """ids, head: as `Eagle3Module`. mask [H]: the target's embedding of the mask token, which stays as it is."""
        super().__init__()
        layers, wide = config.layers, len(config.taps) * config.target_hidden_size
        self.config, self.vocab, self.taps = config, layers.vocab_size, config.taps
        self.kind = f"dflash {config.taps} {config.block} {config.mask} {config.first}"
        self.fc = nn.Linear(wide, layers.hidden_size, bias=False)
        self.hidden_norm, self.norm = (Norm(layers.hidden_size, layers.eps) for _ in range(2))
        self.layers = nn.ModuleList([Layer(layers) for _ in layers.kinds])
        if head is None:
            self.lm_head = nn.Linear(layers.hidden_size, config.draft_vocab, bias=False)
        self.register_buffer("shared_head", head, persistent=False)
        self.register_buffer("mask_row", mask, persistent=False)
        self.register_buffer("d2t", None if ids is None else ids - torch.arange(len(ids)))
        self.register_buffer("drafted", ids, persistent=False)
        self.shared_head: torch.Tensor | None
        self.mask_row: torch.Tensor
        self.drafted: torch.Tensor | None

    @property
    def head(self) -> torch.Tensor:
        return self.lm_head.weight if self.shared_head is None else self.shared_head

    @property
    def ids(self) -> torch.Tensor | None:
        return self.drafted

    @property
    def most(self) -> int:
        """Tokens that a block can draft."""
        return self.config.block - self.config.first

    def unroll(self, captured: Captured, anchors: torch.Tensor, steps: int) -> list[torch.Tensor]:
        if steps > self.most:
            raise UsageError(f"--draft-tokens {steps}: the blocks of this drafter hold {self.most} at most")
        assert captured.states is not None, "the teacher taps the target where the module reads it"
        rows, mask = (
            torch.arange(anchors.shape[0], device=anchors.device)[:, None],
            seen_keys(captured, anchors),
        )
        entries = self.hidden_norm(self.fc(captured.states.to(self.fc.weight.dtype)))
        token = (captured.embeddings[rows, anchors] * self.unscaled).to(entries.dtype)[:, :, None]
        masks = self.mask_row.to(entries.dtype).expand(*anchors.shape, self.config.block - 1, -1)
        ahead = torch.arange(self.config.block, device=anchors.device)
        x, positions = torch.cat((token, masks), 2), captured.positions[rows, anchors][..., None] + ahead
        for layer in self.layers:
            assert isinstance(layer, Layer), "all are"
            own = layer.self_attn.keys(entries, captured.positions)
            x = x + layer.self_attn.over(layer.input_layernorm(x), positions, own, mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        first = self.config.first
        return list(self.norm(x)[:, :, first : first + steps].unbind(2))
