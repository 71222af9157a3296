"""Qwen1.5-MoE and Qwen2-57B-A14B: Qwen2 with experts beside one that every row passes, which a gate of the row weighs.

Source of truth: transformers' models/qwen2_moe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.models.families import ModelSpec
from paceline.models.families.qwen3 import with_experts
from paceline.models.fields import Fields
from paceline.models.layers.decoder import DecoderTarget, decoder_layout, decoder_shapes
from paceline.models.layers.decoder_config import DecoderConfig, parse_decoder, sliding_kinds

BIASED = ("q_proj", "k_proj", "v_proj")


def parse_qwen2_moe(raw: Mapping[str, Any]) -> DecoderConfig:
    """Of type `qwen2_moe`. Raises ConfigError."""
    biases = frozenset(BIASED if raw.get("qkv_bias", True) else ())
    config = with_experts(replace(parse_decoder(raw, sliding_kinds(raw)), biases=biases), raw)
    shared = Fields(raw, "qwen2_moe").size("shared_expert_intermediate_size")
    return replace(config, shared_expert=shared, shared_gate=True)


SPEC = ModelSpec(parse_qwen2_moe, decoder_shapes, decoder_layout, DecoderTarget)
