"""ERNIE 4.5: Llama whose heads store rotated pairs side by side, dense or with experts, which are chosen by softmax
and a bias and have the softmax as their shares.

Source of truth: transformers' models/ernie4_5 and ernie4_5_moe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.errors import ConfigError
from paceline.models.families import ModelSpec
from paceline.models.fields import Fields
from paceline.models.layers.decoder import DecoderTarget, decoder_layout, decoder_shapes
from paceline.models.layers.decoder_config import DecoderConfig, Routing, parse_decoder
from paceline.models.spec import MoeConfig

BIASED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
THETA, HEAD_DIM = 500_000.0, 128  # where config.json does not say it


def parse_ernie(raw: Mapping[str, Any]) -> DecoderConfig:
    """Of type `ernie4_5` or `ernie4_5_moe`. Raises ConfigError."""
    kind = str(raw.get("model_type"))
    fields, sparse = Fields(raw, kind), kind == "ernie4_5_moe"
    usual: dict[str, Any] = {"rope_theta": THETA, "tie_word_embeddings": True}
    usual |= {} if sparse else {"head_dim": HEAD_DIM}
    config = parse_decoder({**usual, **raw, "rms_norm_eps": fields.number("rms_norm_eps", 1e-5)})
    config = replace(config, paired=True, biases=frozenset(BIASED if raw.get("use_bias") else ()))
    return _with_experts(config, fields) if sparse else config


def _with_experts(config: DecoderConfig, fields: Fields) -> DecoderConfig:
    count, inner = len(config.kinds), fields.size("moe_intermediate_size")
    moe = MoeConfig(fields.size("moe_num_experts", 64), fields.size("moe_k", 6), inner)
    if moe.top_k > moe.experts:
        raise ConfigError(
            f"{fields.where}: moe_k={moe.top_k} of only {moe.experts} experts: download config.json again"
        )
    first, every = fields.size("moe_layer_start_index", 1, least=0), fields.size("moe_layer_interval", 1)
    last = fields.raw.get("moe_layer_end_index", -1)
    last = count - 1 if last in (None, -1) else fields.size("moe_layer_end_index", least=0)
    sparse = frozenset(i for i in range(count) if (i + 1) % every == 0 and first <= i <= last)
    shared = inner * fields.size("moe_num_shared_experts", 2, least=0)
    return replace(
        config, moe=moe, sparse=sparse, routing=Routing(1, 1, 1.0, softmax=True), shared_expert=shared
    )


SPEC = ModelSpec(parse_ernie, decoder_shapes, decoder_layout, DecoderTarget)
