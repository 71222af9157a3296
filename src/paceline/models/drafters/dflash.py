"""DFlash: a block of masked positions drafted in one forward, over K/V that are made of the target's hidden states.

Entry p holds, in each layer, keys and values of hidden_norm(fc(states of row p)); no token goes into it. A draft is a
block: the text's last token and masks behind it, which see all entries and each other. In a layer with a window a row
sees the last so many keys, and `sliding_window_non_causal: false` hides the rows behind it from it there. Sources of
truth: z-lab's dflash/model.py, speculators' models/dflash; where a window ends, as vLLM and transformers run it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from paceline.checkpoints.loading import Rename, Shapes, Weights
from paceline.core import ForwardBatch
from paceline.errors import ConfigError, PairError, WeightsError
from paceline.kv.cache import KVCache
from paceline.models.drafters.base import FINAL
from paceline.models.drafters.speculators import parse_layers, windows_of
from paceline.models.drafters.state_net import (
    DrafterFiles,
    Fits,
    MaskedNet,
    Network,
    NetworkKind,
    draft_ids,
    embedding_of,
    head_of,
    misfit,
    table_shapes,
)
from paceline.models.fields import Fields, shown
from paceline.models.layers.attention import Attention, store
from paceline.models.layers.decoder import attention_outputs, decoder_shapes, read_layer
from paceline.models.layers.decoder_config import DecoderConfig
from paceline.models.layers.mlp import feed
from paceline.models.layers.rotary import inverse_frequencies
from paceline.models.target import GraphTarget
from paceline.ops.base import Graph, Ops, Value, Weight

KIND = "dflash"
TAPS, INNER, CAUSAL = "aux_hidden_state_layer_ids", "dflash_config", "sliding_window_non_causal"
THEIR_TAPS = "target_layer_ids"  # of the originals
PROJECTOR = "projector_type"
# as NVIDIA's files say that rows do not see those behind them, that heads have sinks, and where windows end
SINKS, STORED_SINKS, QUERY_CAUSAL, BLOCK_CAUSAL = (
    "attention_sink_bias",
    "sinks",
    "dflash_query_causal",
    "causal",
)
WINDOWED = ("use_swa", "swa_window_size")
# how it was trained, and sizes of Domino's head, which `speculators` writes for all; PROJECTOR says whether there is one
TRAINED = {
    "max_anchors", "num_anchors", "auf", "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim", "lambda_base_start",
    "lambda_base_decay_ratio",
}  # fmt: skip
OWN = {
    "block_size", "draft_vocab_size", "target_hidden_size", "mask_token_id", "num_target_layers", "sample_from_anchor",
    TAPS, INNER, CAUSAL, THEIR_TAPS, PROJECTOR, SINKS, QUERY_CAUSAL, *TRAINED,
}  # fmt: skip
# of its inner keys; the last two are how other engines run it
KNOWN = (
    "mask_token_id", THEIR_TAPS, "num_target_layers", "block_size", PROJECTOR, SINKS, BLOCK_CAUSAL, *WINDOWED,
    "sample_from_anchor", "runtime_block_size", "draft_window_size",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kin:
    """What a relative of DFlash has beyond it in config.json."""

    kind: str
    own: Collection[str] = ()  # keys
    inner: Collection[str] = ()  # keys inside of `dflash_config`


PLAIN = Kin(KIND)


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
    return parse_block(raw, PLAIN)


def parse_block(raw: Mapping[str, Any], kin: Kin, layers: DecoderConfig | None = None) -> DFlashConfig:
    """The block and its layers of DFlash or a relative, unless these are given. Raises ConfigError."""
    kind, fields = kin.kind, Fields(raw, kin.kind)
    inner = inner_of(raw, kin)
    layers = layers or parse_layers(raw, kind, OWN.union(kin.own), slides=True)
    both = {**inner, **{key: value for key, value in raw.items() if value is not None}}
    for name in ("sample_from_anchor", CAUSAL, SINKS, QUERY_CAUSAL, BLOCK_CAUSAL):
        Fields(both, kind).refuse(name, (None, True, False), "it is either true or false")
    for said in (fields, Fields(inner, f"{kind}: {INNER}")):
        said.refuse(PROJECTOR, (None, KIND, kind), "its head is not read; use the drafter ngram")
    original = raw.get(TAPS) is None
    name = (
        TAPS if not original else THEIR_TAPS if raw.get(THEIR_TAPS) is not None else f"{INNER}.{THEIR_TAPS}"
    )
    taps = inner.get(THEIR_TAPS) if "." in name else raw[name]
    least = -1 if original else 0  # the original counts the embedding as the first state
    if not isinstance(taps, list) or not taps or not all(type(x) is int and x >= least for x in taps):
        raise ConfigError(f"{kind}: {name} is {shown(taps)}, not layer numbers: download config.json again")
    mask = raw.get("mask_token_id", inner.get("mask_token_id"))
    if type(mask) is not int or not 0 <= mask < layers.vocab_size:
        raise ConfigError(
            f"{kind}: mask_token_id is {shown(mask)}, no token of a vocabulary of {layers.vocab_size}: download "
            "config.json again"
        )
    if raw.get("block_size") is not None and inner.get("block_size") not in (None, raw["block_size"]):
        raise ConfigError(
            f"{kind}: block_size is {shown(raw['block_size'])}, and {shown(inner['block_size'])} in {INNER}: download "
            "config.json again"
        )
    windows, causal = windows_of(raw), raw.get(CAUSAL) is False
    _check_windows(both, windows, kind)
    if any(both.get(name) for name in (SINKS, QUERY_CAUSAL, BLOCK_CAUSAL)):
        causal = _query_causal(both, windows, kind)
        layers = replace(layers, sinks=both.get(SINKS) is True)
    return DFlashConfig(
        layers,
        fields.size("draft_vocab_size", layers.vocab_size),
        fields.size("target_hidden_size", layers.hidden_size),
        Fields(both, kind).size("num_target_layers") if both.get("num_target_layers") is not None else None,
        tuple(tap + original for tap in taps),
        Fields(both, kind).size("block_size", least=2),
        mask,
        0 if both.get("sample_from_anchor") else 1,
        original,
        windows,
        causal,
    )


def _check_windows(both: Mapping[str, Any], windows: tuple[int | None, ...], kind: str) -> None:
    """Raise ConfigError where NVIDIA's words for them say something else."""
    fields, slides = Fields(both, kind), any(window is not None for window in windows)
    fields.refuse(WINDOWED[0], (None, slides), "it is not what its layers have; download config.json again")
    if slides and both.get(WINDOWED[0]):
        fields.refuse(WINDOWED[1], (None, *windows), "it is not the window of its layers; download it again")


