"""Qwen2 and Qwen2.5: Llama with biases at q, k and v, and a window in the upper layers where it is switched on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.models.families import ModelSpec
from paceline.models.layers.decoder import DecoderTarget, decoder_layout, decoder_shapes
from paceline.models.layers.decoder_config import DecoderConfig, parse_decoder, sliding_kinds, split_decoder


def parse_qwen2(raw: Mapping[str, Any]) -> DecoderConfig:
    return replace(parse_decoder(raw, sliding_kinds(raw)), biases=frozenset(("q_proj", "k_proj", "v_proj")))


SPEC = ModelSpec(parse_qwen2, decoder_shapes, decoder_layout, DecoderTarget, split_decoder)
