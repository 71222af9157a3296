"""The MTP drafter of Gemma 4: Q-only layers over the target's K/V, with a dense or an ordered-embedding head.

One step takes the target's embedding of the last token beside the last hidden state of width
`backbone_hidden_size` and gives scores and the hidden state for the next step. It writes nothing: its keys
and values are the target's. Source of truth: transformers' models/gemma4_assistant. Unlike there, tokens
outside the chosen clusters are not scored at all, so the distribution over the candidates is all of
the drafter's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.checkpoints.loading import Shapes, Weights
from paceline.core import ForwardBatch
from paceline.errors import PairError, WeightsError
from paceline.kv.cache import KVCache
from paceline.kv.layout import Layout
from paceline.models.drafters.base import HeadOutput
from paceline.models.families.gemma4.config import AssistantConfig, GemmaConfig
from paceline.models.families.gemma4.layers import decoder_layer, layer_shapes, layout_of, read_layers
from paceline.ops.base import Drawn, Ops, RoundStart, Rule, Runner, Stop, Value, Weight


@dataclass(frozen=True, slots=True, eq=False)
class CentroidHead:
    """The ordered-embedding head: centroids choose clusters of tokens, and only those are scored.

    The head's own rows stand in this order too.
    """

    centroids: Weight  # [clusters, H]
    ordering: Tensor  # [V] token ids, cluster by cluster
    top: int


def assistant_shapes(config: AssistantConfig) -> Shapes:
    """Name and shape of every tensor of the drafter."""
    text, backbone = config.text, config.backbone_hidden_size
    shapes = layer_shapes(text)
    shapes["norm.weight"] = (text.hidden_size,)
    shapes["pre_projection.weight"] = (text.hidden_size, 2 * backbone)
    shapes["post_projection.weight"] = (backbone, text.hidden_size)
    shapes["embed_tokens.weight" if text.tied else "lm_head.weight"] = (text.vocab_size, text.hidden_size)
    if config.clusters:
        shapes["masked_embedding.centroids.weight"] = (config.clusters, text.hidden_size)
        shapes["masked_embedding.token_ordering"] = (text.vocab_size,)
    return shapes


def check_pair(
    assistant: AssistantConfig, target: GemmaConfig, names: tuple[str, str] = ("the drafter", "the target")
) -> None:
    """Raise PairError, naming both sides and every difference, unless the drafter fits this target."""
    if wrong := differences(assistant, target):
        raise PairError(
            f"{names[0]} ({assistant.model_type}) was made for another target than {names[1]} "
            f"({target.model_type}): {'; '.join(wrong)}. Give the -assistant checkpoint of this very target, "
            "or use the drafter ngram"
        )


def differences(assistant: AssistantConfig, target: GemmaConfig) -> list[str]:
    """Why the drafter does not fit this target; empty if it does."""
    text, layout, wrong = assistant.text, layout_of(target), list[str]()
    if assistant.backbone_hidden_size != target.hidden_size:
        wrong.append(f"hidden size {assistant.backbone_hidden_size} against {target.hidden_size}")
    if text.vocab_size != target.vocab_size:
        wrong.append(f"vocabulary {text.vocab_size} against {target.vocab_size}")
    kinds = dict.fromkeys(layer.kind for layer in text.layers)
    if missing := [kind for kind in kinds if kind not in layout.kinds]:
        wrong.append(f"it reads {', '.join(missing)} layers, of which the target has none")
    if text.window > target.window:
        wrong.append(f"sliding window {text.window} against {target.window}")
    for kind in kinds:
        if kind in missing:
            continue
        mine = {(layer.kv_heads, layer.head_dim) for layer in text.layers if layer.kind == kind}
        theirs = layout.layers[layout.last_of(kind)]
        for kv_heads, head_dim in sorted(mine - {(theirs.kv_heads, theirs.head_dim)}):
            wrong.append(
                f"{kind} with {kv_heads} K/V heads of size {head_dim} against {theirs.kv_heads} of "
                f"{theirs.head_dim}"
            )
    return wrong


class Beside(Protocol):
    """What the network needs of its target."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def embedding(self) -> Weight: ...

    @property
    def embedding_scale(self) -> float: ...

    @property
    def layout(self) -> Layout: ...


class GemmaAssistant:
    """A loaded drafter network; implements `AssistantNet`."""

    def __init__(self, config: AssistantConfig, weights: Weights, target: Beside, runner: Runner) -> None:
        text = config.text
        self.config, self.runner, self.dtype, self.device = config, runner, target.dtype, weights.device
        self.embedding, self.embedding_scale = target.embedding, target.embedding_scale
        self.pre, self.post = weights.matrix("pre_projection"), weights.matrix("post_projection")
        self.norm = weights.norm("norm")
        self.head = weights.matrix("embed_tokens" if text.tied else "lm_head")
        self.layers = read_layers(weights, text, target.layout)
        self.clusters: CentroidHead | None = None
        if config.clusters:
            ordering = weights.ids("masked_embedding.token_ordering")
            if not torch.equal(ordering.sort().values.cpu(), torch.arange(text.vocab_size)):
                raise WeightsError(
                    "masked_embedding.token_ordering does not name every token once: download it again"
                )
            centroids = weights.matrix("masked_embedding.centroids")
            self.clusters = CentroidHead(centroids, ordering, config.top_clusters)
            self.head = self.head.rows(ordering)  # once, instead of jumping from token to token in each step
        self.step_graph = self._step  # one stable object, see GemmaTarget

    def step(self, rows: ForwardBatch, hidden: Tensor, cache: KVCache) -> HeadOutput:
        """One draft step: rows.tokens the last tokens [B], rows.positions constant over a round."""
        out = self.runner.run(self.step_graph, rows, cache, {"hidden": hidden})
        if self.clusters is None:
            logits, after = out
            return HeadOutput(logits, None, after)
        ids, logits, after = out
        return HeadOutput(logits, ids, after)

    def draft_round(
        self, start: RoundStart, states: Tensor, cache: KVCache, rules: list[Rule], stops: list[Stop]
    ) -> Drawn | None:
        """All steps of a round with their draws in one native call; None on a runner that cannot."""
        return self.runner.draft_round(self.step_graph, start, cache, states, rules, stops)

    def _step(self, ops: Ops) -> tuple[Value, ...]:
        x, after = self.through(ops, ops.embed(ops.tokens(), self.embedding, self.embedding_scale))
        return *self.scores(ops, x), after

    def through(self, ops: Ops, token: Value) -> tuple[Value, Value]:
        """Of embedded tokens and the input `hidden`: what the head reads, what the next step takes."""
        x = ops.linear(ops.concat(token, ops.given("hidden", self.config.backbone_hidden_size)), self.pre)
        for layer in self.layers:
            x = decoder_layer(ops, x, layer, self.config.text.eps, None, sees_itself=False)
        x = ops.rms_norm(x, self.norm, self.config.text.eps)
        return x, ops.linear(x, self.post)

    def scores(self, ops: Ops, x: Value) -> tuple[Value, ...]:
        """Logits of all tokens; or of some, behind their ids."""
        if self.clusters is None:
            return (ops.linear(x, self.head),)
        c = self.clusters
        return ops.centroid_logits(x, c.centroids, c.ordering, self.head, c.top)
