"""Gemma 2: norms before and after attention and MLP, every second layer with a window, and scores of attention that are
bounded by a tanh, as logits are. Source of truth: transformers' models/gemma2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.models.families import ModelSpec
from paceline.models.fields import Fields
from paceline.models.layers.decoder import DecoderTarget, decoder_layout, decoder_shapes
from paceline.models.layers.decoder_config import DecoderConfig, listed_kinds, parse_decoder

EVERY = 2  # layers, of which the last has no window, where config.json does not name them
DEFAULTS = {  # what published files leave out
    "vocab_size": 256_000, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 8192, "sliding_window": 4096, "eos_token_id": 1, "tie_word_embeddings": True,
}  # fmt: skip
CAPS = {
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}  # where config.json does not say them


def parse_gemma2(raw: Mapping[str, Any]) -> DecoderConfig:
    """Of type `gemma2`; a cap that is null bounds nothing. Raises ConfigError."""
    text = DEFAULTS | {key: value for key, value in raw.items() if value is not None}
    fields = Fields(text, "gemma2")
    fields.refuse("hidden_activation", (None, "gelu_pytorch_tanh"), "Gemma 2 uses gelu_pytorch_tanh")
    fields.refuse("use_bidirectional_attention", (None, False), "an embedding model writes no text")
    fields.refuse("attention_bias", (None, False), "Gemma 2's projections have no biases")
    scores, logits = (
        None if name in raw and raw[name] is None else fields.number(name, usual)
        for name, usual in CAPS.items()
    )
    # older files have the activation of the first Gemma under this name, and use gelu_pytorch_tanh all the same
    plain = {key: value for key, value in text.items() if key != "hidden_act"}
    config = parse_decoder(plain, listed_kinds(fields, EVERY))
    return replace(
        config,
        placement="both", activation="gelu", norm_shift=1.0,
        embedding_scale=config.hidden_size**0.5,
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_softcap=scores, softcap=logits,
    )  # fmt: skip


SPEC = ModelSpec(parse_gemma2, decoder_shapes, decoder_layout, DecoderTarget)