def _query_causal(both: Mapping[str, Any], windows: tuple[int | None, ...], kind: str) -> bool:
    """That no row of a block sees one behind it. Raises ConfigError where a layer would have to."""
    ways = {both[name] for name in (QUERY_CAUSAL, BLOCK_CAUSAL) if both.get(name) is not None}
    if ways != {True} or both.get(CAUSAL) is True or None in windows:
        raise ConfigError(
            f"{kind}: heads with sinks, or rows that do not see those behind them, are read where both are said and all "
            "layers have a window: use the drafter ngram"
        )
    return True


def renamed(config: DFlashConfig) -> Rename | None:
    """What tensors of a file are called here, where that is another name."""
    return (lambda name: name.replace(SINKS, STORED_SINKS)) if config.layers.sinks else None


def inner_of(raw: Mapping[str, Any], kin: Kin = PLAIN) -> Mapping[str, Any]:
    """`dflash_config`, all of whose keys are known. Raises ConfigError."""
    inner = raw.get(INNER) or {}
    if not isinstance(inner, Mapping):
        raise ConfigError(f"{kin.kind}: {INNER} is {shown(inner)}, not an object: download config.json again")
    known = {*KNOWN, *kin.inner}
    if unknown := [
        key for key, value in inner.items() if key not in known and value not in (None, False, "")
    ]:
        raise ConfigError(
            f"{kin.kind}: {INNER}.{unknown[0]}={shown(inner[unknown[0]])} is not known to this version, which would "
            "draft without it: update paceline, or use the drafter ngram"
        )
    return inner


