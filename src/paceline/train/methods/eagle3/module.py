"""The EAGLE-3 layer (arXiv 2503.01840), differentiable. Its further steps take what the step before gave, as drafting
does: EAGLE-3's training-time test.

Parameters carry the names of the `speculators` format: export is a plain dump.
"""

from __future__ import annotations

import torch
from torch import nn

from paceline.models.drafters.eagle3 import FLAGS, Eagle3Config
from paceline.train.methods.own_kv import Attention, FeedForward, Recurrent
from paceline.train.parallel import Captured, Norm


class Layer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        hidden, eps = config.layer.hidden_size, config.layer.eps
        self.hidden_norm, self.input_layernorm = Norm(hidden, eps), Norm(hidden, eps)
        self.self_attn = Attention(config.layer, 2 * hidden)
        self.post_attention_layernorm = Norm(hidden, eps)
        self.mlp = FeedForward(config.layer)


class Eagle3Module(Recurrent):
    """A trainable EAGLE-3 drafter; `config.taps` are named."""

    def __init__(
        self, config: Eagle3Config, ids: torch.Tensor | None, head: torch.Tensor | None, own: bool
    ) -> None:
        """ids [C] the tokens that it drafts, None: all. head [C, H]: the target's rows for them, which stay as they
        are and are not stored. None: rows of its own, learnt. `own`: it has an embedding table of its own, which stays
        as it is.
        """
        super().__init__()
        layer, assume = config.layer, config.taps
        assert assume is not None, "taps are chosen before a module is made"
        self.config, self.vocab, self.taps = config, layer.vocab_size, assume
        self.kind = f"eagle3 {self.taps} " + " ".join(f for f in FLAGS if getattr(config, f))
        wide = len(self.taps) * config.target_hidden_size
        self.fc = nn.Linear(wide, layer.hidden_size, bias=False)
        self.input_norm = Norm(wide, layer.eps) if config.norm_before_fc else None
        norms = [Norm(config.target_hidden_size, layer.eps) for _ in self.taps] if config.fc_norm else []
        self.fc_norm = nn.ModuleList(norms)
        self.layers = nn.ModuleList([Layer(config)])
        self.norm = Norm(layer.hidden_size, layer.eps)
        self.embed_tokens = nn.Embedding(self.vocab, layer.hidden_size) if own else None
        if self.embed_tokens is not None:
            self.embed_tokens.weight.requires_grad_(False)
        if head is None:
            self.lm_head = nn.Linear(layer.hidden_size, config.draft_vocab, bias=False)
        self.register_buffer("shared_head", head, persistent=False)
        self.register_buffer("d2t", None if ids is None else ids - torch.arange(len(ids)))
        self.register_buffer("drafted", ids, persistent=False)
        self.shared_head: torch.Tensor | None
        self.drafted: torch.Tensor | None

    @property
    def head(self) -> torch.Tensor:
        return self.lm_head.weight if self.shared_head is None else self.shared_head

    @property
    def ids(self) -> torch.Tensor | None:
        return self.drafted

    @property
    def attention(self) -> Attention:
        return self.layer.self_attn

    @property
    def layer(self) -> Layer:
        (layer,) = self.layers
        assert isinstance(layer, Layer)
        return layer

    def embedded(self, captured: Captured) -> torch.Tensor:
        return captured.embeddings if self.embed_tokens is None else self.embed_tokens(captured.tokens)

    def first(self, captured: Captured) -> torch.Tensor:
        assert captured.states is not None, "the teacher taps the target where the module reads it"
        states = captured.states.to(self.fc.weight.dtype)
        if self.input_norm is not None:
            states = self.input_norm(states)
        if len(self.fc_norm):
            parts = states.chunk(len(self.taps), -1)
            states = torch.cat([norm(x) for norm, x in zip(self.fc_norm, parts, strict=True)], -1)
        out: torch.Tensor = self.fc(states)
        return out

    def joined(self, token: torch.Tensor, carried: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.layer.hidden_norm(carried)
        both = torch.cat((self.layer.input_layernorm(token), h), -1)
        return both, h if self.config.norm_before_residual else carried

    def after(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.layer.mlp(self.layer.post_attention_layernorm(x))
        normed = self.norm(x)
        return normed, normed if self.config.norm_output else x
