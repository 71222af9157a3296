"""Qwen3.5, 3.6 and Qwen3-Next: three layers of linear attention (layers/delta_net.py) for each one of gated attention, of
whose heads a part is rotated; norms hold what is added to 1. A multimodal config nests the language model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.errors import ConfigError
from paceline.models.families import ModelSpec
from paceline.models.families.qwen3 import with_experts
from paceline.models.fields import Fields
from paceline.models.layers.decoder import DecoderTarget, decoder_layout, decoder_shapes
from paceline.models.layers.decoder_config import DecoderConfig, parse_decoder
from paceline.models.layers.delta_net import LINEAR, parse_delta
from paceline.models.spec import FULL

PARTIAL, HEAD_DIM, EVERY = 0.25, 256, 4  # where config.json does not say it
# of our own: as llama.cpp writes it, norms hold the whole factor (see also DeltaConfig)
GGUF_LAYOUT = "gguf_layout"
MULTIMODAL, NEXT = ("qwen3_5", "qwen3_5_moe"), "qwen3_next"
INNER, SHARED = "intermediate_size", "shared_expert_intermediate_size"


def parse_qwen3_5(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises ConfigError."""
    kind = str(raw.get("model_type"))
    text = _language_model(raw, kind)
    fields = Fields(text, kind)
    fields.refuse("attention_bias", (None, False), "no published model of this family has biases")
    sparse = kind == NEXT or kind.startswith("qwen3_5_moe")
    plain: dict[str, Any] = {"head_dim": HEAD_DIM, **text, "model_type": kind}
    if sparse and text.get(INNER) is None:
        plain[INNER] = text.get(SHARED)  # no layer without experts
    config = parse_decoder(plain, _kinds(fields), PARTIAL)
    stored = bool(text.get(GGUF_LAYOUT))
    delta = parse_delta(fields, grouped=kind == NEXT, decayed=stored)
    shift = 0.0 if stored else 1.0
    config = replace(config, head_norms=True, gated=True, norm_shift=shift, delta=delta)
    if not sparse:
        return config
    renormalize = kind != NEXT or bool(text.get("norm_topk_prob", True))
    config = with_experts(config, {**text, "norm_topk_prob": renormalize})
    return replace(config, shared_expert=fields.size(SHARED), shared_gate=True)


def _language_model(raw: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    if kind not in MULTIMODAL or "text_config" not in raw:
        return raw
    text = raw["text_config"]
    if not isinstance(text, Mapping):
        raise ConfigError(f"config.json of type {kind} has no text_config: download it again")
    top = {key: raw[key] for key in ("eos_token_id", "tie_word_embeddings") if raw.get(key) is not None}
    return {**text, **top}


def _kinds(fields: Fields) -> tuple[str, ...]:
    count, given = fields.size("num_hidden_layers"), fields.raw.get("layer_types")
    every = fields.size("full_attention_interval", EVERY)
    kinds = [FULL if (i + 1) % every == 0 else LINEAR for i in range(count)] if given is None else given
    if not isinstance(kinds, list) or len(kinds) != count or not all(k in (LINEAR, FULL) for k in kinds):
        raise ConfigError(f"{fields.where}: layer_types must name {count} layers, each {LINEAR} or {FULL}")
    if FULL not in kinds:
        raise ConfigError(
            f"{fields.where}: layer_types has no {FULL}: models of linear attention alone are not run"
        )
    return tuple(kinds)


SPEC = ModelSpec(parse_qwen3_5, decoder_shapes, decoder_layout, DecoderTarget)
