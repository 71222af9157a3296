"""SmolLM3: Llama in which some layers, every fourth as a rule, have no rotary embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.errors import ConfigError
from paceline.models.families import ModelSpec
from paceline.models.fields import Fields, shown
from paceline.models.layers.decoder import DecoderTarget, decoder_layout, decoder_shapes
from paceline.models.layers.decoder_config import DecoderConfig, parse_decoder, sliding_kinds, split_decoder

EVERY = 4  # layers, of which the last is not rotated, where config.json does not list them


def parse_smollm3(raw: Mapping[str, Any]) -> DecoderConfig:
    """`no_rope_layers` holds a 1 for each layer that is rotated and a 0 for each that is not. Raises ConfigError."""
    fields = Fields(raw, "smollm3")
    fields.refuse("attention_bias", (None, False), "SmolLM3's projections have no biases")
    fields.refuse("mlp_bias", (None, False), "SmolLM3's projections have no biases")
    config = parse_decoder(raw, sliding_kinds(raw))
    count, listed = len(config.kinds), raw.get("no_rope_layers")
    if listed is None:
        every = fields.size("no_rope_layer_interval", EVERY)
        listed = [int((i + 1) % every != 0) for i in range(count)]
    if not isinstance(listed, list) or len(listed) < count or not all(turned in (0, 1) for turned in listed):
        raise ConfigError(
            f"smollm3: no_rope_layers={shown(listed)} must have a 0 or 1 for each of {count} layers"
        )
    still = frozenset(i for i in range(count) if not listed[i])
    return replace(config, unturned=still, tied=bool(raw.get("tie_word_embeddings", True)))


SPEC = ModelSpec(parse_smollm3, decoder_shapes, decoder_layout, DecoderTarget, split_decoder)
