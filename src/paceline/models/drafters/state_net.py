"""What networks with K/V of their own over hidden states of the target have in common, see `StateNet`: their graphs, and
what they take of the target where their checkpoint lacks it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.checkpoints.loading import Rename, Shapes, Weights, read_entries
from paceline.checkpoints.safetensors_file import Entry
from paceline.core import ForwardBatch
from paceline.errors import PairError, WeightsError
from paceline.kv.cache import KVCache
from paceline.kv.store import StoreType
from paceline.models.layers.decoder import decoder_layout
from paceline.models.layers.decoder_config import DecoderConfig
from paceline.models.target import GraphTarget, bare_rows
from paceline.ops.base import Drawn, Graph, Lead, Ops, RoundStart, Rule, Runner, Stop, Value, Weight


class Fits(Protocol):
    """What a network must fit: a target, or its config."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def layer_count(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Network:
    """What is to be loaded of a checkpoint, as its config and headers say. `rename` chooses among a target's tensors."""

    shapes: Shapes
    layers: DecoderConfig
    build: Callable[[Weights, GraphTarget], GraphNet]
    rename: Rename | None = None
    taps: tuple[int, ...] = ()  # layers of the target, beside its final state


@dataclass(frozen=True, slots=True)
class DrafterFiles:
    """What is known of a drafter before its weights are loaded. One that is about to be trained has no files yet: its
    `entries` are the tensors that it shall have beside those that all of its kind have.
    """

    raw: Mapping[str, Any]  # config.json
    entries: Mapping[str, Entry]  # headers, by name
    folder: Path
    target: str = "the target"  # what messages call it

    @classmethod
    def of(cls, folder: Path, raw: Mapping[str, Any], target: object = "the target") -> DrafterFiles:
        """Those of a folder. Raises WeightsError."""
        return cls(raw, read_entries(folder), folder, str(target))


@dataclass(frozen=True, slots=True)
class Inside:
    """What a target's own files hold to draft with, or what its config promises in vain."""

    holds: str | None = None
    promised: str | None = None


@dataclass(frozen=True, slots=True)
class NetworkKind:
    """What a module of this room has under the name `NETWORK`. How a config is recognised stands in drafter_kinds.py."""

    plan: Callable[[DrafterFiles, Fits | None], Network]  # what of a folder is to be loaded
    parse: Callable[[Mapping[str, Any]], object] | None = None  # of a folder of its own; None: it has none
    inside: Callable[[Iterable[str], Mapping[str, Any]], Inside] | None = (
        None  # of a target's tensors and config
    )


def misfit(
    files: DrafterFiles, kind: str, fits: Fits, hidden: int, vocab: int, layers: int | None = None
) -> None:
    """Raise PairError, naming drafter and target, unless the drafter was made for a target of these sizes."""
    pairs = {"hidden size": (hidden, fits.hidden_size), "vocabulary": (vocab, fits.vocab_size),
             "layers": (layers or fits.layer_count, fits.layer_count)}  # fmt: skip
    wrong = [f"{what} {mine} against {its}" for what, (mine, its) in pairs.items() if mine != its]
    if wrong:
        raise PairError(
            f"{files.folder} ({kind}) was made for another target than {files.target}: {'; '.join(wrong)}. Give the "
            "drafter of this very target, or use the drafter ngram"
        )


