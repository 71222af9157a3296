"""GLM-4: attention of which a part of each head is rotated. The dense models (9B, 32B, GLM-Z1) store what is rotated pair
by pair and have norms before and after attention and MLP; GLM-4-MoE has the experts of DeepSeek-V3 instead.

Source of truth: transformers' models/glm4 and glm4_moe.
"""

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


def parse_glm4(raw: Mapping[str, Any]) -> DecoderConfig:
    """Of type `glm4` or `glm4_moe`. Raises ConfigError."""
    dense = raw.get("model_type") == "glm4"
    biases = frozenset(BIASED if raw.get("attention_bias", dense) else ())
    config = replace(parse_decoder(raw, partial=PARTIAL), biases=biases)
    if dense:
        return replace(config, placement="both (GLM-4)", fused=frozenset(("gate_up",)), paired=True)
    config = replace(config, head_norms=bool(raw.get("use_qk_norm")))
    return with_routing(config, Fields(raw, "glm4_moe"))


SPEC = ModelSpec(parse_glm4, decoder_shapes, decoder_layout, DecoderTarget)
