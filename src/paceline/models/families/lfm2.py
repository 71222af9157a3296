"""LFM2 and LFM2.5, dense and with experts: short convolutions (layers/short_conv.py) in the place of attention in most
layers, and q and k normed head by head in the others. Source of truth: transformers' models/lfm2 and lfm2_moe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.errors import ConfigError
from paceline.models.families import ModelSpec
from paceline.models.fields import Fields, shown
from paceline.models.layers.decoder import DecoderTarget, decoder_layout, decoder_shapes
from paceline.models.layers.decoder_config import ConvConfig, DecoderConfig, Routing, parse_decoder
from paceline.models.spec import CONV, FULL, MoeConfig

THETA = 1_000_000.0  # where config.json does not say it
MOST_TAPS = 16  # rows of a convolution
INNER = ("block_ff_dim", "intermediate_size")


def parse_lfm2(raw: Mapping[str, Any]) -> DecoderConfig:
    """Of type `lfm2` or `lfm2_moe`. Raises ConfigError."""
    kind = str(raw.get("model_type"))
    fields, sparse = Fields(raw, kind), kind == "lfm2_moe"
    plain: dict[str, Any] = {
        "rope_theta": THETA,
        **raw,
        "rms_norm_eps": fields.number("norm_eps", 1e-5),
        "intermediate_size": fields.size("intermediate_size") if sparse else _inner(fields),
        "tie_word_embeddings": raw.get("tie_embedding", raw.get("tie_word_embeddings", True)),
    }
    taps = fields.size("conv_L_cache", 3, least=2)
    if taps > MOST_TAPS:
        raise ConfigError(
            f"{kind}: conv_L_cache={taps} is more than {MOST_TAPS} rows: download config.json again"
        )
    conv = ConvConfig(taps, bool(raw.get("conv_bias", False)))
    config = replace(parse_decoder(plain, _kinds(fields)), head_norms=True, conv=conv)
    return _with_experts(config, fields) if sparse else config


def _inner(fields: Fields) -> int:
    """The width of the MLP, which configs say before it is adjusted."""
    width = fields.size(INNER[0] if fields.raw.get(INNER[0]) is not None else INNER[1])
    if not fields.raw.get("block_auto_adjust_ff_dim", True):
        return width
    every = fields.size("block_multiple_of", 256)
    width = int(2 * width / 3)
    if fields.raw.get("block_ffn_dim_multiplier", 1.0) is None:
        return width
    width = int(fields.number("block_ffn_dim_multiplier", 1.0) * width)
    return -(-width // every) * every


def _kinds(fields: Fields) -> tuple[str, ...]:
    """As `layer_types` lists them, or as `full_attn_idxs` numbers those with attention."""
    count, given, full = (
        fields.size("num_hidden_layers"),
        fields.raw.get("layer_types"),
        fields.raw.get("full_attn_idxs"),
    )
    if given is None and isinstance(full, list):
        given = [FULL if i in full else CONV for i in range(count)]
    if not isinstance(given, list) or len(given) != count or not all(k in (CONV, FULL) for k in given):
        raise ConfigError(
            f"{fields.where}: layer_types={shown(given)} must name {count} layers, each {CONV} or {FULL}"
        )
    if not {CONV, FULL} <= {*given}:
        raise ConfigError(
            f"{fields.where}: layer_types must have layers of {CONV} and of {FULL}: download it again"
        )
    return tuple(given)


def _with_experts(config: DecoderConfig, fields: Fields) -> DecoderConfig:
    """A router by sigmoids and a bias. transformers adds 1e-6 to the sum of shares, which changes their seventh digit."""
    fields.refuse("use_expert_bias", (None, True), "published models choose experts by a bias")
    moe = MoeConfig(
        fields.size("num_experts"), fields.size("num_experts_per_tok"), fields.size("moe_intermediate_size")
    )
    if moe.top_k > moe.experts:
        raise ConfigError(f"{fields.where}: num_experts_per_tok={moe.top_k} of only {moe.experts} experts")
    dense = fields.size("num_dense_layers", 2, least=0)
    return replace(
        config,
        moe=moe,
        sparse=frozenset(range(dense, len(config.kinds))),
        renormalize=bool(fields.raw.get("norm_topk_prob", True)),
        routing=Routing(1, 1, fields.number("routed_scaling_factor", 1.0)),
    )


SPEC = ModelSpec(parse_lfm2, decoder_shapes, decoder_layout, DecoderTarget)
