"""EAGLE-3 and 3.1: one decoder layer that reads hidden states of three target layers beside the next token's embedding.

It has K/V of its own. Entry p pairs the target's hidden states at position p with token p + 1; further tokens of a draft
take the layer's own output in their place. Sources of truth: speculators' models/eagle3, vLLM's models/llama_eagle3.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from paceline.checkpoints.loading import Shapes, Weights
from paceline.errors import ConfigError, PairError
from paceline.models.drafters.speculators import parse_layers
from paceline.models.drafters.state_net import (
    DrafterFiles,
    Fits,
    Network,
    NetworkKind,
    SteppingNet,
    draft_ids,
    embedding_of,
    head_of,
    misfit,
    table_shapes,
)
from paceline.models.fields import Fields, shown
from paceline.models.layers.attention import Attention, attend, store
from paceline.models.layers.decoder import attention_outputs, decoder_shapes, read_layer
from paceline.models.layers.decoder_config import DecoderConfig
from paceline.models.layers.mlp import feed
from paceline.models.layers.rotary import inverse_frequencies
from paceline.models.target import GraphTarget
from paceline.ops.base import Ops, Value

KIND = "eagle3"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
TAPS = "eagle_aux_hidden_state_layer_ids"
OWN = {"draft_vocab_size", "target_hidden_size", "eagle_config", TAPS, *FLAGS}  # keys


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Of a drafter of one layer. `vocab_size` and `target_hidden_size` are the target's."""

    layer: DecoderConfig
    draft_vocab: int
    target_hidden_size: int
    taps: (
        tuple[int, ...] | None
    )  # decoder layers before the hidden states that it reads; None: as EAGLE-3 chooses
    norm_before_residual: bool = False
    norm_before_fc: bool = False  # one norm over what all taps give
    fc_norm: bool = False  # a norm for each of them
    norm_output: bool = False  # what a further token is drafted from is normed

    def taps_of(self, layers: int) -> tuple[int, ...]:
        """The taps for a target of so many layers. Raises PairError."""
        taps = self.taps or (2, layers // 2, layers - 3)
        if min(taps) < 0 or max(taps) > layers or any(a >= b for a, b in pairwise(taps)):
            raise PairError(
                f"the drafter reads hidden states after layers {list(taps)}, and the target has {layers} layers: use the "
                "drafter that was made for it, or the drafter ngram"
            )
        return taps


def parse_eagle3(raw: Mapping[str, Any]) -> Eagle3Config:
    """The drafter that a config.json describes, in the layout of `speculators` or the original. Raises ConfigError."""
    head = parse_head(raw, KIND)
    if len(head.layer.kinds) != 1:
        raise ConfigError(
            f"eagle3: {len(head.layer.kinds)} layers are not supported, only one: use the drafter ngram"
        )
    return head


def parse_head(raw: Mapping[str, Any], kind: str, own: Collection[str] = ()) -> Eagle3Config:
    """A head of one layer or more, of EAGLE-3 or a relative, whose `own` keys are known, too. Raises ConfigError."""
    fields = Fields(raw, kind)
    layer = parse_layers(raw, kind, OWN.union(own))
    for name in FLAGS:
        fields.refuse(name, (None, True, False), "it is either true or false")
    flags = {name: bool(raw.get(name)) for name in FLAGS}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise ConfigError("eagle3: norm_before_fc and fc_norm exclude each other: download config.json again")
    draft_vocab = fields.size("draft_vocab_size", layer.vocab_size)
    if draft_vocab > layer.vocab_size:
        raise ConfigError(
            f"eagle3: draft_vocab_size is {draft_vocab} of {layer.vocab_size} tokens: download config.json again"
        )
    return Eagle3Config(
        layer,
        draft_vocab,
        fields.size("target_hidden_size", layer.hidden_size),
        _taps(raw),
        **flags,
    )


def _taps(raw: Mapping[str, Any]) -> tuple[int, ...] | None:
    inner = raw.get("eagle_config")
    listed = raw.get(TAPS, inner.get(TAPS) if isinstance(inner, Mapping) else None)
    if listed is None:
        return None
    if not isinstance(listed, list) or not listed or not all(type(x) is int and x >= 0 for x in listed):
        raise ConfigError(f"eagle3: {TAPS} is {shown(listed)}, not layer numbers: download config.json again")
    if any(a >= b for a, b in pairwise(listed)):
        raise ConfigError(f"eagle3: {TAPS} {listed} do not rise: download config.json again")
    return tuple(listed)


def plan_eagle3(files: DrafterFiles, fits: Fits | None) -> Network:
    """What is to be loaded. Raises ConfigError, WeightsError and, for another target's drafter, PairError."""
    config = parse_eagle3(files.raw)
    taps = check_eagle3(config, files, fits)
    shapes = eagle3_shapes(config, len(taps), files)
    return Network(shapes, config.layer, partial(Eagle3Net, config), taps=taps)


def check_eagle3(config: Eagle3Config, files: DrafterFiles, fits: Fits | None) -> tuple[int, ...]:
    """The taps. Raises PairError for another target's drafter."""
    if fits is None:
        return config.taps or (0, 0, 0)
    misfit(files, KIND, fits, config.target_hidden_size, config.layer.vocab_size)
    return config.taps_of(fits.layer_count)


def eagle3_shapes(config: Eagle3Config, taps: int, files: DrafterFiles) -> Shapes:
    """Name and shape of every tensor; what may be missing only where `files` has it."""
    layer, hidden, wide = config.layer, config.layer.hidden_size, taps * config.target_hidden_size
    shapes = decoder_shapes(layer)
    for name in ("q_proj", "k_proj", "v_proj"):
        shapes[f"layers.0.self_attn.{name}.weight"] = (
            shapes[f"layers.0.self_attn.{name}.weight"][0],
            2 * hidden,
        )
    shapes |= {"fc.weight": (hidden, wide), "layers.0.hidden_norm.weight": (hidden,)}
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (wide,)
    if config.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (config.target_hidden_size,) for i in range(taps)}
    del shapes["embed_tokens.weight"]
    return shapes | table_shapes(files, layer, config.draft_vocab)


