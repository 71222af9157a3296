"""What all targets have in common: two graphs, tokens -> hidden states and hidden states -> logits, run by a `Runner`."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Self

import torch
from torch import Tensor

from paceline.checkpoints.loading import Weights
from paceline.core import ForwardBatch
from paceline.errors import PairError, UsageError, unreadable
from paceline.kv.cache import KVCache
from paceline.kv.layout import SCALED, Layout
from paceline.kv.store import StoreType
from paceline.models.spec import CONV, ModelConfig
from paceline.ops.base import Ops, Runner, Value, Weight


class GraphTarget(ABC):
    """A loaded target; implements `Target`. `dtype` is that of activations, `kv_dtype` of its cache.

    A family gives the two graphs; this reads the tables, which all families name alike.
    """

    def __init__(self, config: ModelConfig, weights: Weights, runner: Runner, dtype: torch.dtype) -> None:
        self.runner, self.dtype, self.device = runner, runner.activations or dtype, weights.device
        self.path, self.skipped = weights.folder, weights.skipped
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.readable = config.vocab_size
        self.max_len, self.eos_token_ids = config.max_len, config.eos_token_ids
        self.embedding = weights.matrix("embed_tokens")
        self.embedding_scale = 1.0
        self.head = self.embedding if config.tied else weights.matrix("lm_head")
        self.norm = weights.norm("norm")
        self.kv_dtype: StoreType = dtype
        self.layer_count = config.layer_count
        self.tapped: tuple[int, ...] = ()
        self._silent: Tensor | None = None  # tokens that are never written
        self.shard: tuple[int, int] | None = None  # (rank, of how many), if it has a share of the model only
        # Bound methods are made anew at each access; a runner keeps its recording under one object.
        self.hidden_graph = self._hidden
        self.logits_graph = self._logits
        self._bare: dict[int, ForwardBatch] = {}  # rows for `logits`, by their number

    def _set_layout(self, layout: Layout, outputs: Iterable[Weight]) -> None:
        """`outputs`: what the results of attention are multiplied with; where that rounds to bfloat16, K/V may, too."""
        self.layout = layout
        rounded = all(weight.kind == "bfloat16" for weight in outputs)
        self.kv_dtype = "packed" if rounded and self.runner.packs(layout) else self.kv_dtype

    def keep_bytes(self) -> None:
        """Have K/V cached in int8: smaller and faster to read, not exact. Raises UsageError."""
        if not self.runner.quantizes(self.layout):
            layers = self.layout.layers
            odd = [layer.head_dim for layer in layers if layer.head_dim % SCALED]
            why = "only the native CPU kernels read it"
            if any(layer.kind == CONV for layer in layers):
                why = "this model caches rows of a short convolution"
            elif any(layer.latent is not None for layer in layers):
                why = "this model caches latents"
            elif odd:
                why = f"a head has {odd[0]} columns, and each {SCALED} share a scale"
            raise UsageError(f"K/V cannot be kept in int8 here ({why}): leave --kv-cache (kv_cache) out")
        self.kv_dtype = "int8"

    def suppress(self, tokens: Seq[int]) -> None:
        """Give these tokens a logit of -inf from now on, so that plain decoding and verification never choose them."""
        self._silent = torch.tensor(tokens, device=self.device) if tokens else None

    def expect(self, tokens: int | None) -> None:
        """Be ready for texts of that many tokens, where a model computes long ones in another way; before any forward."""
        assert tokens is None or tokens > 0, tokens

    def tap(self, layers: Seq[int]) -> None:
        """Have `states` give the hidden states after that many layers, too. Before the first forward."""
        count = self.layer_count
        if wrong := [layer for layer in layers if not 0 <= layer <= count]:
            raise PairError(
                f"hidden states after layer {wrong[0]} are asked for, and {self.path} has {count} layers: use the "
                "drafter that was made for it"
            )
        self.tapped = tuple(sorted({*self.tapped, *layers}))

    def narrowed(self, ids: Tensor | slice) -> Self:
        """The same model with logits of the tokens `ids` [C] or of a slice only, in that order, suppressed ones as well.

        Before the first forward, which may pack the head.
        """
        narrow = copy.copy(self)
        narrow.head = self.head.rows(ids)
        narrow.vocab_size = narrow.readable = narrow.head.out_features
        narrow.logits_graph, narrow._bare, narrow._silent = narrow._logits, {}, None
        return narrow

    @abstractmethod
    def _hidden(self, ops: Ops) -> tuple[Value, ...]:
        """Writes K/V; hidden states after the final norm, then those after each of `tapped` layers."""

    @abstractmethod
    def _logits(self, ops: Ops) -> tuple[Value]:
        """Logits of the input `hidden`."""

    def forward(self, rows: ForwardBatch, cache: KVCache) -> Tensor:
        """Write the rows' K/V into `cache`; hidden states after the final norm, [N, hidden_size].

        Raises PromptError for a token that is not `readable`, of which a native kernel would read foreign memory.
        """
        return self.states(rows, cache)[0]

    def states(self, rows: ForwardBatch, cache: KVCache) -> tuple[Tensor, ...]:
        """What `forward` gives, then the hidden states after each of `tapped` layers, before any norm."""
        if self.readable < self.vocab_size:
            highest = int(rows.tokens.max()) if rows.numbers is None else max(rows.numbers[0])
            if highest >= self.readable:
                raise unreadable(highest, self.readable)
        return self.runner.run(self.hidden_graph, rows, cache, {})

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, hidden_size] -> [M, vocab_size], float32, soft-capped; -inf for tokens that are never read or written."""
        count = hidden.shape[0]
        if count not in self._bare:
            self._bare[count] = bare_rows(hidden)
        (logits,) = self.runner.run(self.logits_graph, self._bare[count], None, {"hidden": hidden})
        logits = logits.float() if logits.dtype != torch.float64 else logits
        if self.readable < self.vocab_size:
            logits[:, self.readable :] = -torch.inf
        if self._silent is not None:
            logits.index_fill_(1, self._silent, -torch.inf)
        return logits


def bare_rows(values: Tensor) -> ForwardBatch:
    """Rows for a graph that reads neither tokens nor cache: one per row of `values`."""
    count = values.shape[0]
    ids = torch.zeros(count, dtype=torch.int64, device=values.device)
    small = ids.to(torch.int32)
    return ForwardBatch(ids, small, small, [0, count])
