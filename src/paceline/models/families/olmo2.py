"""OLMo 2 and 3: norms stand after attention and MLP instead of before, and q and k are normed over all heads at once.

OLMo 3 has windows in three of four layers, whose rotary embeddings are not scaled. Source of truth: transformers'
models/olmo2 and olmo3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.models.families import ModelSpec
from paceline.models.fields import Fields
from paceline.models.layers.decoder import DecoderTarget, decoder_layout, decoder_shapes
from paceline.models.layers.decoder_config import (
    DecoderConfig,
    listed_kinds,
    parse_decoder,
    rotary_by_kind,
)

EVERY = 4  # layers of OLMo 3, of which the last has no window, where config.json does not name them
THETA = 500_000.0


def parse_olmo2(raw: Mapping[str, Any]) -> DecoderConfig:
    """Of type `olmo2` or `olmo3`. Raises ConfigError."""
    kind = str(raw.get("model_type"))
    fields = Fields(raw, kind)
    fields.refuse("attention_bias", (None, False), "OLMo's projections have no biases")
    plain: dict[str, Any] = {**raw, "rms_norm_eps": fields.number("rms_norm_eps", 1e-5)}
    if kind == "olmo3":
        whole, local = rotary_by_kind(raw, fields, (THETA, THETA))
        plain |= {
            "rope_parameters": whole,
            "rope_scaling": None,
            "sliding_window": raw.get("sliding_window", 4096),
        }
        config = replace(parse_decoder(plain, listed_kinds(fields, EVERY)), local_rotary=local)
    else:
        config = parse_decoder(plain)
    return replace(config, placement="after", head_norms=True, wide_norms=True)


SPEC = ModelSpec(parse_olmo2, decoder_shapes, decoder_layout, DecoderTarget)
