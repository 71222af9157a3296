"""The text side of Gemma 3: norms before and after attention and MLP, five layers with a window to each without, and two
rotary bases. Source of truth: transformers' models/gemma3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.errors import ConfigError
from paceline.models.families import ModelSpec
from paceline.models.fields import Fields
from paceline.models.layers.decoder import DecoderTarget, decoder_layout, decoder_shapes
from paceline.models.layers.decoder_config import (
    DecoderConfig,
    listed_kinds,
    parse_decoder,
    rotary_by_kind,
)

EVERY = 6  # layers, of which the last has no window, where config.json does not name them
GLOBAL, LOCAL = 1_000_000.0, 10_000.0  # rotary bases of layers without and with a window
DEFAULTS = {  # what published files leave out
    "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 131_072, "sliding_window": 4096, "eos_token_id": 1, "tie_word_embeddings": True,
}  # fmt: skip


def parse_gemma3(raw: Mapping[str, Any]) -> DecoderConfig:
    """Of type `gemma3_text`, or `gemma3`, whose `text_config` is read. Raises ConfigError."""
    section = raw.get("text_config") if raw.get("model_type") == "gemma3" else raw
    if not isinstance(section, Mapping):
        raise ConfigError("gemma3: config.json has no text_config: download it again")
    outer = {key: raw[key] for key in ("eos_token_id",) if raw.get(key) is not None}
    text = DEFAULTS | {key: value for key, value in section.items() if value is not None} | outer
    fields = Fields(text, "gemma3")
    fields.refuse("hidden_activation", (None, "gelu_pytorch_tanh"), "Gemma 3 uses gelu_pytorch_tanh")
    fields.refuse("attn_logit_softcapping", (None,), "Gemma 3 caps no scores, Gemma 2 does")
    fields.refuse("final_logit_softcapping", (None,), "Gemma 3 caps no logits, Gemma 2 does")
    fields.refuse("use_bidirectional_attention", (None, False), "an embedding model writes no text")
    fields.refuse("attention_bias", (None, False), "Gemma 3's projections have no biases")
    whole, local = rotary_by_kind(text, fields, (GLOBAL, fields.number("rope_local_base_freq", LOCAL)))
    plain = {**text, "rope_parameters": whole, "rope_scaling": None, "model_type": str(raw.get("model_type"))}
    config = parse_decoder(plain, listed_kinds(fields, fields.size("sliding_window_pattern", EVERY)))
    return replace(
        config,
        placement="both", activation="gelu", head_norms=True, norm_shift=1.0, local_rotary=local,
        embedding_scale=config.hidden_size**0.5,
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
    )  # fmt: skip


SPEC = ModelSpec(parse_gemma3, decoder_shapes, decoder_layout, DecoderTarget)
