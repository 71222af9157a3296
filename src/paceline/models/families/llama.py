"""Llama 1 to 3.x, and what is built like it: SmolLM2 and many others say `llama`, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.models.families import ModelSpec
from paceline.models.layers.decoder import DecoderTarget, decoder_layout, decoder_shapes
from paceline.models.layers.decoder_config import DecoderConfig, parse_decoder, split_decoder


def parse_llama(raw: Mapping[str, Any]) -> DecoderConfig:
    """Biases where `attention_bias` and `mlp_bias` say so."""
    attention = ("q_proj", "k_proj", "v_proj", "o_proj") if raw.get("attention_bias") else ()
    mlp = ("gate_proj", "up_proj", "down_proj") if raw.get("mlp_bias") else ()
    return replace(parse_decoder(raw), biases=frozenset(attention + mlp))


SPEC = ModelSpec(parse_llama, decoder_shapes, decoder_layout, DecoderTarget, split_decoder)
