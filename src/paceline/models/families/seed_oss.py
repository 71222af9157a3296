"""Seed-OSS: Llama with biases at q, k and v. Source of truth: transformers' models/seed_oss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.models.families import ModelSpec
from paceline.models.layers.decoder import DecoderTarget, decoder_layout, decoder_shapes
from paceline.models.layers.decoder_config import DecoderConfig, parse_decoder, split_decoder

BIASED = {
    "attention_bias": (("q_proj", "k_proj", "v_proj"), True), "attention_out_bias": (("o_proj",), False),
    "mlp_bias": (("gate_proj", "up_proj", "down_proj"), False),
}  # fmt: skip


def parse_seed_oss(raw: Mapping[str, Any]) -> DecoderConfig:
    """Of type `seed_oss`. Raises ConfigError."""
    config = parse_decoder({"head_dim": 128, **raw})
    biases = (names for key, (names, usual) in BIASED.items() if raw.get(key, usual))
    return replace(config, biases=frozenset(name for names in biases for name in names))


SPEC = ModelSpec(parse_seed_oss, decoder_shapes, decoder_layout, DecoderTarget, split_decoder)