class GraphNet(ABC):
    """`layers` describes the decoder layers, each with K/V of its own; `width` is that of the states it is given."""

    shift, parallel = 1, 0

    def __init__(
        self, layers: DecoderConfig, target: GraphTarget, taps: Seq[int], width: int, ids: Tensor | None
    ) -> None:
        self.runner: Runner = target.runner
        self.dtype, self.device, self.max_len = target.dtype, target.device, target.max_len
        self.taps, self.width, self.ids = tuple(taps), width, ids
        self.hidden_size, self.layout = layers.hidden_size, decoder_layout(layers)
        self.kv_dtype: StoreType = target.dtype if isinstance(target.kv_dtype, str) else target.kv_dtype
        self._bare: dict[int, ForwardBatch] = {}  # rows for `logits`, by their number
        self.logits_graph = self._logits  # one stable object, see GraphTarget

    def _set_store(self, outputs: Iterable[Weight]) -> None:
        """`outputs`: what the results of attention are multiplied with, as in `GraphTarget`."""
        if all(weight.kind == "bfloat16" for weight in outputs) and self.runner.packs(self.layout):
            self.kv_dtype = "packed"

    @property
    def graphs(self) -> list[Graph]:
        """All graphs that it runs."""
        return [self.logits_graph]

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, hidden_size] -> [M, C], scores of the tokens `ids`."""
        return self._scored(self.logits_graph, hidden)

    def _scored(self, graph: Graph, hidden: Tensor) -> Tensor:
        count = hidden.shape[0]
        if count not in self._bare:
            self._bare[count] = bare_rows(hidden)
        (logits,) = self.runner.run(graph, self._bare[count], None, {"hidden": hidden})
        return logits

    @abstractmethod
    def _logits(self, ops: Ops) -> tuple[Value, ...]:
        """Logits of the input `hidden`."""


class SteppingNet(GraphNet):
    """One that drafts a token a step, each from its own output for the one before."""

    embedding: Weight  # its table of tokens, or the target's
    embedding_scale: float  # of that table's rows
    head: Weight

    def __init__(
        self, layers: DecoderConfig, target: GraphTarget, taps: Seq[int], width: int, ids: Tensor | None
    ) -> None:
        super().__init__(layers, target, taps, width, ids)
        self.absorb_graph, self.step_graph, self.feed_graph = self._absorb, self._step, self._feed
        self.media_graph, self.embed_graph = self._absorb_given, self._embed
        self.sees = layers.hidden_size == target.hidden_size  # soft tokens have the target's width

    @property
    def graphs(self) -> list[Graph]:
        return [self.absorb_graph, self.step_graph, self.feed_graph, *super().graphs]

    def absorb(self, rows: ForwardBatch, states: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Write K/V of rows whose hidden states the target has computed: (what `step` takes, what `logits` takes)."""
        if rows.media is None:
            after, normed = self.runner.run(self.absorb_graph, rows, cache, {"states": states})
            return after, normed
        embedded = self.runner.run(self.embed_graph, rows, None, {})[0].clone()
        for row, vectors in rows.media.pieces:
            embedded[row : row + len(vectors)] = vectors.to(embedded)
        given = {"states": states, "embeddings": embedded}
        after, normed = self.runner.run(self.media_graph, rows, cache, given)
        return after, normed

    def feed(self, rows: ForwardBatch, states: Tensor, cache: KVCache) -> None:
        """Write the same K/V alone."""
        if rows.media is not None:
            self.absorb(rows, states, cache)
            return
        self.runner.run(self.feed_graph, rows, cache, {"states": states})

    def step(self, rows: ForwardBatch, hidden: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
        """One more token of a draft: (logits [M, C], what the next step takes)."""
        logits, after = self.runner.run(self.step_graph, rows, cache, {"hidden": hidden})
        return logits, after

    def draft_round(
        self, start: RoundStart, states: Tensor, cache: KVCache, rules: list[Rule], stops: list[Stop]
    ) -> Drawn | None:
        """All steps of a round with their draws in one native call; None on a runner that cannot."""
        return self.runner.draft_round(self.step_graph, start, cache, states, rules, stops)

    def lead(self, rows: ForwardBatch, last: list[int]) -> Lead:
        """Input of a draft round that first computes `rows`, then drafts from the rows `last`."""
        return Lead(self.absorb_graph, self.logits_graph, rows, last)

    def _absorb_given(self, ops: Ops) -> tuple[Value, ...]:
        return self._absorb(ops, ops.given("embeddings", self.hidden_size))

    def _embed(self, ops: Ops) -> tuple[Value, ...]:
        """The scaled embeddings of the rows' tokens."""
        return (ops.embed(ops.tokens(), self.embedding, self.embedding_scale),)

    def _absorb(self, ops: Ops, token: Value | None = None) -> tuple[Value, ...]:
        """Of the input `states`: what the next step takes, what the head reads. `token`: embeddings of the rows."""
        return self.through(ops, self.seen(ops), token)

    def _feed(self, ops: Ops) -> tuple[Value, ...]:
        """Of the input `states`: K/V of the layer, with as little else as they need."""
        return (self.keep(ops, self.seen(ops)),)

    def _step(self, ops: Ops) -> tuple[Value, ...]:
        """Of the input `hidden`: logits, and what the next step takes."""
        after, normed = self.through(ops, ops.given("hidden", self.hidden_size))
        return ops.linear(normed, self.head), after

    def _logits(self, ops: Ops) -> tuple[Value, ...]:
        return (ops.linear(ops.given("hidden", self.hidden_size), self.head),)

    @abstractmethod
    def seen(self, ops: Ops) -> Value:
        """What the layer reads of the input `states` in place of its own state."""

    @abstractmethod
    def through(self, ops: Ops, x: Value, token: Value | None = None) -> tuple[Value, Value]:
        """Of rows that go on from `x`: what the next step takes, what the head reads. Writes their K/V."""

    @abstractmethod
    def keep(self, ops: Ops, x: Value, token: Value | None = None) -> Value:
        """Write the same K/V, with as little else as they need; returns what they are made of."""


class MaskedNet(GraphNet):
    """One that drafts a block in one forward: a text's last token, and masks behind it."""

    shift = 0
    block: int  # rows of a block
    mask: int  # the token of all but the first
    first: int  # the row that gives the first token of a draft
    embedding: Weight  # its table of tokens, or the target's
    embedding_scale: float  # of that table's rows
    head: Weight

    @abstractmethod
    def seen(self, ops: Ops) -> Value:
        """Of the input `states` what all layers make their K/V of."""

    @abstractmethod
    def keep(self, ops: Ops, x: Value) -> None:
        """Write all layers' K/V of what `seen` gives."""

    @abstractmethod
    def through(self, ops: Ops, x: Value) -> Value:
        """Of embedded rows of whole blocks what the head reads; writes their K/V."""


def table_shapes(files: DrafterFiles, layers: DecoderConfig, draft_vocab: int) -> Shapes:
    """Name and shape of the tables that `files` has; where one is missing, the target's takes its place."""
    optional: Shapes = {
        "embed_tokens.weight": (layers.vocab_size, layers.hidden_size),
        "lm_head.weight": (draft_vocab, layers.hidden_size),
        "d2t": (draft_vocab,),
        "t2d": (layers.vocab_size,),
    }
    return {name: shape for name, shape in optional.items() if name in files.entries}


def embedding_of(weights: Weights, target: GraphTarget, hidden: int) -> tuple[Weight, float]:
    """The checkpoint's embedding table with its scale, else the target's."""
    if weights.has("embed_tokens.weight"):
        return weights.matrix("embed_tokens"), 1.0
    _same_width(weights, target, hidden, "embed_tokens.weight")
    return target.embedding, target.embedding_scale


def head_of(weights: Weights, target: GraphTarget, hidden: int, ids: Tensor | None = None) -> Weight:
    """The checkpoint's head, else the rows `ids` of the target's: a copy of them, in what the drafter's weights are."""
    if weights.has("lm_head.weight"):
        return weights.matrix("lm_head")
    _same_width(weights, target, hidden, "lm_head.weight")
    return target.head if ids is None else weights.remade("lm_head", target.head.rows(ids))


def _same_width(weights: Weights, target: GraphTarget, hidden: int, name: str) -> None:
    if hidden != target.hidden_size:
        raise WeightsError(
            f"{weights.folder} has no {name}, and the target's is of width {target.hidden_size}, not {hidden}: "
            "download it again"
        )


def draft_ids(weights: Weights, draft_vocab: int, vocab: int) -> Tensor | None:
    """The tokens that the head's rows are of, int64 [C]; None: all in order. `d2t` holds what is added to 0, 1, ..."""
    mask = weights.ids("t2d") if weights.has("t2d") else None
    if not weights.has("d2t"):
        if draft_vocab != vocab:
            raise WeightsError(
                f"{weights.folder}: draft_vocab_size is {draft_vocab}, but there is no d2t: download it again"
            )
        return None
    offsets = weights.ids("d2t")
    ids = offsets + torch.arange(draft_vocab, device=offsets.device)
    right = bool((ids >= 0).all() and (ids < vocab).all()) and len(set(ids.tolist())) == len(ids)
    if not right:
        raise WeightsError(
            f"{weights.folder}: d2t does not lead to {draft_vocab} tokens below {vocab}: it holds token id minus "
            "row number of the head, not token ids"
        )
    if mask is not None and (int(mask.ne(0).sum()) != len(ids) or not bool(mask[ids].ne(0).all())):
        raise WeightsError(f"{weights.folder}: t2d and d2t name different tokens: download them again")
    return None if draft_vocab == vocab and not bool(offsets.any()) else ids
