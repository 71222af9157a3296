"""gpt-oss: layers with and without a window in turns, attention with sinks, and experts with biases in each layer, which
are published in MXFP4. Source of truth: transformers' models/gpt_oss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.models.families import ModelSpec
from paceline.models.families.qwen3 import with_experts
from paceline.models.fields import Fields
from paceline.models.layers.decoder import DecoderTarget, decoder_layout, decoder_shapes
from paceline.models.layers.decoder_config import DecoderConfig, listed_kinds, parse_decoder, split_decoder
from paceline.ops.base import LIMIT, SLOPE

BIASED = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERY = 2  # layers, of which the last has no window, where config.json does not name them
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
DEFAULTS = {"head_dim": 64, "sliding_window": 128, "rope_theta": 150_000.0, "rms_norm_eps": 1e-5}


def parse_gpt_oss(raw: Mapping[str, Any]) -> DecoderConfig:
    """Of type `gpt_oss`. Raises ConfigError."""
    filled = DEFAULTS | {key: value for key, value in raw.items() if value is not None}
    if "rope_parameters" not in filled:
        filled = {"rope_scaling": YARN, **filled}
    fields = Fields(filled, "gpt_oss")
    fields.refuse("swiglu_limit", (None, LIMIT), f"the experts of gpt-oss cut what they compute at {LIMIT:g}")
    fields.refuse("swiglu_alpha", (None, SLOPE), f"the experts of gpt-oss have a slope of {SLOPE:g}")
    config = parse_decoder(filled, listed_kinds(fields, EVERY))
    config = replace(
        config,
        biases=frozenset(BIASED if filled.get("attention_bias", True) else ()),
        sinks=True,
        biased_experts=True,
    )
    top_k = fields.size("num_experts_per_tok" if "num_experts_per_tok" in filled else "experts_per_token")
    sizes = {"moe_intermediate_size": config.intermediate_size, "num_experts_per_tok": top_k}
    return with_experts(config, {**filled, **sizes, "norm_topk_prob": True})


SPEC = ModelSpec(parse_gpt_oss, decoder_shapes, decoder_layout, DecoderTarget, split_decoder)
