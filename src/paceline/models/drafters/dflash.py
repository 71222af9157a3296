"""DFlash: a block of masked positions drafted in one forward, over K/V that are made of the target's hidden states.

Entry p holds, in each layer, keys and values of hidden_norm(fc(states of row p)); no token goes into it. A draft is a
block: the text's last token and masks behind it, which see all entries and each other. In a layer with a window a row
sees the last so many keys, and `sliding_window_non_causal: false` hides the rows behind it from it there. Sources of
truth: z-lab's dflash/model.py, speculators' models/dflash; where a window ends, as vLLM and transformers run it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.checkpoints.loading import Shapes, Weights, read_entries
from paceline.core import ForwardBatch
from paceline.errors import ConfigError, PairError
from paceline.kv.cache import KVCache
from paceline.models.drafters.base import FINAL
from paceline.models.drafters.speculators import parse_layers, windows_of
from paceline.models.drafters.state_net import (
    Fits,
    GraphNet,
    Network,
    draft_ids,
    embedding_of,
    head_of,
    misfit,
)
from paceline.models.fields import Fields, shown
from paceline.models.layers.attention import Attention, store
from paceline.models.layers.decoder import attention_outputs, decoder_shapes, read_layer
from paceline.models.layers.decoder_config import DecoderConfig
from paceline.models.layers.mlp import feed
from paceline.models.layers.rotary import inverse_frequencies
from paceline.models.target import GraphTarget
from paceline.ops.base import Graph, Ops, Value

KIND = "dflash"
TAPS, INNER, CAUSAL = "aux_hidden_state_layer_ids", "dflash_config", "sliding_window_non_causal"
OWN = {
    "block_size", "draft_vocab_size", "target_hidden_size", "mask_token_id", "num_target_layers", "sample_from_anchor",
    TAPS, INNER, CAUSAL,
}  # fmt: skip
KNOWN = ("mask_token_id", "target_layer_ids")  # of its inner keys


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """`vocab_size` of the layers and `target_hidden_size` are the target's."""

    layers: DecoderConfig
    draft_vocab: int
    target_hidden_size: int
    target_layers: int | None
    taps: tuple[int, ...]  # decoder layers before the hidden states that it reads
    block: int  # rows of a draft, the text's last token included
    mask: int  # the token of all others
    first: int  # the row that gives the first token of a draft
    normed: bool  # the state after all layers is that after the final norm, as transformers gives it
    windows: tuple[int | None, ...]  # of each layer: how many keys a row sees, itself included; None: all
    causal: bool  # in layers with a window a row does not see those of its block behind it

    def taps_of(self, layers: int) -> tuple[int, ...]:
        """The taps for a target of so many layers. Raises PairError."""
        if max(self.taps) > layers:
            raise PairError(
                f"the drafter reads hidden states after layers {list(self.taps)}, and the target has {layers} layers: "
                "use the drafter that was made for it, or the drafter ngram"
            )
        return tuple(FINAL if self.normed and tap == layers else tap for tap in self.taps)


def parse_dflash(raw: Mapping[str, Any]) -> DFlashConfig:
    """The drafter that a config.json describes, in the layout of `speculators` or the original. Raises ConfigError."""
    layers, fields = parse_layers(raw, KIND, OWN, slides=True), Fields(raw, KIND)
    inner = raw.get(INNER) or {}
    if not isinstance(inner, Mapping):
        raise ConfigError(f"dflash: {INNER} is {shown(inner)}, not an object: download config.json again")
    if unknown := [
        key for key, value in inner.items() if key not in KNOWN and value not in (None, False, "")
    ]:
        raise ConfigError(
            f"dflash: {INNER}.{unknown[0]}={shown(inner[unknown[0]])} is not known to this version, which would draft "
            "without it: update paceline, or use the drafter ngram"
        )
    for name in ("sample_from_anchor", CAUSAL):
        fields.refuse(name, (None, True, False), "it is either true or false")
    original = raw.get(TAPS) is None
    said = inner.get("target_layer_ids") if original else raw[TAPS]
    if not isinstance(said, list) or not said or not all(type(x) is int and x >= 0 for x in said):
        where = f"{INNER}.target_layer_ids" if original else TAPS
        raise ConfigError(f"dflash: {where} is {shown(said)}, not layer numbers: download config.json again")
    mask = raw.get("mask_token_id", inner.get("mask_token_id"))
    if type(mask) is not int or not 0 <= mask < layers.vocab_size:
        raise ConfigError(
            f"dflash: mask_token_id is {shown(mask)}, no token of a vocabulary of {layers.vocab_size}: download "
            "config.json again"
        )
    return DFlashConfig(
        layers,
        fields.size("draft_vocab_size", layers.vocab_size),
        fields.size("target_hidden_size", layers.hidden_size),
        fields.size("num_target_layers") if raw.get("num_target_layers") is not None else None,
        tuple(tap + original for tap in said),  # the original counts the embedding as the first state
        fields.size("block_size", least=2),
        mask,
        0 if raw.get("sample_from_anchor") else 1,
        original,
        windows_of(raw),
        raw.get(CAUSAL)
        is False,  # vLLM, too, takes a file that does not say for one whose rows see each other
    )


