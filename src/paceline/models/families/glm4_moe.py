"""GLM-4-MoE: attention of which a part of each head is rotated, and the experts of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.models.families import ModelSpec
from paceline.models.families.deepseek_v3 import with_routing
from paceline.models.fields import Fields
from paceline.models.layers.decoder import DecoderTarget, decoder_layout, decoder_shapes
from paceline.models.layers.decoder_config import DecoderConfig, parse_decoder

BIASED = ("q_proj", "k_proj", "v_proj")
PARTIAL = 0.5  # where config.json does not say it


def parse_glm4_moe(raw: Mapping[str, Any]) -> DecoderConfig:
    """Of type `glm4_moe`."""
    config = parse_decoder(raw, partial=PARTIAL)
    biases = BIASED if raw.get("attention_bias") else ()
    config = replace(config, biases=frozenset(biases), head_norms=bool(raw.get("use_qk_norm")))
    return with_routing(config, Fields(raw, "glm4_moe"))


SPEC = ModelSpec(parse_glm4_moe, decoder_shapes, decoder_layout, DecoderTarget)
