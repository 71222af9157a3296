"""Granite, dense: Llama whose embeddings, scores, sums and logits are scaled by numbers of the config.

Granite 4.0's small models (`granitemoehybrid`) are such models where none of their layers is Mamba and none has experts.
Source of truth: transformers' models/granite and granitemoehybrid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.errors import ConfigError
from paceline.models.families import ModelSpec
from paceline.models.fields import Fields, shown
from paceline.models.layers.decoder import DecoderTarget, decoder_layout, decoder_shapes
from paceline.models.layers.decoder_config import DecoderConfig, parse_decoder, split_decoder

BIASED = {
    "attention_bias": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp_bias": ("gate_proj", "up_proj", "down_proj"),
}
HYBRID, ATTENTION = "granitemoehybrid", ("attention", "full_attention")


def parse_granite(raw: Mapping[str, Any]) -> DecoderConfig:
    """`logits_scaling` is what logits are divided by. Raises ConfigError."""
    kind = str(raw.get("model_type"))
    fields = Fields(raw, kind)
    config = _hybrid(fields) if kind == HYBRID else parse_decoder(raw)
    return replace(
        config,
        biases=frozenset(name for key, names in BIASED.items() if raw.get(key) for name in names),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        attention_scale=fields.number("attention_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0),
    )


def _hybrid(fields: Fields) -> DecoderConfig:
    """What `granitemoehybrid` writes in another way. ConfigError for layers that are not run."""
    raw, count = fields.raw, fields.size("num_hidden_layers")
    kinds = raw.get("layer_types", raw.get("layers_block_type"))
    if kinds is None or not isinstance(kinds, list) or len(kinds) != count or not {*kinds} <= {*ATTENTION}:
        raise ConfigError(
            f"{HYBRID}: layers of Mamba are not run, and layer_types={shown(kinds)} has some: use Granite 4.0 micro, 1B "
            "or 350M without H in their names"
        )
    fields.refuse(
        "num_local_experts", (0, None), "experts of this family are not run: use a dense Granite 4.0"
    )
    inner = fields.size("shared_intermediate_size")
    config = parse_decoder({**raw, "intermediate_size": inner})
    rotated = raw.get("position_embedding_type") == "rope"
    still = frozenset(() if rotated else range(count))
    return replace(config, fused=frozenset(("gate_up",)), unturned=still)


SPEC = ModelSpec(parse_granite, decoder_shapes, decoder_layout, DecoderTarget, split_decoder)
