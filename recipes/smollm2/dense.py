"""A target's matrices as dense tensors of one type, for forwards of tens of thousands of rows: on a GPU these are matrix
products and nothing else, where the engine's own forward looks up pages.

It computes the function that the engine computes, up to rounding: weights are those that the file stands for. It serves
decoders with attention in all layers and no experts (Llama, Mistral, Qwen2, Qwen3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from paceline.errors import PairError
from paceline.models.layers.attention import Attention
from paceline.models.layers.decoder import DecoderTarget, Layer
from paceline.models.layers.linear import Linear
from paceline.models.layers.mlp import Mlp
from paceline.models.layers.rotary import inverse_frequencies
from paceline.models.target import GraphTarget
from paceline.ops.reference import dequantize
from paceline.train.parallel import Captured
from paceline.train.windows import Windows

# Of one layer: its number, queries [N, heads, d], keys and values [N, kv_heads, d] -> [N, heads * d]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

Dense = tuple[torch.Tensor, torch.Tensor | None]  # a matrix and its bias


@dataclass(frozen=True, slots=True)
class DenseLayer:
    qkv: Dense  # [(heads + 2 kv_heads) * d, H]
    o: Dense  # [H, heads * d]
    gate_up: Dense  # [2 I, H]
    down: Dense  # [H, I]
    norm_in: torch.Tensor  # [H] float32
    norm_post: torch.Tensor
    q_norm: torch.Tensor | None  # [d] float32
    k_norm: torch.Tensor | None


class DenseTarget:
    """A frozen decoder; implements the training loop's `Teacher`."""

    def __init__(self, target: GraphTarget, device: torch.device, dtype: torch.dtype) -> None:
        """`target`: on the CPU, from an eager runner. Raises PairError for a family that it does not serve."""
        if not isinstance(target, DecoderTarget) or target.config.moe is not None or _odd(target):
            raise PairError(
                f"{target.path} is no plain decoder, which is all that this serves: use paceline train"
            )
        config = self.config = target.config
        self.device, self.dtype = device, dtype
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.taps = target.tapped
        self.embedding = (
            self._dense(dequantize(target.embedding, None, torch.float32)) * target.embedding_scale
        )
        same = target.head is target.embedding
        self.head = self.embedding if same else self._dense(dequantize(target.head, None, torch.float32))
        self.narrow_head = self.head
        self.norm = target.norm.to(device, torch.float32)
        self.layers = [self._layer(layer) for layer in target.layers]
        self.scale = config.head_dim**-0.5 * config.rotary.attention**2
        angles = torch.arange(config.max_len)[:, None] * inverse_frequencies(config.rotary, config.head_dim)
        self.cos, self.sin = (
            f(angles).to(device) for f in (torch.cos, torch.sin)
        )  # [max_len, d / 2] float32

    def _dense(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix.to(self.device, self.dtype)

    def _layer(self, layer: Layer) -> DenseLayer:
        def side_by_side(*parts: Linear) -> Dense:
            matrix = self._dense(torch.cat([dequantize(p.weight, None, torch.float32) for p in parts]))
            if all(p.bias is None for p in parts):
                return matrix, None
            biases = [torch.zeros(p.weight.out_features) if p.bias is None else p.bias.float() for p in parts]
            return matrix, self._dense(torch.cat(biases))

        def norm(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x.to(self.device, torch.float32)

        a, mlp = layer.attention, layer.mlp
        assert isinstance(a, Attention), "other layers were refused"
        assert isinstance(mlp, Mlp), "experts were refused"
        return DenseLayer(
            side_by_side(a.q, a.k, a.v), side_by_side(a.o), side_by_side(mlp.gate, mlp.up), side_by_side(mlp.down),
            layer.norm_in.to(self.device, torch.float32), layer.norm_post.to(self.device, torch.float32),
            norm(a.q_norm), norm(a.k_norm),
        )  # fmt: skip

    def narrow(self, ids: torch.Tensor | None) -> None:
        """From now on `narrow_logits` are of the tokens `ids` [C] only (None: all)."""
        self.narrow_head = self.head if ids is None else self.head[ids.to(self.device)]

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Of rows [N]: (states after the final norm [N, H], states after each of `taps`). The sum of the layers is
        kept in float32.
        """
        x = F.embedding(tokens, self.embedding).float()
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        kept = [x] if 0 in self.taps else []
        for i, layer in enumerate(self.layers):
            q, k, v = self._queries(layer, self._normed(x, layer.norm_in), cos, sin)
            x = x + F.linear(attend(i, q, k, v), *layer.o)
            gate, up = F.linear(self._normed(x, layer.norm_post), *layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, *layer.down)
            if i + 1 in self.taps:
                kept.append(x)
        return self._normed(x, self.norm), kept

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, self.config.eps).to(self.dtype)

    def _queries(
        self, layer: DenseLayer, h: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries and keys, and values, each [N, heads, d]."""
        both, count = F.linear(h, *layer.qkv), self.heads + self.kv_heads
        x = both.view(*h.shape[:-1], count + self.kv_heads, self.head_dim)
        turned, v = x[..., :count, :].float(), x[..., count:, :]
        if layer.q_norm is not None and layer.k_norm is not None:
            parts = turned[..., : self.heads, :], turned[..., self.heads :, :]
            norms = (layer.q_norm, layer.k_norm)
            turned = torch.cat(
                [F.rms_norm(p, p.shape[-1:], n, self.config.eps) for p, n in zip(parts, norms, strict=True)],
                -2,
            )
        low, high = turned.chunk(2, -1)
        turned = torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(self.dtype)
        return turned[..., : self.heads, :], turned[..., self.heads :, :], v

    # -- as `Teacher` ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def capture(self, windows: Windows) -> Captured:
        """As `TargetTeacher.capture`, of decoders without K/V that a drafter reads."""
        tokens = torch.from_numpy(windows.tokens.astype(np.int64)).to(self.device)
        segments = torch.from_numpy(windows.segments.astype(np.int64)).to(self.device)
        return self.capture_on_device(tokens, segments, torch.from_numpy(windows.counted).to(self.device))

    @torch.no_grad()
    def capture_on_device(
        self, tokens: torch.Tensor, segments: torch.Tensor, counted: torch.Tensor
    ) -> Captured:
        """`Captured` of windows that lie on the device already: [B, T] each."""
        batch, length = tokens.shape
        index = torch.arange(length, device=self.device)
        begins = segments.diff(prepend=torch.full_like(segments[:, :1], -2), dim=1) != 0
        positions = index - torch.where(begins, index, 0).cummax(1).values
        seen = (segments[:, :, None] == segments[:, None, :]) & (index[:, None] >= index)
        mask, shape = seen[:, None], (batch, length, -1, self.head_dim)

        def attend(i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.reshape(shape).transpose(1, 2) for x in (q, k, v))
            group = self.heads // self.kv_heads
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
            y = F.scaled_dot_product_attention(q, k, v, mask, scale=self.scale)
            return y.transpose(1, 2).reshape(batch * length, -1)

        hidden, kept = self.forward(tokens.flatten(), positions.flatten(), attend)
        embedded = F.embedding(tokens, self.embedding)
        states = [x.clamp(-6e4, 6e4).to(embedded.dtype) for x in kept]  # float16 ends at 65,504
        return Captured(
            tokens=tokens, segments=segments, counted=counted, positions=positions, embeddings=embedded,
            hidden=hidden.view(batch, length, -1),
            states=torch.cat(states, -1).view(batch, length, -1) if states else None,
        )  # fmt: skip

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, H] -> [M, V] float32."""
        return F.linear(hidden.to(self.dtype), self.head).float()

    @torch.no_grad()
    def narrow_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, H] -> [M, C] float32, of the tokens that can be drafted."""
        return F.linear(hidden.to(self.dtype), self.narrow_head).float()


def _odd(target: DecoderTarget) -> bool:
    """Whether a layer is of another kind."""
    config = target.config
    plain = all(isinstance(x.attention, Attention) and x.attention.window is None for x in target.layers)
    other = (
        config.gated or config.centered or config.attention_softcap is not None or config.softcap is not None
    )
    return not plain or other or config.rotated is not None or target.readable < target.vocab_size
