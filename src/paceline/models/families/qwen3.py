"""Qwen3, dense and with experts: q and k are normed head by head, and biases are the exception."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.errors import ConfigError
from paceline.models.families import ModelSpec
from paceline.models.fields import Fields, shown
from paceline.models.layers.decoder import DecoderTarget, decoder_layout, decoder_shapes
from paceline.models.layers.decoder_config import DecoderConfig, parse_decoder, sliding_kinds, split_decoder
from paceline.models.spec import FULL, SLIDING, MoeConfig

HEAD_DIM = 128  # where config.json does not say it


def parse_qwen3(raw: Mapping[str, Any]) -> DecoderConfig:
    """Of type `qwen3` or `qwen3_moe`."""
    sparse = raw.get("model_type") == "qwen3_moe"
    biases = ("q_proj", "k_proj", "v_proj", "o_proj") if raw.get("attention_bias") else ()
    plain = raw if sparse or raw.get("head_dim") is not None else {**raw, "head_dim": HEAD_DIM}
    config = parse_decoder(plain, _moe_kinds(raw) if sparse else sliding_kinds(raw))
    config = replace(config, biases=frozenset(biases), head_norms=True)
    return with_experts(config, raw) if sparse else config


def _moe_kinds(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """A window is one for all layers here, whatever `max_window_layers` says, as in transformers."""
    slides = bool(raw.get("use_sliding_window")) and raw.get("sliding_window") is not None
    return (SLIDING if slides else FULL,) * Fields(raw, "qwen3_moe").size("num_hidden_layers")


def with_experts(config: DecoderConfig, raw: Mapping[str, Any]) -> DecoderConfig:
    """The same with the experts that a config.json of Qwen's says. Raises ConfigError."""
    fields = Fields(raw, config.model_type)
    count = fields.size("num_experts" if "num_experts" in raw else "num_local_experts")
    moe = MoeConfig(count, fields.size("num_experts_per_tok"), fields.size("moe_intermediate_size"))
    if moe.top_k > moe.experts:
        raise ConfigError(f"{fields.where}: num_experts_per_tok={moe.top_k} of only {moe.experts} experts")
    step, dense = fields.size("decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) for i in dense):
        raise ConfigError(
            f"{fields.where}: mlp_only_layers={shown(dense)} is no list of layers: download config.json again"
        )
    layers = range(len(config.kinds))
    sparse = frozenset(i for i in layers if i not in dense and (i + 1) % step == 0)
    return replace(config, moe=moe, sparse=sparse, renormalize=bool(raw.get("norm_topk_prob", False)))


SPEC = ModelSpec(parse_qwen3, decoder_shapes, decoder_layout, DecoderTarget, split_decoder)
