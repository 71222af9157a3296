"""Parallel heads (arXiv 2404.19737): further last layers, each with K/V of its own, for the tokens after the next.

All read what the target's last layer reads, at the target's positions, and share its norm and output: so one forward over
the rows of a text drafts a token with each. Head k drafts the token k + 2 places behind its row. Source of truth: the
forward of facebook/multi-token-prediction.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from paceline.checkpoints.loading import Shapes, Weights
from paceline.core import ForwardBatch
from paceline.errors import PairError, WeightsError
from paceline.kv.cache import KVCache
from paceline.models.config import parse_target
from paceline.models.drafters.state_net import (
    DrafterFiles,
    Fits,
    GraphNet,
    Inside,
    Network,
    NetworkKind,
)
from paceline.models.fields import shown
from paceline.models.layers.attention import Attention, attend, store
from paceline.models.layers.decoder import attention_outputs, decoder_shapes, read_layer
from paceline.models.layers.decoder_config import DecoderConfig
from paceline.models.layers.mlp import feed
from paceline.models.layers.rotary import inverse_frequencies
from paceline.models.target import GraphTarget
from paceline.ops.base import Graph, Ops, Value

KIND = "heads"
ROOM = "extra_heads"  # where a target's files keep them: extra_heads.0.self_attn.q_proj.weight
SAID = "n_future_tokens"  # key of config.json: one more than there are heads
_NUMBERED = re.compile(rf"{ROOM}\.(\d{{1,9}})\..+")


def inside(names: Iterable[str], raw: Mapping[str, Any]) -> Inside:
    """How many are among a target's tensors."""
    count, promised = len(_numbers(names)), raw.get(SAID)
    if count:
        return Inside(f"{count} parallel head{'s' * (count > 1)}")
    if promised in (None, 1):
        return Inside()
    return Inside(
        promised=f"config.json promises parallel heads ({SAID}={shown(promised)}), which the weights do not hold: "
        "convert "
        "the original again"
    )


def _numbers(names: Iterable[str]) -> set[int]:
    return {int(match[1]) for name in names if (match := _NUMBERED.fullmatch(name))}


def plan_heads(files: DrafterFiles, fits: Fits | None) -> Network:
    """What of a target's own files is to be loaded. Raises ConfigError, WeightsError and PairError."""
    folder, raw = files.folder, files.raw
    target, numbers = parse_target(raw), _numbers(files.entries)
    if not isinstance(target, DecoderConfig) or target.latent is not None or target.delta is not None:
        raise PairError(
            f"{folder} holds parallel heads, which are not read of a {target.model_type}: use the drafter ngram"
        )
    count = len(numbers)
    if numbers != set(range(count)) or raw.get(SAID) not in (None, count + 1):
        held = ", ".join(map(str, sorted(numbers)[:8]))
        promise = "" if raw.get(SAID) is None else f", where config.json says {SAID}={shown(raw[SAID])}"
        raise WeightsError(
            f"{folder} holds the parallel heads {held}{promise}: they are numbered from 0 on, and there is one "
            "fewer than "
            "tokens; convert the original again"
        )
    config = _layers(target, count)
    return Network(
        head_shapes(target, count),
        config,
        partial(HeadsNet, config),
        lambda name: name if name.startswith(f"{ROOM}.") else None,
        (target.layer_count - 1,),
    )


def _layers(target: DecoderConfig, count: int) -> DecoderConfig:
    return replace(target, kinds=target.kinds[-1:] * count, sparse=frozenset())


def head_shapes(target: DecoderConfig, count: int) -> Shapes:
    """Name and shape of every tensor of so many heads."""
    shapes = decoder_shapes(_layers(target, count)).items()
    return {
        name.replace("layers.", f"{ROOM}.", 1): shape for name, shape in shapes if name.startswith("layers.")
    }


class HeadsNet(GraphNet):
    """Loaded heads; implements `ParallelNet`."""

    def __init__(self, config: DecoderConfig, weights: Weights, target: GraphTarget) -> None:
        super().__init__(config, target, (target.layer_count - 1,), target.hidden_size, None)
        self.config, self.parallel = config, len(config.kinds)
        inv_freq = inverse_frequencies(config.rotary, config.head_dim).to(weights.device)
        self.heads = tuple(read_layer(weights, config, k, inv_freq, ROOM) for k in range(self.parallel))
        self.norm, self.head = target.norm, target.head
        self._set_store(attention_outputs(self.heads))
        self.feed_graph, self.look_graph = self._feed, self._look

    @property
    def graphs(self) -> list[Graph]:
        return [self.feed_graph, self.look_graph, *super().graphs]

    def feed(self, rows: ForwardBatch, states: Tensor, cache: KVCache) -> None:
        """Write all heads' K/V of rows [N] whose `states` [N, width] the target has computed."""
        self.runner.run(self.feed_graph, rows, cache, {"states": states})

    def look(self, rows: ForwardBatch, states: Tensor, cache: KVCache) -> tuple[Tensor, ...]:
        """The same, and what `logits` takes [N, H] of each head."""
        return self.runner.run(self.look_graph, rows, cache, {"states": states})

    def _feed(self, ops: Ops) -> tuple[Value, ...]:
        x = ops.given("states", self.width)
        for head in self.heads:
            h = ops.rms_norm(x, head.norm_in, self.config.eps)
            assert isinstance(head.attention, Attention)
            store(ops, h, head.attention, self.config)
        return (h,)

    def _look(self, ops: Ops) -> tuple[Value, ...]:
        config, x, out = self.config, ops.given("states", self.width), []
        for head in self.heads:
            y = ops.add(x, attend(ops, ops.rms_norm(x, head.norm_in, config.eps), head.attention, config))
            y = ops.add(y, feed(ops, ops.rms_norm(y, head.norm_post, config.eps), head.mlp))
            out.append(ops.rms_norm(y, self.norm, config.eps))
        return tuple(out)

    def _logits(self, ops: Ops) -> tuple[Value, ...]:
        return (ops.linear(ops.given("hidden", self.hidden_size), self.head),)


NETWORK = NetworkKind(plan_heads, inside=inside)
