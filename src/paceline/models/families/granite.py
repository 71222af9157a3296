"""Granite, dense: Llama whose embeddings, scores, sums and logits are scaled by numbers of the config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.models.families import ModelSpec
from paceline.models.fields import Fields
from paceline.models.layers.decoder import DecoderTarget, decoder_layout, decoder_shapes
from paceline.models.layers.decoder_config import DecoderConfig, parse_decoder, split_decoder

BIASED = {
    "attention_bias": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp_bias": ("gate_proj", "up_proj", "down_proj"),
}


def parse_granite(raw: Mapping[str, Any]) -> DecoderConfig:
    """`logits_scaling` is what logits are divided by. Raises ConfigError."""
    fields = Fields(raw, "granite")
    config = parse_decoder(raw)
    return replace(
        config,
        biases=frozenset(name for key, names in BIASED.items() if raw.get(key) for name in names),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        attention_scale=fields.number("attention_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0),
    )


SPEC = ModelSpec(parse_granite, decoder_shapes, decoder_layout, DecoderTarget, split_decoder)
