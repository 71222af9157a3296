"""GLM-4.7-Flash: the latent attention and the experts of DeepSeek-V3.

Source of truth: transformers' models/glm4_moe_lite.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import ConfigError
from paceline.models.families import ModelSpec
from paceline.models.families.deepseek_v3 import parse_deepseek
from paceline.models.fields import Fields, shown
from paceline.models.layers.decoder import DecoderTarget, decoder_layout, decoder_shapes
from paceline.models.layers.decoder_config import DecoderConfig

DENSE, SPARSE = "dense", "sparse"
DEFAULTS = {
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.8, "n_shared_experts": 1,
    "rms_norm_eps": 1e-5,
}  # fmt: skip


def parse_glm4_lite(raw: Mapping[str, Any]) -> DecoderConfig:
    """Of type `glm4_moe_lite`, in which `mlp_layer_types` says which layers have experts. Raises ConfigError."""
    fields, listed = Fields(raw, "glm4_moe_lite"), raw.get("mlp_layer_types")
    count = fields.size("num_hidden_layers")
    dense = fields.size("first_k_dense_replace", 1, least=0)
    if listed is not None:
        dense = listed.count(DENSE) if isinstance(listed, list) else 0
        if listed != [DENSE] * dense + [SPARSE] * (count - dense):
            raise ConfigError(
                f"glm4_moe_lite: mlp_layer_types={shown(listed)} is not {DENSE} for the first of {count} layers and "
                f"{SPARSE} for all others: download config.json again"
            )
    return parse_deepseek({**DEFAULTS, **raw, "first_k_dense_replace": dense})


SPEC = ModelSpec(parse_glm4_lite, decoder_shapes, decoder_layout, DecoderTarget)
