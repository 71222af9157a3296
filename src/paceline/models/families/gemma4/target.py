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
from paceline.core import ForwardBatch
from paceline.kv.cache import KVCache
from paceline.models.families import ModelSpec
from paceline.models.families.gemma4.config import GemmaConfig, parse_gemma
from paceline.models.families.gemma4.layers import (
    Layer,
    decoder_layer,
    layer_shapes,
    layout_of,
    read_layers,
    split_gemma,
)
from paceline.models.target import GraphTarget
from paceline.ops.base import Ops, Runner, Value, Weight
from paceline.soft_tokens import MediaRows


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
        self.media_graph = self._media_hidden
        self.embed_graph = self._embed
        self.ple: PleInputs | None = None
        if config.ple_size:
            self.readable = min(config.vocab_size, config.ple_vocab)
            self.ple = PleInputs(
                weights.matrix("embed_tokens_per_layer"),
                weights.matrix("per_layer_model_projection"),
                weights.norm("per_layer_projection_norm"),
            )

    def states(self, rows: ForwardBatch, cache: KVCache) -> tuple[Tensor, ...]:
        """As of any target; rows of soft tokens (`ForwardBatch.media`) have these as their embeddings."""
        if rows.media is None:
            return super().states(rows, cache)
        given = {"embeddings": self.embed(rows)}
        return self.runner.run(self.media_graph, self._padded(rows, rows.media), cache, given)

    def embed(self, rows: ForwardBatch) -> Tensor:
        """What the layers begin with, [N, hidden_size]: of text its scaled embedding, else the soft token."""
        embedded = self.runner.run(self.embed_graph, rows, None, {})[0].clone()
        for row, vectors in () if rows.media is None else rows.media.pieces:
            embedded[row : row + len(vectors)] = vectors.to(embedded)
        return embedded

    def _padded(self, rows: ForwardBatch, media: MediaRows) -> ForwardBatch:
        """The rows with the pad token at each placeholder, whose per-layer input is a soft token's own."""
        tokens = rows.tokens.clone()
        for row, vectors in media.pieces:
            tokens[row : row + len(vectors)] = self.config.pad_id
        out = ForwardBatch(tokens, rows.positions, rows.slots, rows.starts)
        out.branches, out.media = rows.branches, media
        return out

    def _embed(self, ops: Ops) -> tuple[Value, ...]:
        return (ops.embed(ops.tokens(), self.embedding, self.embedding_scale),)

    def _hidden(self, ops: Ops) -> tuple[Value, ...]:
        return self._layers(ops, ops.embed(ops.tokens(), self.embedding, self.embedding_scale))

    def _media_hidden(self, ops: Ops) -> tuple[Value, ...]:
        return self._layers(ops, ops.given("embeddings", self.hidden_size))

    def _layers(self, ops: Ops, x: Value) -> tuple[Value, ...]:
        ple = self._ple_inputs(ops, ops.tokens(), x)
        width = self.config.ple_size
        taps = [x] if 0 in self.tapped else []
        for i, layer in enumerate(self.layers):
            part = None if ple is None else ops.columns(ple, i * width, (i + 1) * width)
            x = decoder_layer(ops, x, layer, self.config.eps, part)
            if i + 1 in self.tapped:
                taps.append(x)
        return (ops.rms_norm(x, self.norm, self.config.eps), *taps)

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
