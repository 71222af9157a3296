"""The text side of Muse Glimmer: norms before and after attention and MLP, embeddings and heads normed without weights, a
gated result of attention, three layers with a window to each without one and without rotary embeddings, capped logits.

Source of truth: transformers' models/muse_glimmer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.errors import ConfigError
from paceline.models.families import ModelSpec
from paceline.models.fields import Fields, shown
from paceline.models.layers.decoder import DecoderTarget, decoder_layout, decoder_shapes
from paceline.models.layers.decoder_config import DecoderConfig, listed_kinds, parse_decoder
from paceline.models.spec import FULL, SLIDING

EVERY = 4  # layers, counted from the last one backwards, where config.json does not name them
DEFAULTS = {"head_dim": 128, "sliding_window": 2048, "rms_norm_eps": 1e-5}  # what a config may leave out


def parse_muse(raw: Mapping[str, Any]) -> DecoderConfig:
    """Of type `muse_glimmer_text`, or `muse_glimmer`, whose `text_config` is read. Raises ConfigError."""
    kind = str(raw.get("model_type"))
    section = raw.get("text_config") if kind == "muse_glimmer" else raw
    if not isinstance(section, Mapping):
        raise ConfigError(f"{kind}: config.json has no text_config: download it again")
    outer = {key: raw[key] for key in ("eos_token_id",) if raw.get(key) is not None}
    text = DEFAULTS | {key: value for key, value in section.items() if value is not None} | outer
    fields = Fields(text, kind)
    fields.refuse("hidden_activation", (None, "silu"), "Muse Glimmer uses silu")
    fields.refuse("attention_bias", (None, False), "Muse Glimmer's projections have no biases")
    kinds = _kinds(fields)
    config = parse_decoder({**text, "model_type": kind}, kinds)
    scale = config.head_dim**-0.5 * fields.number("qk_scale_factor", 3.87)
    return replace(
        config,
        placement="both", norm_shift=1.0, last_shift=0.0, plain_head_norms=True, normed_embedding=True, gate_apart=True,
        late_eps=fields.number("post_norm_eps", 1e-8), attention_scale=scale, unturned=_still(config, fields),
        logit_scale=fields.number("output_multiplier", 0.19611613513818404),
        softcap=fields.number("final_logit_softcapping", 20.0),
    )  # fmt: skip


def _kinds(fields: Fields) -> tuple[str, ...]:
    count = fields.size("num_hidden_layers")
    if fields.raw.get("layer_types") is not None:
        return listed_kinds(fields, EVERY)
    return tuple(SLIDING if (count - 1 - i) % EVERY else FULL for i in range(count))


def _still(config: DecoderConfig, fields: Fields) -> frozenset[int]:
    """Layers without rotary embeddings: `layer_rope_theta` has a 0 for each of them, and one base for all others."""
    count, listed = len(config.kinds), fields.raw.get("layer_rope_theta")
    if listed is None:
        return frozenset(i for i in range(count) if (count - 1 - i) % EVERY == 0)
    base = config.rotary.theta
    if (
        not isinstance(listed, list)
        or len(listed) != count
        or not all(entry in (0, base) for entry in listed)
    ):
        raise ConfigError(
            f"{fields.where}: layer_rope_theta={shown(listed)} must have 0 or {base:g} for each of {count} layers"
        )
    return frozenset(i for i in range(count) if not listed[i])


SPEC = ModelSpec(parse_muse, decoder_shapes, decoder_layout, DecoderTarget)
