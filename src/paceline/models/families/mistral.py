"""Mistral: Llama without biases, in which every layer may have a window (7B v0.1 has one, later ones have none)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.models.families import ModelSpec
from paceline.models.fields import Fields
from paceline.models.layers.decoder import DecoderTarget, decoder_layout, decoder_shapes
from paceline.models.layers.decoder_config import DecoderConfig, parse_decoder, split_decoder
from paceline.models.spec import SLIDING


def parse_mistral(raw: Mapping[str, Any]) -> DecoderConfig:
    """`sliding_window` null or missing: every layer sees everything. Raises ConfigError for layers that differ."""
    fields = Fields(raw, "mistral")
    fields.refuse(
        "layer_types", (None,), "layers of several kinds are Ministral's, which paceline does not run"
    )
    layers = fields.size("num_hidden_layers")
    return parse_decoder(raw, None if raw.get("sliding_window") is None else (SLIDING,) * layers)


SPEC = ModelSpec(parse_mistral, decoder_shapes, decoder_layout, DecoderTarget, split_decoder)
