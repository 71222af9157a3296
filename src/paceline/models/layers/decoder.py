"""Llama and its relatives: two norms a layer, grouped attention, a gated MLP or experts, as graphs over `Ops`.

What differs from family to family is data of `DecoderConfig`: biases, norms of q and k, windows, experts. Source of truth
for the arithmetic: transformers' models/llama, mistral, qwen2, qwen3, qwen3_moe, deepseek_v3 and glm4_moe.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.checkpoints.loading import Shapes, Weights
from paceline.kv.layout import LayerKV, Layout
from paceline.models.layers.attention import Attention, Mixer, attend, attention_shapes, read_attention
from paceline.models.layers.decoder_config import DecoderConfig, MambaConfig
from paceline.models.layers.delta_net import LINEAR, DeltaNet, delta_shapes
from paceline.models.layers.linear import read_norm
from paceline.models.layers.mamba import Mamba, mamba_shapes
from paceline.models.layers.mlp import Mixture, Mlp, feed, mlp_shapes, read_mlp
from paceline.models.layers.rotary import inverse_frequencies
from paceline.models.layers.short_conv import ShortConv, conv_shapes
from paceline.models.spec import CONV, SLIDING
from paceline.models.target import GraphTarget
from paceline.ops.base import Experts, Ops, Runner, Value, Weight


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    attention: Mixer
    mlp: Mlp | Experts | Mixture
    norm_in: Tensor  # [H], before attention, or after it where the config places norms so
    norm_post: Tensor  # [H], the same of the MLP; that of attention where both read one
    after_attention: Tensor | None = None  # [H], where norms stand before and after
    after_mlp: Tensor | None = None


def decoder_shapes(config: DecoderConfig) -> Shapes:
    """Name and shape of every tensor."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: Shapes = {"embed_tokens.weight": (vocab, hidden), "norm.weight": (hidden,)}
    if not config.tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    attention, norms = attention_shapes(config)
    for i, kind in enumerate(config.kinds):
        at = f"layers.{i}"
        shapes |= {f"{at}.{name}.weight": (hidden,) for name in config.norm_names.values()}
        matrices: Shapes = {}
        if kind == LINEAR:
            shapes |= _recurrent_shapes(config, at)
        elif kind == CONV:
            assert config.conv is not None
            shapes |= conv_shapes(config.conv, hidden, f"{at}.conv")
        else:
            matrices |= {f"{at}.self_attn.{name}": shape for name, shape in attention.items()}
            shapes |= {f"{at}.self_attn.{name}.weight": shape for name, shape in norms.items()}
            shapes |= {f"{at}.self_attn.sinks": (config.heads,)} if config.sinks else {}
        dense, named = mlp_shapes(config, i)
        matrices |= {f"{at}.mlp.{name}": shape for name, shape in dense.items()}
        shapes |= {f"{at}.mlp.{name}": shape for name, shape in named.items()}
        for name, shape in matrices.items():
            shapes[f"{name}.weight"] = shape
            if name.rpartition(".")[2] in config.biases:
                shapes[f"{name}.bias"] = shape[:1]
    return shapes


def _recurrent_shapes(config: DecoderConfig, at: str) -> Shapes:
    assert config.delta is not None
    if isinstance(config.delta, MambaConfig):
        return mamba_shapes(config.delta, config.hidden_size, f"{at}.mamba")
    return delta_shapes(config.delta, config.hidden_size, f"{at}.linear_attn")


def decoder_layout(config: DecoderConfig) -> Layout:
    """A storage layer for each layer, of keys and values, of a recurrent state, or of what is convolved."""
    heads, size, latent = config.kv_heads, config.head_dim, None
    if config.latent is not None:
        heads, size, latent = 1, config.latent.rank + config.head_dim, config.latent.rank
    kinds = [kind for kind in config.kinds if kind != LINEAR]
    layers = tuple(LayerKV(kind, heads, size, latent) for kind in kinds)
    windows = {kind: config.window if kind == SLIDING else None for kind in dict.fromkeys(kinds)}
    if config.conv is not None:
        rows = config.conv.storage(config.hidden_size)
        layers = tuple(rows if layer.kind == CONV else layer for layer in layers)
        windows[CONV] = config.conv.taps - 1
    states = () if config.delta is None else (config.delta.storage,) * (len(config.kinds) - len(kinds))
    return Layout(layers, windows, states)


