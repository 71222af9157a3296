"""GLM-4, dense (9B and 32B, and GLM-Z1): half of each head is rotated, stored pair by pair, and norms stand before and
after attention and MLP. Source of truth: transformers' models/glm4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.models.families import ModelSpec
from paceline.models.layers.decoder import DecoderTarget, decoder_layout, decoder_shapes
from paceline.models.layers.decoder_config import DecoderConfig, parse_decoder

PARTIAL = 0.5  # where config.json does not say it


def parse_glm4(raw: Mapping[str, Any]) -> DecoderConfig:
    """Of type `glm4`. Raises ConfigError."""
    biased = raw.get("attention_bias", True)
    return replace(
        parse_decoder(raw, partial=PARTIAL),
        placement="both (GLM-4)", fused=frozenset(("gate_up",)), paired=True,
        biases=frozenset(("q_proj", "k_proj", "v_proj") if biased else ()),
    )  # fmt: skip


SPEC = ModelSpec(parse_glm4, decoder_shapes, decoder_layout, DecoderTarget)
