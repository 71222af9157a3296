"""Mistral and Ministral: Llama without biases, in which layers may have a window (7B v0.1 has one, later ones have none),
and the text side of Mistral 3 and Ministral 3.

Ministral 3 multiplies queries with 1 + beta * log(1 + position / original context), rounded down: with 1 within the
original context. Source of truth: transformers' models/mistral, ministral, ministral3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.errors import ConfigError
from paceline.models.families import ModelSpec
from paceline.models.fields import Fields
from paceline.models.layers.decoder import DecoderTarget, decoder_layout, decoder_shapes
from paceline.models.layers.decoder_config import DecoderConfig, listed_kinds, parse_decoder, split_decoder
from paceline.models.spec import SLIDING

BETA = "llama_4_scaling_beta"
TEXTS = ("mistral", "ministral3")  # types of the text side of a `mistral3`


def parse_mistral(raw: Mapping[str, Any]) -> DecoderConfig:
    """Of type `mistral`, `ministral`, `ministral3`, or `mistral3`, whose `text_config` is read. Raises ConfigError.

    `sliding_window` null or missing: every layer sees everything.
    """
    kind = str(raw.get("model_type"))
    text = _text(raw) if kind == "mistral3" else raw
    fields = Fields(text, kind)
    if kind == "mistral":
        fields.refuse(
            "layer_types", (None,), "layers of several kinds are Ministral's: its model_type is 'ministral'"
        )
    kinds = None
    if text.get("sliding_window") is not None:
        layers = fields.size("num_hidden_layers")
        listed = kind == "ministral" and text.get("layer_types") is not None
        kinds = listed_kinds(fields, 1) if listed else (SLIDING,) * layers
    return _growing(parse_decoder({**text, "model_type": kind}, kinds), text)


def _text(raw: Mapping[str, Any]) -> dict[str, Any]:
    text = raw.get("text_config")
    if not isinstance(text, Mapping) or text.get("model_type", "mistral") not in TEXTS:
        raise ConfigError(
            f"mistral3: its text_config is none of {', '.join(TEXTS)}: download config.json again"
        )
    tied = raw.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    outer = {"eos_token_id": raw.get("eos_token_id"), "tie_word_embeddings": tied}
    return {**text, **{key: value for key, value in outer.items() if value is not None}}


def _growing(config: DecoderConfig, text: Mapping[str, Any]) -> DecoderConfig:
    """With what queries grow by past the original context."""
    rope = text.get("rope_parameters")
    if not isinstance(rope, Mapping) or not rope.get(BETA):
        return config
    growth = Fields(rope, f"{config.model_type}.rope_parameters").number(BETA, 0.0)
    if config.rotary.kind != "yarn" or config.rotary.original < 1:
        raise ConfigError(
            f"{config.model_type}: {BETA} needs YaRN and its original_max_position_embeddings: download config.json again"
        )
    return replace(config, query_growth=growth)


SPEC = ModelSpec(parse_mistral, decoder_shapes, decoder_layout, DecoderTarget, split_decoder)