class Eagle3Net(SteppingNet):
    """A loaded drafter network; implements `StateNet`."""

    def __init__(self, config: Eagle3Config, weights: Weights, target: GraphTarget) -> None:
        layer, taps = config.layer, config.taps_of(target.layer_count)
        ids = draft_ids(weights, config.draft_vocab, layer.vocab_size)
        super().__init__(layer, target, taps, len(taps) * config.target_hidden_size, ids)
        self.config = config
        self.fc = weights.matrix("fc")
        self.norms_in = (
            tuple(weights.norm(f"fc_norm.{i}") for i in range(len(taps))) if config.fc_norm else ()
        )
        self.norm_in = weights.norm("input_norm") if config.norm_before_fc else None
        inv_freq = inverse_frequencies(layer.rotary, layer.head_dim).to(weights.device)
        self.layer = read_layer(weights, layer, 0, inv_freq)
        self.hidden_norm, self.norm = weights.norm("layers.0.hidden_norm"), weights.norm("norm")
        self.embedding, self.embedding_scale = embedding_of(weights, target, layer.hidden_size)
        self.head = head_of(weights, target, layer.hidden_size, ids)
        self._set_store(attention_outputs([self.layer]))

    def seen(self, ops: Ops) -> Value:
        """What the layer reads of the target's hidden states, `states`."""
        x, eps = ops.given("states", self.width), self.config.layer.eps
        if self.norm_in is not None:
            x = ops.rms_norm(x, self.norm_in, eps)
        if self.norms_in:
            each = self.config.target_hidden_size
            whole = None
            for i, norm in enumerate(self.norms_in):
                part = ops.rms_norm(ops.columns(x, i * each, (i + 1) * each), norm, eps)
                whole = part if whole is None else ops.concat(whole, part)
            x = whole
        return ops.linear(x, self.fc)

    def keep(self, ops: Ops, x: Value, token: Value | None = None) -> Value:
        """Write K/V of rows."""
        attention = self.layer.attention
        if not isinstance(attention, Attention):
            return self.through(ops, x, token)[0]
        both, _ = self._inputs(ops, x, token)
        store(ops, both, attention, self.config.layer)
        return both

    def through(self, ops: Ops, x: Value, token: Value | None = None) -> tuple[Value, Value]:
        """(what the next step takes, what the head reads)."""
        config, layer = self.config.layer, self.layer
        both, h = self._inputs(ops, x, token)
        x = ops.add(h if self.config.norm_before_residual else x, attend(ops, both, layer.attention, config))
        x = self._beyond(ops, ops.add(x, feed(ops, ops.rms_norm(x, layer.norm_post, config.eps), layer.mlp)))
        normed = ops.rms_norm(x, self.norm, config.eps)
        return (normed if self.config.norm_output else x), normed

    def _beyond(self, ops: Ops, x: Value) -> Value:
        """What further layers make of the first one's rows; EAGLE-3 has none."""
        return x

    def _inputs(self, ops: Ops, x: Value, token: Value | None) -> tuple[Value, Value]:
        """(what attention reads, the normed state in it)."""
        eps = self.config.layer.eps
        token = self._embed(ops)[0] if token is None else token
        h = ops.rms_norm(x, self.hidden_norm, eps)
        return ops.concat(ops.rms_norm(token, self.layer.norm_in, eps), h), h


NETWORK = NetworkKind(plan_eagle3, parse_eagle3)
