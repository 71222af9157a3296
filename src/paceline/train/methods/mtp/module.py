"""One block of multi-token prediction, differentiable: [norm(embedding) ; norm(state)], recycled for further depths.

The hidden state is the target's after its final norm; a further step takes what the head read of the step before.
Parameters carry the names of the `speculators` format: export is a plain dump.
"""

from __future__ import annotations

import torch
from torch import nn

from paceline.models.layers.decoder_config import DecoderConfig
from paceline.train.methods.own_kv import Attention, FeedForward, Recurrent
from paceline.train.parallel import Captured, Norm


class Block(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.eps
        self.token_layernorm, self.hidden_layernorm = Norm(hidden, eps), Norm(hidden, eps)
        self.input_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.input_layernorm = Norm(hidden, eps)
        self.self_attn = Attention(config, hidden)
        self.post_attention_layernorm = Norm(hidden, eps)
        self.mlp = FeedForward(config)
        self.final_layernorm = Norm(hidden, eps)


class MtpModule(Recurrent):
    """A trainable block; `head` [V, H] is the target's, which stays as it is and is not stored."""

    kind = "mtp"

    def __init__(self, config: DecoderConfig, head: torch.Tensor) -> None:
        super().__init__()
        self.config, self.vocab = config, config.vocab_size
        self.mtp_layers = nn.ModuleList([Block(config)])
        self.register_buffer("shared_head", head, persistent=False)
        self.shared_head: torch.Tensor

    @property
    def head(self) -> torch.Tensor:
        return self.shared_head

    @property
    def block(self) -> Block:
        (block,) = self.mtp_layers
        assert isinstance(block, Block)
        return block

    @property
    def attention(self) -> Attention:
        return self.block.self_attn

    def first(self, captured: Captured) -> torch.Tensor:
        return captured.hidden.to(self.block.input_proj.weight.dtype)

    def joined(self, token: torch.Tensor, carried: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        block = self.block
        both = torch.cat((block.token_layernorm(token), block.hidden_layernorm(carried)), -1)
        x = block.input_proj(both)
        return block.input_layernorm(x), x

    def after(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.block.mlp(self.block.post_attention_layernorm(x))
        state: torch.Tensor = self.block.final_layernorm(x)
        return state, state
