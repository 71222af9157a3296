"""Cohere 2 (Command R7B, Command A): attention and MLP side by side behind one layer norm, and three layers with a window
and rotary embeddings to each with neither. Source of truth: transformers' models/cohere2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.models.families import ModelSpec
from paceline.models.fields import Fields
from paceline.models.layers.decoder import DecoderTarget, decoder_layout, decoder_shapes
from paceline.models.layers.decoder_config import DecoderConfig, listed_kinds, parse_decoder, split_decoder
from paceline.models.spec import FULL

EVERY = 4  # layers, of which the last has no window, where config.json does not name them
DEFAULTS = {"sliding_window": 4096, "tie_word_embeddings": True}  # what published files leave out
BIASED = ("q_proj", "k_proj", "v_proj", "o_proj")


def parse_cohere2(raw: Mapping[str, Any]) -> DecoderConfig:
    """Of type `cohere2`. Raises ConfigError."""
    text = DEFAULTS | {key: value for key, value in raw.items() if value is not None}
    fields = Fields(text, "cohere2")
    fields.refuse("use_qk_norm", (None, False), "Cohere 2 norms no queries and keys")
    fields.refuse("use_parallel_block", (None, True), "attention and MLP of Cohere 2 stand side by side")
    fields.refuse("rotary_pct", (None, 1, 1.0), "Cohere 2 rotates whole heads")
    kinds = listed_kinds(fields, fields.size("sliding_window_pattern", EVERY))
    config = parse_decoder({**text, "rms_norm_eps": fields.number("layer_norm_eps", 1e-5)}, kinds)
    return replace(
        config,
        placement="parallel", centered=True, paired=True,
        unturned=frozenset(i for i, kind in enumerate(kinds) if kind == FULL),
        biases=frozenset(BIASED) if text.get("attention_bias") else frozenset(),
        logit_scale=fields.number("logit_scale", 0.0625),
    )  # fmt: skip


SPEC = ModelSpec(parse_cohere2, decoder_shapes, decoder_layout, DecoderTarget, split_decoder)
