"""EAGLE-3 and 3.1: one decoder layer that reads hidden states of three target layers beside the next token's embedding.

It has K/V of its own. Entry p pairs the target's hidden states at position p with token p + 1; further tokens of a draft
take the layer's own output in their place. Sources of truth: speculators' models/eagle3, vLLM's models/llama_eagle3.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.core import ForwardBatch
from paceline.errors import ConfigError, PairError, WeightsError
from paceline.kv.cache import KVCache, StoreType
from paceline.kv.layout import Layout
from paceline.models.config import FULL, SLIDING
from paceline.models.decoder import (
    attend,
    decoder_layout,
    decoder_shapes,
    feed,
    inverse_frequencies,
    read_layer,
)
from paceline.models.decoder_config import DecoderConfig
from paceline.models.families import spec_of
from paceline.models.fields import Fields, shown
from paceline.models.loading import Shapes, Weights, read_entries
from paceline.models.target import GraphTarget, bare_rows
from paceline.ops.base import Drawn, Ops, RoundStart, Rule, Runner, Stop, Value, Weight

LAYERS = ("llama", "qwen3")  # model types that a layer may be of
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
TAPS = "eagle_aux_hidden_state_layer_ids"
# keys that say nothing of the arithmetic, or what is checked elsewhere; any other that is set is refused by name
KNOWN = {
    "speculators_model_type", "speculators_config", "speculators_version", "architectures", "model_type",
    "draft_vocab_size", "target_hidden_size", "transformer_layer_config", "embed_requires_grad", "tie_word_embeddings",
    "dtype", "torch_dtype", "transformers_version", "auto_map", "_name_or_path", "name_or_path", "eagle_config",
    "id2label", "label2id", "return_dict", "chunk_size_feed_forward", "paceline_quantization", TAPS, *FLAGS,
}  # fmt: skip
LAYER_KEYS = {
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers",
    "vocab_size", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings",
    "hidden_act", "attention_bias", "mlp_bias", "initializer_range", "use_cache", "attention_dropout",
    "pretraining_tp", "bos_token_id", "eos_token_id", "pad_token_id", "layer_types", "max_window_layers",
}  # fmt: skip
ELSEWHERE = ("sliding_window", "use_sliding_window", "layer_types", "eos_token_id")  # of its keys
# transformers leaves out of a nested config what has these values
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "qwen3": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_attention_heads": 32,
        "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768,
    },
}  # fmt: skip


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
    nested = raw.get("transformer_layer_config")
    fields = Fields(raw, "eagle3")
    if "speculators_model_type" in raw and not isinstance(nested, Mapping):
        raise ConfigError("eagle3: config.json has no transformer_layer_config: download it again")
    inner: Mapping[str, Any] = nested if isinstance(nested, Mapping) else raw
    known = KNOWN if inner is nested else KNOWN | LAYER_KEYS
    if unknown := [key for key, value in raw.items() if key not in known and value not in (None, False, "")]:
        raise ConfigError(
            f"eagle3: {unknown[0]}={shown(raw[unknown[0]])} is not known to this version, which would draft without it: "
            "update paceline, or use the drafter ngram"
        )
    kind = inner.get("model_type", "qwen3" if inner is nested else "llama")
    if kind not in LAYERS:
        raise ConfigError(
            f"eagle3: a layer of model_type {shown(kind)} is not supported, only {', '.join(LAYERS)}"
        )
    if SLIDING in (inner.get("layer_types") or ()):
        raise ConfigError("eagle3: a layer with a sliding window is not supported: use the drafter ngram")
    plain = {key: value for key, value in inner.items() if key not in ELSEWHERE and value is not None}
    defaults = DEFAULTS[kind] if inner is nested else {}
    layer = spec_of(kind).parse({**defaults, **plain} | {"model_type": kind, "tie_word_embeddings": True})
    assert isinstance(layer, DecoderConfig)
    if len(layer.kinds) != 1:
        raise ConfigError(
            f"eagle3: {len(layer.kinds)} layers are not supported, only one: use the drafter ngram"
        )
    for name in FLAGS:
        fields.refuse(name, (None, True, False), "it is either true or false")
    flags = {name: bool(raw.get(name)) for name in FLAGS}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise ConfigError("eagle3: norm_before_fc and fc_norm exclude each other: download config.json again")
    return Eagle3Config(
        replace(layer, kinds=(FULL,)),
        fields.size("draft_vocab_size", layer.vocab_size),
        fields.size("target_hidden_size", layer.hidden_size),
        _taps(raw),
        **flags,
    )


def _taps(raw: Mapping[str, Any]) -> tuple[int, ...] | None:
    inner = raw.get("eagle_config")
    said = raw.get(TAPS, inner.get(TAPS) if isinstance(inner, Mapping) else None)
    if said is None:
        return None
    if not isinstance(said, list) or not said or not all(type(x) is int and x >= 0 for x in said):
        raise ConfigError(f"eagle3: {TAPS} is {shown(said)}, not layer numbers: download config.json again")
    if any(a >= b for a, b in pairwise(said)):
        raise ConfigError(f"eagle3: {TAPS} {said} do not rise: download config.json again")
    return tuple(said)


def eagle3_shapes(config: Eagle3Config, taps: int, folder: Path) -> Shapes:
    """Name and shape of every tensor; what may be missing only where `folder` has it."""
    layer, given = config.layer, read_entries(folder)
    hidden, wide = layer.hidden_size, taps * config.target_hidden_size
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
    optional: Shapes = {
        "embed_tokens.weight": (layer.vocab_size, hidden),
        "lm_head.weight": (config.draft_vocab, hidden),
        "d2t": (config.draft_vocab,),
        "t2d": (layer.vocab_size,),
    }
    del shapes["embed_tokens.weight"]
    return shapes | {name: shape for name, shape in optional.items() if name in given}


def check_eagle3(config: Eagle3Config, target: Any, layers: int, names: tuple[str, str]) -> None:
    """Raise PairError, naming both sides, unless the drafter fits a target (its config or itself) of so many layers."""
    wrong = []
    if config.target_hidden_size != target.hidden_size:
        wrong.append(f"hidden size {config.target_hidden_size} against {target.hidden_size}")
    if config.layer.vocab_size != target.vocab_size:
        wrong.append(f"vocabulary {config.layer.vocab_size} against {target.vocab_size}")
    if config.draft_vocab > config.layer.vocab_size:
        wrong.append(f"draft vocabulary {config.draft_vocab} of {config.layer.vocab_size} tokens")
    if wrong:
        raise PairError(
            f"{names[0]} (eagle3) was made for another target than {names[1]}: {'; '.join(wrong)}. Give the drafter of "
            "this very target, or use the drafter ngram"
        )
    config.taps_of(layers)


class Eagle3Net:
    """A loaded drafter network; implements `StateNet`."""

    def __init__(self, config: Eagle3Config, weights: Weights, target: GraphTarget, runner: Runner) -> None:
        layer = config.layer
        self.config, self.runner, self.dtype, self.device = config, runner, target.dtype, weights.device
        self.taps = config.taps_of(target.layer_count)
        self.hidden_size, self.width = layer.hidden_size, len(self.taps) * config.target_hidden_size
        self.ids = _draft_ids(weights, config)
        self.fc = weights.matrix("fc")
        self.norms_in = (
            tuple(weights.norm(f"fc_norm.{i}") for i in range(len(self.taps))) if config.fc_norm else ()
        )
        self.norm_in = weights.norm("input_norm") if config.norm_before_fc else None
        inv_freq = inverse_frequencies(layer.rotary, layer.head_dim).to(weights.device)
        self.layer = read_layer(weights, layer, 0, inv_freq)
        self.hidden_norm, self.norm = weights.norm("layers.0.hidden_norm"), weights.norm("norm")
        self.embedding, self.embedding_scale = _embedding(weights, target, layer.hidden_size)
        self.head = _head(weights, target, layer.hidden_size, self.ids)
        self.layout: Layout = decoder_layout(layer)
        rounded = self.layer.attention.o.weight.kind == "bfloat16" and runner.packs(self.layout)
        self.kv_dtype: StoreType = "packed" if rounded else self.dtype
        self.max_len = target.max_len
        self._bare: dict[int, ForwardBatch] = {}  # rows for `logits`, by their number
        # one stable object each, see GraphTarget
        self.absorb_graph, self.step_graph, self.logits_graph = self._absorb, self._step, self._logits

    def absorb(self, rows: ForwardBatch, states: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Write K/V of rows whose hidden states the target has computed: (what `step` takes, what `logits` takes)."""
        after, normed = self.runner.run(self.absorb_graph, rows, cache, {"states": states})
        return after, normed

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, hidden_size] -> [M, C], scores of the tokens `ids`."""
        count = hidden.shape[0]
        if count not in self._bare:
            self._bare[count] = bare_rows(hidden)
        (logits,) = self.runner.run(self.logits_graph, self._bare[count], None, {"hidden": hidden})
        return logits

    def step(self, rows: ForwardBatch, hidden: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
        """One more token of a draft: (logits [M, C], what the next step takes)."""
        logits, after = self.runner.run(self.step_graph, rows, cache, {"hidden": hidden})
        return logits, after

    def draft_round(
        self, start: RoundStart, states: Tensor, cache: KVCache, rules: list[Rule], stops: list[Stop]
    ) -> Drawn | None:
        """All steps of a round with their draws in one native call; None on a runner that cannot."""
        return self.runner.draft_round(self.step_graph, start, cache, states, rules, stops)

    def _absorb(self, ops: Ops) -> tuple[Value, ...]:
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
        return self._block(ops, ops.linear(x, self.fc))

    def _step(self, ops: Ops) -> tuple[Value, ...]:
        after, normed = self._block(ops, ops.given("hidden", self.hidden_size))
        return ops.linear(normed, self.head), after

    def _logits(self, ops: Ops) -> tuple[Value, ...]:
        return (ops.linear(ops.given("hidden", self.hidden_size), self.head),)

    def _block(self, ops: Ops, x: Value) -> tuple[Value, Value]:
        """(what the next step takes, what the head reads)."""
        config, layer = self.config.layer, self.layer
        token = ops.embed(ops.tokens(), self.embedding, self.embedding_scale)
        h = ops.rms_norm(x, self.hidden_norm, config.eps)
        both = ops.concat(ops.rms_norm(token, layer.norm_in, config.eps), h)
        x = ops.add(h if self.config.norm_before_residual else x, attend(ops, both, layer.attention, config))
        x = ops.add(x, feed(ops, ops.rms_norm(x, layer.norm_post, config.eps), layer.mlp))
        normed = ops.rms_norm(x, self.norm, config.eps)
        return (normed if self.config.norm_output else x), normed


def _draft_ids(weights: Weights, config: Eagle3Config) -> Tensor | None:
    """The tokens that the head's rows are of, int64 [C]; None: all in order. `d2t` holds what is added to 0, 1, ..."""
    vocab = config.layer.vocab_size
    mask = weights.ids("t2d") if weights.has("t2d") else None
    if not weights.has("d2t"):
        if config.draft_vocab != vocab:
            raise WeightsError(
                f"{weights.folder}: draft_vocab_size is {config.draft_vocab}, but there is no d2t: download it again"
            )
        return None
    offsets = weights.ids("d2t")
    ids = offsets + torch.arange(config.draft_vocab, device=offsets.device)
    right = bool((ids >= 0).all() and (ids < vocab).all()) and len(set(ids.tolist())) == len(ids)
    if not right:
        raise WeightsError(
            f"{weights.folder}: d2t does not lead to {config.draft_vocab} tokens below {vocab}: it holds token id minus "
            "row number of the head, not token ids"
        )
    if mask is not None and (int(mask.ne(0).sum()) != len(ids) or not bool(mask[ids].ne(0).all())):
        raise WeightsError(f"{weights.folder}: t2d and d2t name different tokens: download them again")
    return None if config.draft_vocab == vocab and not bool(offsets.any()) else ids


def _embedding(weights: Weights, target: GraphTarget, hidden: int) -> tuple[Weight, float]:
    if weights.has("embed_tokens.weight"):
        return weights.matrix("embed_tokens"), 1.0
    _same_width(weights, target, hidden, "embed_tokens.weight")
    return target.embedding, target.embedding_scale


def _head(weights: Weights, target: GraphTarget, hidden: int, ids: Tensor | None) -> Weight:
    if weights.has("lm_head.weight"):
        return weights.matrix("lm_head")
    _same_width(weights, target, hidden, "lm_head.weight")
    return target.head if ids is None else target.head.rows(ids)


def _same_width(weights: Weights, target: GraphTarget, hidden: int, name: str) -> None:
    if hidden != target.hidden_size:
        raise WeightsError(
            f"{weights.folder} has no {name}, and the target's is of width {target.hidden_size}, not {hidden}: "
            "download it again"
        )