def plan_dflash(folder: Path, raw: Mapping[str, Any], fits: Fits | None, names: tuple[str, str]) -> Network:
    """What of `folder` is to be loaded. Raises ConfigError, WeightsError and, for another target's drafter, PairError."""
    config = parse_dflash(raw)
    taps = config.taps
    if fits is not None:
        misfit(names, KIND, fits, config.target_hidden_size, config.layers.vocab_size, config.target_layers)
        taps = config.taps_of(fits.layer_count)
    return Network(dflash_shapes(config, folder), config.layers, partial(DFlashNet, config), taps=taps)


def dflash_shapes(config: DFlashConfig, folder: Path) -> Shapes:
    """Name and shape of every tensor; what may be missing only where `folder` has it."""
    layers, given = config.layers, read_entries(folder)
    hidden = layers.hidden_size
    shapes = decoder_shapes(layers) | {
        "fc.weight": (hidden, len(config.taps) * config.target_hidden_size),
        "hidden_norm.weight": (hidden,),
    }
    del shapes["embed_tokens.weight"]
    optional: Shapes = {
        "embed_tokens.weight": (layers.vocab_size, hidden),
        "lm_head.weight": (config.draft_vocab, hidden),
        "d2t": (config.draft_vocab,),
        "t2d": (layers.vocab_size,),
    }
    return shapes | {name: shape for name, shape in optional.items() if name in given}


class DFlashNet(GraphNet):
    """A loaded drafter network; implements `BlockNet`."""

    shift = 0

    def __init__(self, config: DFlashConfig, weights: Weights, target: GraphTarget) -> None:
        layers, taps = config.layers, config.taps_of(target.layer_count)
        ids = draft_ids(weights, config.draft_vocab, layers.vocab_size)
        super().__init__(layers, target, taps, len(taps) * config.target_hidden_size, ids)
        self.config = config
        self.block, self.mask, self.first = config.block, config.mask, config.first
        self.fc = weights.matrix("fc")
        inv_freq = inverse_frequencies(layers.rotary, layers.head_dim).to(weights.device)
        self.layers = tuple(read_layer(weights, layers, i, inv_freq) for i in range(len(layers.kinds)))
        self.hidden_norm, self.norm = weights.norm("hidden_norm"), weights.norm("norm")
        self.embedding, self.embedding_scale = embedding_of(weights, target, layers.hidden_size)
        self.head = head_of(weights, target, layers.hidden_size, ids)
        self._set_store(attention_outputs(self.layers))
        self.absorb_graph, self.block_graph = self._absorb, self._block

    @property
    def graphs(self) -> list[Graph]:
        return [self.absorb_graph, self.block_graph, *super().graphs]

    def absorb(self, rows: ForwardBatch, states: Tensor, cache: KVCache) -> None:
        """Write K/V of rows [N] whose `states` [N, width] the target has computed."""
        self.runner.run(self.absorb_graph, rows, cache, {"states": states})

    def block_states(self, rows: ForwardBatch, cache: KVCache) -> Tensor:
        """What the head reads of whole blocks of rows [N, H]; writes K/V behind the entries."""
        return self.runner.run(self.block_graph, rows, cache, {})[0]

    def _absorb(self, ops: Ops) -> tuple[Value, ...]:
        config = self.config.layers
        x = ops.rms_norm(ops.linear(ops.given("states", self.width), self.fc), self.hidden_norm, config.eps)
        for layer in self.layers:
            assert isinstance(layer.attention, Attention)
            store(ops, x, layer.attention, config)
        return (x,)

    def _block(self, ops: Ops) -> tuple[Value, ...]:
        config = self.config.layers
        x = ops.embed(ops.tokens(), self.embedding, self.embedding_scale)
        for layer, window in zip(self.layers, self.config.windows, strict=True):
            a, h = layer.attention, ops.rms_norm(x, layer.norm_in, config.eps)
            assert isinstance(a, Attention)
            assert a.inv_freq is not None
            store(ops, h, a, config)
            q = a.q(ops, h)
            if a.q_norm is not None:
                q = ops.rms_norm(q, a.q_norm, config.eps, config.heads)
            q = ops.rotary(q, a.inv_freq, config.heads, config.rotary.attention)
            q = ops.scale(q, config.head_dim**-0.5)
            if window is not None and self.config.causal:
                y = ops.attention(q, a.storage, config.heads, window, sees_itself=True)
            else:
                y = ops.block_attention(q, a.storage, config.heads, window)
            x = ops.add(x, a.o(ops, y))
            x = ops.add(x, feed(ops, ops.rms_norm(x, layer.norm_post, config.eps), layer.mlp))
        return (ops.rms_norm(x, self.norm, config.eps),)

    def _logits(self, ops: Ops) -> tuple[Value, ...]:
        return (ops.linear(ops.given("hidden", self.hidden_size), self.head),)
