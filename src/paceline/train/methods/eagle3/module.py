"""The EAGLE-3 layer (arXiv 2503.01840), differentiable, for all rounds of a text at once, as the engine drafts.

Entry p joins the target's states of row p with the token p + 1. A round with token t pending starts at entry t - 1 and
sees the entries up to it as the target left them, and its own further steps, each of which takes what the step before
gave in place of the target's states: EAGLE-3's training-time test. It must equal the engine's own draft steps position
by position. Parameters carry the names of the `speculators` format: export is a plain dump.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from paceline.models.decoder import inverse_frequencies
from paceline.models.eagle3 import FLAGS, Eagle3Config
from paceline.train.parallel import Captured, DraftModule, Norm, rotate, seen_keys

Keys = list[
    tuple[torch.Tensor, torch.Tensor]
]  # K and V [B, kv_heads, n, head_dim]: of all entries, then of own steps


class Attention(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        layer, width = config.layer, 2 * config.layer.hidden_size
        self.heads, self.kv_heads, self.head_dim = layer.heads, layer.kv_heads, layer.head_dim
        self.q_proj = nn.Linear(width, layer.heads * layer.head_dim, bias=False)
        self.k_proj = nn.Linear(width, layer.kv_heads * layer.head_dim, bias=False)
        self.v_proj = nn.Linear(width, layer.kv_heads * layer.head_dim, bias=False)
        self.o_proj = nn.Linear(layer.heads * layer.head_dim, layer.hidden_size, bias=False)
        self.q_norm = Norm(layer.head_dim, layer.eps) if layer.head_norms else None
        self.k_norm = Norm(layer.head_dim, layer.eps) if layer.head_norms else None
        inv_freq = inverse_frequencies(layer.rotary, layer.head_dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.inv_freq: torch.Tensor

    def _split(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """[B, n, heads * d] -> [B, heads, n, d]"""
        x = x.view(*x.shape[:-1], -1, self.head_dim)
        return (x if norm is None else norm(x)).transpose(1, 2)

    def keys(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k = rotate(self._split(self.k_proj(x), self.k_norm), positions, self.inv_freq)
        return k, self._split(self.v_proj(x), None)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, keys: Keys, mask: torch.Tensor
    ) -> torch.Tensor:
        """x [B, A, 2H]. The first of `keys` are of all entries, of which `mask` [B, 1, A, T] lets some be seen; of the
        others each row sees its own.
        """
        batch, rows, _ = x.shape
        group = self.heads // self.kv_heads
        q = rotate(self._split(self.q_proj(x), self.q_norm), positions, self.inv_freq) * self.head_dim**-0.5
        q = q.view(batch, self.kv_heads, group, rows, self.head_dim)
        (k0, v0), *own = keys
        scores = (q.flatten(2, 3) @ k0.mT).view(batch, self.kv_heads, group, rows, -1)
        scores = scores.float().masked_fill(~mask[:, None], -torch.inf)
        apart = [(q * k[:, :, None]).sum(-1, keepdim=True).float() for k, _ in own]
        shares = torch.cat([scores, *apart], -1).softmax(-1).to(q.dtype)
        count = k0.shape[2]
        out = (shares[..., :count].flatten(2, 3) @ v0).view(q.shape)
        for i, (_, v) in enumerate(own):
            out = out + shares[..., count + i, None] * v[:, :, None]
        mixed: torch.Tensor = self.o_proj(out.flatten(1, 2).transpose(1, 2).flatten(2))
        return mixed


class FeedForward(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        hidden, eps = config.layer.hidden_size, config.layer.eps
        self.hidden_norm, self.input_layernorm = Norm(hidden, eps), Norm(hidden, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(hidden, eps)
        self.mlp = FeedForward(hidden, config.layer.intermediate_size)


class Eagle3Module(DraftModule):
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

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """[B, T, taps * H] of the target -> what the first step takes, [B, T, hidden]"""
        states = states.to(self.fc.weight.dtype)
        if self.input_norm is not None:
            states = self.input_norm(states)
        if len(self.fc_norm):
            parts = states.chunk(len(self.taps), -1)
            states = torch.cat([norm(x) for norm, x in zip(self.fc_norm, parts, strict=True)], -1)
        out: torch.Tensor = self.fc(states)
        return out

    def unroll(self, captured: Captured, anchors: torch.Tensor, steps: int) -> list[torch.Tensor]:
        assert captured.states is not None, "the teacher taps the target where the module reads it"
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        rows = torch.arange(anchors.shape[0], device=anchors.device)[:, None]
        entry, mask = anchors - 1, seen_keys(captured, anchors)
        table = captured.embeddings if self.embed_tokens is None else self.embed_tokens(captured.tokens)
        token = layer.input_layernorm(table.to(self.fc.weight.dtype))
        fused = self.fuse(captured.states)  # [B, T, H]
        # entry p takes token p + 1; the last one of a window has none, and no round sees it
        joined = torch.cat((token.roll(-1, 1), layer.hidden_norm(fused)), -1)
        keys = [layer.self_attn.keys(joined, captured.positions)]
        carried, positions = fused[rows, entry], captured.positions[rows, entry]
        states = []
        for i in range(steps):
            h = layer.hidden_norm(carried)
            joined, at = torch.cat((token[rows, anchors + i], h), -1), positions + i
            if i:
                keys.append(layer.self_attn.keys(joined, at))
            residual = h if self.config.norm_before_residual else carried
            x = residual + layer.self_attn(joined, at, keys, mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            normed = self.norm(x)
            carried = normed if self.config.norm_output else x
            states.append(normed)
        return states
