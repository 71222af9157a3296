"""The text side of every Gemma 4 target, as two graphs: tokens -> hidden, hidden -> logits.

Covers per-layer input embeddings and shared K/V (E2B, E4B), experts beside the dense MLP (26B-A4B), keys as
values with fewer global K/V heads (12B, 31B), sliding and full layers, soft-capped and tied logits. Source of
truth for the arithmetic: transformers' models/gemma4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.checkpoints.loading import Shapes, Weights
from paceline.models.families import ModelSpec
from paceline.models.families.gemma4_config import GemmaConfig, parse_gemma
from paceline.models.families.gemma4_layers import (
    Layer,
    decoder_layer,
    layer_shapes,
    layout_of,
    read_layers,
    split_gemma,
)
from paceline.models.target import GraphTarget
from paceline.ops.base import Ops, Runner, Value, Weight


@dataclass(frozen=True, slots=True, eq=False)
class PleInputs:
    """What all layers' per-layer inputs are computed from, packed side by side: L layers of width P."""

    table: Weight  # [V, L * P]
    projection: Weight  # [L * P, H]
    norm: Tensor  # [P]


def target_shapes(config: GemmaConfig) -> Shapes:
    """Name and shape of every tensor of the language model."""
    shapes = layer_shapes(config)
    shapes["embed_tokens.weight"] = (config.vocab_size, config.hidden_size)
    shapes["norm.weight"] = (config.hidden_size,)
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    if config.ple_size:
        packed = len(config.layers) * config.ple_size
        shapes["embed_tokens_per_layer.weight"] = (config.ple_vocab, packed)
        shapes["per_layer_model_projection.weight"] = (packed, config.hidden_size)
        shapes["per_layer_projection_norm.weight"] = (config.ple_size,)
    return shapes


class GemmaTarget(GraphTarget):
    """A loaded Gemma 4."""

    def __init__(self, config: GemmaConfig, weights: Weights, runner: Runner, dtype: torch.dtype) -> None:
        super().__init__(config, weights, runner, dtype)
        self.config = config
        self.embedding_scale = config.hidden_size**0.5
        layout = layout_of(config)
        self.layers: tuple[Layer, ...] = read_layers(weights, config, layout)
        self._set_layout(layout, [layer.attention.o for layer in self.layers])
        self.ple: PleInputs | None = None
        if config.ple_size:
            self.readable = min(config.vocab_size, config.ple_vocab)
            self.ple = PleInputs(
                weights.matrix("embed_tokens_per_layer"),
                weights.matrix("per_layer_model_projection"),
                weights.norm("per_layer_projection_norm"),
            )

    def _hidden(self, ops: Ops) -> tuple[Value, ...]:
        tokens = ops.tokens()
        x = ops.embed(tokens, self.embedding, self.embedding_scale)
        ple = self._ple_inputs(ops, tokens, x)
        width = self.config.ple_size
        kept = [x] if 0 in self.tapped else []
        for i, layer in enumerate(self.layers):
            part = None if ple is None else ops.columns(ple, i * width, (i + 1) * width)
            x = decoder_layer(ops, x, layer, self.config.eps, part)
            if i + 1 in self.tapped:
                kept.append(x)
        return (ops.rms_norm(x, self.norm, self.config.eps), *kept)

    def _ple_inputs(self, ops: Ops, tokens: Value, x: Value) -> Value | None:
        """[N, L * P]: the token's own row and a projection of its embedding, scaled to keep the variance."""
        if self.ple is None:
            return None
        context = ops.scale(ops.linear(x, self.ple.projection), self.config.hidden_size**-0.5)
        context = ops.rms_norm(context, self.ple.norm, self.config.eps, len(self.layers))
        own = ops.embed(tokens, self.ple.table, self.config.ple_size**0.5)
        return ops.scale(ops.add(context, own), 2.0**-0.5)

    def _logits(self, ops: Ops) -> tuple[Value]:
        logits = ops.linear(ops.given("hidden", self.hidden_size), self.head)
        return (logits if self.config.softcap is None else ops.softcap(logits, self.config.softcap),)


SPEC = ModelSpec(parse_gemma, target_shapes, layout_of, GemmaTarget, split_gemma)
