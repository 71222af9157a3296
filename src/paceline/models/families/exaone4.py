"""EXAONE 4: norms stand after attention and MLP, q and k are normed head by head, and where some layers have a window
those without one have no rotary embeddings. Source of truth: transformers' models/exaone4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.models.families import ModelSpec
from paceline.models.fields import Fields
from paceline.models.layers.decoder import DecoderTarget, decoder_layout, decoder_shapes
from paceline.models.layers.decoder_config import DecoderConfig, listed_kinds, parse_decoder
from paceline.models.spec import FULL

EVERY = 4  # layers, of which the last has no window, where config.json does not name them


def parse_exaone4(raw: Mapping[str, Any]) -> DecoderConfig:
    """Of type `exaone4`. `sliding_window` null: every layer sees everything and is rotated. Raises ConfigError."""
    fields = Fields(raw, "exaone4")
    kinds: tuple[str, ...] = (FULL,) * fields.size("num_hidden_layers")
    slides = raw.get("sliding_window") is not None
    if slides:
        pattern = raw.get("sliding_window_pattern")
        # older configs write the pattern in letters: a local layer is an L, a global one a G
        every = len(pattern) if isinstance(pattern, str) else fields.size("sliding_window_pattern", EVERY)
        kinds = listed_kinds(fields, every)
    eps = {"rms_norm_eps": fields.number("rms_norm_eps", 1e-5)}
    config = parse_decoder({**raw, **eps}, kinds)
    still = frozenset(i for i, kind in enumerate(kinds) if slides and kind == FULL)
    return replace(config, placement="after", head_norms=True, unturned=still)


SPEC = ModelSpec(parse_exaone4, decoder_shapes, decoder_layout, DecoderTarget)
