"""Phi-3, Phi-3.5, Phi-4 and their minis: Llama with fused projections, LongRoPE, and heads that may be rotated in part.

LongRoPE has other factors for a context that is longer than the original one. A text that grows past it would need all
its keys again, so the factors are chosen when the model is loaded, by the context that is asked for, as vLLM and
llama.cpp do. Source of truth: transformers' models/phi3, for texts of one kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.errors import ConfigError
from paceline.models.families import ModelSpec
from paceline.models.fields import Fields
from paceline.models.layers.decoder import DecoderTarget, decoder_layout, decoder_shapes
from paceline.models.layers.decoder_config import DecoderConfig, parse_decoder
from paceline.models.spec import SLIDING

SU = ("su", "yarn")  # older names of Phi's LongRoPE


def parse_phi3(raw: Mapping[str, Any]) -> DecoderConfig:
    """Of type `phi3`. Raises ConfigError."""
    fields = Fields(raw, "phi3")
    name = "rope_parameters" if raw.get("rope_parameters") is not None else "rope_scaling"
    value = raw.get(name)
    if isinstance(value, Mapping) and value.get("rope_type", value.get("type")) in SU:
        raw = {**raw, name: {**value, "rope_type": "longrope"}}
    rope = Fields(value if isinstance(value, Mapping) else {}, f"phi3.{name}")
    rope.refuse("rope_type", (None, "default", "longrope", *SU), "Phi has LongRoPE or none")
    slides = raw.get("sliding_window") is not None
    eps = {"rms_norm_eps": fields.number("rms_norm_eps", 1e-5)}
    kinds = (SLIDING,) * fields.size("num_hidden_layers") if slides else None
    config = parse_decoder({**raw, **eps}, kinds, partial=1.0)
    pairs = (config.rotated or config.head_dim) // 2
    if config.rotary.divisors:
        cut = min(config.max_len, int(config.rotary.original))
        config = replace(config, max_len=cut, reach=config.max_len)
        if len(config.rotary.divisors) != pairs:
            raise ConfigError(
                f"phi3.{name}: short_factor has {len(config.rotary.divisors)} numbers for {pairs} pairs: download "
                "config.json again"
            )
    return replace(config, fused=frozenset(("qkv", "gate_up")))


SPEC = ModelSpec(parse_phi3, decoder_shapes, decoder_layout, DecoderTarget)