def plan_dflash(files: DrafterFiles, fits: Fits | None) -> Network:
    """What is to be loaded. Raises ConfigError, WeightsError and, for another target's drafter, PairError."""
    config = parse_dflash(files.raw)
    taps = check_block(config, KIND, files, fits)
    build = partial(DFlashNet, config)
    return Network(dflash_shapes(config, files), config.layers, build, renamed(config), taps)


def check_block(config: DFlashConfig, kind: str, files: DrafterFiles, fits: Fits | None) -> tuple[int, ...]:
    """The taps. Raises PairError for another target's drafter."""
    if fits is None:
        return config.taps
    misfit(files, kind, fits, config.target_hidden_size, config.layers.vocab_size, config.target_layers)
    return config.taps_of(fits.layer_count)


def last_state_too(config: DFlashConfig, files: DrafterFiles, kind: str) -> DFlashConfig:
    """With the target's last state as a further tap where `fc` has the width for it. Raises WeightsError.

    Some cards say that it is read, and no config lists it.
    """
    entry = files.entries.get("fc.weight")
    if entry is None or len(entry.shape) != 2:
        return config
    width, each, count = entry.shape[1], config.target_hidden_size, len(config.taps)
    if width == (count + 1) * each:
        return replace(config, taps=(*config.taps, FINAL))
    if width != count * each:
        raise WeightsError(
            f"{files.folder}: fc ({kind}) reads {width} columns, which are neither the {count} layers that config.json "
            f"lists, of {each} columns each, nor one more: config.json is of another drafter, download both again"
        )
    return config


def dflash_shapes(config: DFlashConfig, files: DrafterFiles, own: Shapes | None = None) -> Shapes:
    """Name and shape of every tensor; what may be missing only where `files` has it. `own`: of other layers."""
    shapes = block_shapes(config)
    if own is not None:
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith("layers.")} | own
    return shapes | table_shapes(files, config.layers, config.draft_vocab)


def block_shapes(config: DFlashConfig) -> Shapes:
    """Of what is never missing."""
    hidden = config.layers.hidden_size
    shapes = decoder_shapes(config.layers) | {
        "fc.weight": (hidden, len(config.taps) * config.target_hidden_size),
        "hidden_norm.weight": (hidden,),
    }
    del shapes["embed_tokens.weight"]
    return shapes