class DecoderTarget(GraphTarget):
    """A loaded model of one of these families."""

    def __init__(self, config: DecoderConfig, weights: Weights, runner: Runner, dtype: torch.dtype) -> None:
        super().__init__(config, weights, runner, dtype)
        self.config = config
        size = config.rotated or config.head_dim
        turns = {
            kind: inverse_frequencies(config.rotary_of(kind), size) for kind in dict.fromkeys(config.kinds)
        }
        turns = {kind: turn.to(weights.device) for kind, turn in turns.items()}
        self.layers = tuple(
            read_layer(weights, config, i, turns[kind]) for i, kind in enumerate(config.kinds)
        )
        self.embedding_scale = config.embedding_scale
        self.norm = self.norm + (config.norm_shift if config.last_shift is None else config.last_shift)
        self._set_layout(decoder_layout(config), attention_outputs(self.layers))

    def expect(self, tokens: int | None) -> None:
        config = self.config.reaching(tokens)
        if config is self.config:
            return
        turn = inverse_frequencies(config.rotary, config.rotated or config.head_dim).to(self.device)
        self.config, self.max_len = config, config.max_len
        self.layers = tuple(
            replace(layer, attention=replace(layer.attention, inv_freq=turn))
            for layer in self.layers
            if isinstance(layer.attention, Attention)
        )

    def _hidden(self, ops: Ops) -> tuple[Value, ...]:
        x = ops.embed(ops.tokens(), self.embedding, self.embedding_scale)
        x = ops.rms_norm(x, None, self.config.eps) if self.config.normed_embedding else x
        taps = [x] if 0 in self.tapped else []
        for i, layer in enumerate(self.layers):
            x = self._layer(ops, x, layer)
            if i + 1 in self.tapped:
                taps.append(x)
        return (self._norm(ops, x, self.norm, self.config.eps), *taps)

    def _layer(self, ops: Ops, x: Value, layer: Layer) -> Value:
        config = self.config
        late = config.placement == "after"
        h = x if late else self._norm(ops, x, layer.norm_in, config.eps)
        x = self._add(
            ops, x, attend(ops, h, layer.attention, config), layer.norm_in if late else layer.after_attention
        )
        if config.placement != "parallel":
            h = x if late else self._norm(ops, x, layer.norm_post, config.eps)
        return self._add(ops, x, feed(ops, h, layer.mlp), layer.norm_post if late else layer.after_mlp)

    def _norm(self, ops: Ops, x: Value, weight: Tensor, eps: float) -> Value:
        return ops.layer_norm(x, weight, eps) if self.config.centered else ops.rms_norm(x, weight, eps)

    def _add(self, ops: Ops, x: Value, y: Value, norm: Tensor | None) -> Value:
        """x + what attention or the MLP gives, normed and scaled as the config says."""
        eps = self.config.eps if self.config.late_eps is None else self.config.late_eps
        y = y if norm is None else self._norm(ops, y, norm, eps)
        scale = self.config.residual_scale
        return ops.add(x, y if scale == 1.0 else ops.scale(y, scale))

    def _logits(self, ops: Ops) -> tuple[Value]:
        logits = ops.linear(ops.given("hidden", self.hidden_size), self.head)
        scale = self.config.logit_scale
        logits = logits if scale == 1.0 else ops.scale(logits, scale)
        return (logits if self.config.softcap is None else ops.softcap(logits, self.config.softcap),)


def attention_outputs(layers: Iterable[Layer]) -> list[Weight]:
    """What the results of attention are multiplied with."""
    return [
        layer.attention.o.weight
        for layer in layers
        if not isinstance(layer.attention, DeltaNet | ShortConv | Mamba)
    ]


def read_layer(
    weights: Weights, config: DecoderConfig, index: int, inv_freq: Tensor, room: str = "layers"
) -> Layer:
    """One layer of a loaded model."""
    at = f"{room}.{index}"

    attention = read_attention(weights, config, index, at, inv_freq)
    mlp = read_mlp(weights, config, index, f"{at}.mlp")
    norms = {field: read_norm(weights, config, f"{at}.{name}") for field, name in config.norm_names.items()}
    return Layer(attention, mlp, **({"norm_post": norms["norm_in"]} | norms))
