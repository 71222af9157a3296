"""OLMo 2: norms stand after attention and MLP instead of before, and q and k are normed over all heads at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.models.families import ModelSpec
from paceline.models.fields import Fields
from paceline.models.layers.decoder import DecoderTarget, decoder_layout, decoder_shapes
from paceline.models.layers.decoder_config import DecoderConfig, parse_decoder


def parse_olmo2(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises ConfigError."""
    fields = Fields(raw, "olmo2")
    fields.refuse("attention_bias", (None, False), "OLMo 2's projections have no biases")
    eps = {} if raw.get("rms_norm_eps") is not None else {"rms_norm_eps": 1e-5}
    return replace(parse_decoder({**raw, **eps}), placement="after", head_norms=True, wide_norms=True)


SPEC = ModelSpec(parse_olmo2, decoder_shapes, decoder_layout, DecoderTarget)
