"""P-EAGLE (arXiv 2602.01469): an EAGLE-3 head that drafts side by side, of several layers.

A draft begins with EAGLE-3's last entry. Behind it stand slots with the mask token's embedding and, in place of the
target's states, one learned row, `mask_hidden`: each sees all before it and gives the next token. Only the first layer
reads an embedding. Source of truth: speculators' models/peagle, vLLM's llama_eagle3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from paceline.checkpoints.loading import Shapes, Weights
from paceline.core import ForwardBatch
from paceline.drafter_kinds import PARALLEL_KEYS
from paceline.errors import ConfigError, WeightsError
from paceline.kv.cache import KVCache
from paceline.models.drafters.dflash import INNER
from paceline.models.drafters.eagle3 import (
    Eagle3Config,
    Eagle3Net,
    check_eagle3,
    eagle3_shapes,
    parse_head,
)
from paceline.models.drafters.state_net import (
    DrafterFiles,
    Fits,
    Network,
    NetworkKind,
)
from paceline.models.fields import shown
from paceline.models.layers.attention import attend
from paceline.models.layers.decoder import Layer, attention_outputs, read_layer
from paceline.models.layers.mlp import feed
from paceline.models.layers.rotary import inverse_frequencies
from paceline.models.target import GraphTarget
from paceline.ops.base import Graph, Ops, Value

KIND, STATES = "peagle", "mask_hidden"
OWN = {*PARALLEL_KEYS, INNER}
MASKS = PARALLEL_KEYS[:3]  # what a mask token is called


@dataclass(frozen=True, slots=True)
class PEagleConfig:
    head: Eagle3Config
    mask: int  # the token of all slots but the first


def parse_peagle(raw: Mapping[str, Any]) -> PEagleConfig:
    """The drafter that a config.json describes. Raises ConfigError."""
    head, inner = parse_head(raw, KIND, OWN), raw.get(INNER) or {}
    if not isinstance(inner, Mapping) or any(
        key not in MASKS for key, value in inner.items() if value is not None
    ):
        raise ConfigError(
            f"peagle: {INNER} is {shown(inner)}, of which only a mask token is known: use the drafter ngram"
        )
    mask = next((x for x in (inner.get(MASKS[0]), *(raw.get(name) for name in MASKS)) if x is not None), None)
    if type(mask) is not int or not 0 <= mask < head.layer.vocab_size:
        raise ConfigError(
            f"peagle: mask_token_id is {shown(mask)}, no token of a vocabulary of {head.layer.vocab_size}: download "
            "config.json again"
        )
    return PEagleConfig(head, mask)


def plan_peagle(files: DrafterFiles, fits: Fits | None) -> Network:
    """What is to be loaded. Raises ConfigError, WeightsError and, for another target's drafter, PairError."""
    config = parse_peagle(files.raw)
    taps = check_eagle3(config.head, files, fits)
    shapes = eagle3_shapes(config.head, len(taps), files)
    shapes |= _mask_shape(files, len(taps) * config.head.target_hidden_size)
    return Network(shapes, config.head.layer, partial(PEagleNet, config), taps=taps)


def _mask_shape(files: DrafterFiles, width: int) -> Shapes:
    entry = files.entries.get(STATES)
    if entry is None or entry.shape not in ((1, 1, width), (1, width)):
        what = "no mask_hidden" if entry is None else f"mask_hidden has shape {list(entry.shape)}"
        raise WeightsError(
            f"{files.folder}: {what}, where a P-EAGLE head has one row of {width}: download it again"
        )
    return {STATES: entry.shape}


class PEagleNet(Eagle3Net):
    """A loaded drafter network; implements `SlotsNet`."""

    def __init__(self, config: PEagleConfig, weights: Weights, target: GraphTarget) -> None:
        super().__init__(config.head, weights, target)
        layers = config.head.layer
        inv_freq = inverse_frequencies(layers.rotary, layers.head_dim).to(weights.device)
        self.mask, self.sees = config.mask, False
        self.mask_states = weights.exact(STATES).reshape(1, -1)
        self.deeper: tuple[Layer, ...] = tuple(
            read_layer(weights, layers, i, inv_freq) for i in range(1, len(layers.kinds))
        )
        self._set_store(attention_outputs([self.layer, *self.deeper]))

    @property
    def graphs(self) -> list[Graph]:
        return [self.absorb_graph, self.logits_graph]

    def look(self, rows: ForwardBatch, states: Tensor, cache: KVCache) -> Tensor:
        """Write K/V of rows [N] whose `states` [N, width] are given; what `logits` takes [N, H]."""
        return self.absorb(rows, states, cache)[1]

    def feed(self, rows: ForwardBatch, states: Tensor, cache: KVCache) -> None:
        """Write the same K/V: those of the deeper layers need the whole of those before."""
        self.absorb(rows, states, cache)

    def _beyond(self, ops: Ops, x: Value) -> Value:
        config = self.config.layer
        for layer in self.deeper:
            x = ops.add(x, attend(ops, ops.rms_norm(x, layer.norm_in, config.eps), layer.attention, config))
            x = ops.add(x, feed(ops, ops.rms_norm(x, layer.norm_post, config.eps), layer.mlp))
        return x


NETWORK = NetworkKind(plan_peagle, parse_peagle)
