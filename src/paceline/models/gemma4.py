"""The text side of every Gemma 4 target, as two graphs: tokens -> hidden, hidden -> logits.

Covers per-layer input embeddings and shared K/V (E2B, E4B), experts beside the dense MLP (26B-A4B), keys as
values with fewer global K/V heads (12B, 31B), sliding and full layers, soft-capped and tied logits. Source of
truth for the arithmetic: transformers' models/gemma4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core import Rows
from paceline.kv.cache import KVCache, StoreType
from paceline.models.blocks import Layer, decoder_layer, layer_shapes, layout_of, read_layers
from paceline.models.config import GemmaConfig
from paceline.models.loading import Shapes, Weights
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


class GemmaTarget:
    """A loaded target; implements `Target`. `dtype` is that of activations, `kv_dtype` of its cache."""

    def __init__(self, config: GemmaConfig, weights: Weights, runner: Runner, dtype: torch.dtype) -> None:
        self.config, self.runner, self.dtype, self.device = config, runner, dtype, weights.device
        self.path, self.skipped = weights.folder, weights.skipped
        self.layout = layout_of(config)
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.max_len, self.eos_token_ids = config.max_len, config.eos_token_ids
        self.embedding = weights.matrix("embed_tokens")
        self.embedding_scale = config.hidden_size**0.5
        self.head = self.embedding if config.tied else weights.matrix("lm_head")
        self.norm = weights.norm("norm")
        self.layers: tuple[Layer, ...] = read_layers(weights, config, self.layout)
        rounded = all(
            layer.attention.o.kind == "bfloat16" for layer in self.layers
        )  # what attention gives is
        self.kv_dtype: StoreType = "packed" if rounded and runner.packs(self.layout) else dtype
        self.ple: PleInputs | None = None
        if config.ple_size:
            self.ple = PleInputs(
                weights.matrix("embed_tokens_per_layer"),
                weights.matrix("per_layer_model_projection"),
                weights.norm("per_layer_projection_norm"),
            )
        # Bound methods are made anew at each access; a runner keeps its recording under one object.
        self.hidden_graph = self._hidden
        self.logits_graph = self._logits
        self._bare: dict[int, Rows] = {}  # rows for `logits`, by their number

    def forward(self, rows: Rows, cache: KVCache) -> Tensor:
        """Write the rows' K/V into `cache`; hidden states after the final norm, [N, hidden_size]."""
        (hidden,) = self.runner.run(self.hidden_graph, rows, cache, {})
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, hidden_size] -> [M, vocab_size], float32, soft-capped."""
        count = hidden.shape[0]
        if count not in self._bare:
            self._bare[count] = bare_rows(hidden)
        (logits,) = self.runner.run(self.logits_graph, self._bare[count], None, {"hidden": hidden})
        return logits.float() if logits.dtype != torch.float64 else logits

    def _hidden(self, ops: Ops) -> tuple[Value]:
        tokens = ops.tokens()
        x = ops.embed(tokens, self.embedding, self.embedding_scale)
        ple = self._ple_inputs(ops, tokens, x)
        width = self.config.ple_size
        for i, layer in enumerate(self.layers):
            part = None if ple is None else ops.columns(ple, i * width, (i + 1) * width)
            x = decoder_layer(ops, x, layer, self.config.eps, part)
        return (ops.rms_norm(x, self.norm, self.config.eps),)

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


def bare_rows(values: Tensor) -> Rows:
    """Rows for a graph that reads neither tokens nor cache: one per row of `values`."""
    count = values.shape[0]
    ids = torch.zeros(count, dtype=torch.int64, device=values.device)
    small = ids.to(torch.int32)
    return Rows(ids, small, small, [0, count])
