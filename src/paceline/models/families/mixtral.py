"""Mixtral: Mistral with experts in each layer, whose shares add up to 1.

Source of truth: transformers' models/mixtral.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.models.families import ModelSpec
from paceline.models.families.qwen3 import with_experts
from paceline.models.fields import Fields
from paceline.models.layers.decoder import DecoderTarget, decoder_layout, decoder_shapes
from paceline.models.layers.decoder_config import DecoderConfig, parse_decoder, split_decoder
from paceline.models.spec import SLIDING


def parse_mixtral(raw: Mapping[str, Any]) -> DecoderConfig:
    """Of type `mixtral`, whose `intermediate_size` is that of an expert. Raises ConfigError."""
    fields = Fields(raw, "mixtral")
    slides = raw.get("sliding_window") is not None
    kinds = (SLIDING,) * fields.size("num_hidden_layers") if slides else None
    eps = {"rms_norm_eps": fields.number("rms_norm_eps", 1e-5)}
    config = parse_decoder({**raw, **eps}, kinds)
    sizes = {"moe_intermediate_size": config.intermediate_size, "norm_topk_prob": True}
    return with_experts(config, {**raw, **sizes})


SPEC = ModelSpec(parse_mixtral, decoder_shapes, decoder_layout, DecoderTarget, split_decoder)