class DFlashNet(MaskedNet):
    """A loaded drafter network; implements `BlockNet`."""

    def __init__(self, config: DFlashConfig, weights: Weights, target: GraphTarget) -> None:
        layers, taps = config.layers, config.taps_of(target.layer_count)
        ids = draft_ids(weights, config.draft_vocab, layers.vocab_size)
        super().__init__(layers, target, taps, len(taps) * config.target_hidden_size, ids)
        self.config = config
        self.block, self.mask, self.first = config.block, config.mask, config.first
        self.fc = weights.matrix("fc")
        outputs = self._read_layers(weights)
        self.hidden_norm, self.norm = weights.norm("hidden_norm"), weights.norm("norm")
        self.embedding, self.embedding_scale = embedding_of(weights, target, layers.hidden_size)
        self.head = head_of(weights, target, layers.hidden_size, ids)
        self._set_store(outputs)
        self.absorb_graph, self.block_graph = self._absorb, self._block

    @property
    def graphs(self) -> list[Graph]:
        return [self.absorb_graph, self.block_graph, *super().graphs]

    def _read_layers(self, weights: Weights) -> list[Weight]:
        """Take the layers; what the results of attention are multiplied with."""
        layers = self.config.layers
        inv_freq = inverse_frequencies(layers.rotary, layers.head_dim).to(weights.device)
        self.layers = tuple(read_layer(weights, layers, i, inv_freq) for i in range(len(layers.kinds)))
        return attention_outputs(self.layers)

    def absorb(self, rows: ForwardBatch, states: Tensor, cache: KVCache) -> None:
        """Write K/V of rows [N] whose `states` [N, width] the target has computed."""
        self.runner.run(self.absorb_graph, rows, cache, {"states": states})

    def block_states(self, rows: ForwardBatch, cache: KVCache) -> Tensor:
        """What the head reads of whole blocks of rows [N, H]; writes K/V behind the entries."""
        return self.runner.run(self.block_graph, rows, cache, {})[0]

    def _absorb(self, ops: Ops) -> tuple[Value, ...]:
        x = self.seen(ops)
        self.keep(ops, x)
        return (x,)

    def keep(self, ops: Ops, x: Value) -> None:
        """Write all layers' K/V of what they read of the target."""
        for layer in self.layers:
            assert isinstance(layer.attention, Attention)
            store(ops, x, layer.attention, self.config.layers)

    def _block(self, ops: Ops) -> tuple[Value, ...]:
        return (self.through(ops, ops.embed(ops.tokens(), self.embedding, self.embedding_scale)),)

    def seen(self, ops: Ops) -> Value:
        """Of the input `states` what all layers make their K/V of."""
        x = ops.linear(ops.given("states", self.width), self.fc)
        return ops.rms_norm(x, self.hidden_norm, self.config.layers.eps)

    def through(self, ops: Ops, x: Value) -> Value:
        """Of embedded rows of whole blocks what the head reads; writes their K/V."""
        config = self.config.layers
        for i, layer in enumerate(self.layers):
            h = ops.rms_norm(x, layer.norm_in, config.eps)
            x = ops.add(x, self._around(ops, h, i, "attention", partial(self._attended, ops, i)))
            h = ops.rms_norm(x, layer.norm_post, config.eps)
            x = ops.add(x, self._around(ops, h, i, "mlp", partial(feed, ops, mlp=layer.mlp)))
        return ops.rms_norm(x, self.norm, config.eps)

    def _around(self, ops: Ops, h: Value, layer: int, name: str, inner: Callable[[Value], Value]) -> Value:
        """What a sublayer ("attention" or "mlp") of `layer` adds, of its normed rows; relatives mix rows around it."""
        return inner(h)

    def _attended(self, ops: Ops, index: int, h: Value) -> Value:
        """Attention of layer `index` over all entries and the block."""
        config, window, a = self.config.layers, self.config.windows[index], self.layers[index].attention
        assert isinstance(a, Attention)
        assert a.inv_freq is not None
        store(ops, h, a, config)
        q = a.q(ops, h)
        if a.q_norm is not None:
            q = ops.rms_norm(q, a.q_norm, config.eps, config.heads)
        q = ops.rotary(q, a.inv_freq, config.heads, config.rotary.attention)
        q = ops.scale(q, config.head_dim**-0.5)
        if window is not None and self.config.causal:
            y = (
                ops.attention(q, a.storage, config.heads, window, sees_itself=True)
                if a.sinks is None
                else ops.sink_attention(q, a.storage, window, a.sinks)
            )
        else:
            y = ops.block_attention(q, a.storage, config.heads, window)
        return a.o(ops, y)

    def _logits(self, ops: Ops) -> tuple[Value, ...]:
        return (ops.linear(ops.given("hidden", self.hidden_size), self.head),)


NETWORK = NetworkKind(plan_dflash, parse_dflash)
