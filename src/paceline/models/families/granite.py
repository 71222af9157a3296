"""Granite: Llama whose embeddings, scores, sums and logits are scaled by numbers of the config.

In most layers of Granite 4.0's models with an H in their names (`granitemoehybrid`) stands Mamba 2 in the place of
attention; the larger ones have experts beside the MLP.
Source of truth: transformers' models/granite and granitemoehybrid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.errors import ConfigError, UsageError
from paceline.models.families import ModelSpec
from paceline.models.fields import Fields, shown
from paceline.models.layers.decoder import DecoderTarget, decoder_layout, decoder_shapes
from paceline.models.layers.decoder_config import DecoderConfig, MambaConfig, parse_decoder, split_decoder
from paceline.models.layers.delta_net import LINEAR, MOST_KERNEL
from paceline.models.spec import FULL, MoeConfig, Split

BIASED = {
    "attention_bias": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp_bias": ("gate_proj", "up_proj", "down_proj"),
}
HYBRID, ATTENTION = "granitemoehybrid", ("attention", "full_attention")
KINDS = dict.fromkeys(ATTENTION, FULL) | dict.fromkeys(("mamba", "linear_attention"), LINEAR)


UNLIMITED = (math.inf, {"__float__": "Infinity"})  # as config.json may have it
GGUF_LAYOUT = "gguf_layout"  # of configs made from GGUF files: see `MambaConfig.decayed`


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
    """What `granitemoehybrid` writes in another way. Raises ConfigError."""
    raw, count = fields.raw, fields.size("num_hidden_layers")
    kinds = raw.get("layer_types", raw.get("layers_block_type"))
    if (
        not isinstance(kinds, list)
        or len(kinds) != count
        or not {*kinds} <= {*KINDS}
        or not {*kinds} & {*ATTENTION}
    ):
        raise ConfigError(
            f"{HYBRID}: layer_types={shown(kinds)} must name {count} layers, each attention or mamba, some of them "
            "attention: download config.json again"
        )
    made = tuple(KINDS[kind] for kind in kinds)
    inner = fields.size("shared_intermediate_size")
    config = parse_decoder({**raw, "intermediate_size": inner}, made)
    rotated = raw.get("position_embedding_type") == "rope"
    still = frozenset(() if rotated else range(count))
    config = replace(config, fused=frozenset(("gate_up",)), unturned=still)
    if LINEAR in made:
        config = replace(config, delta=_mamba(fields, config.hidden_size))
    return _with_experts(config, fields, inner) if raw.get("num_local_experts") else config


def _mamba(fields: Fields, hidden: int) -> MambaConfig:
    heads, groups = fields.size("mamba_n_heads", 128), fields.size("mamba_n_groups", 1)
    wide = fields.size("mamba_expand", 2) * hidden
    auto = fields.raw.get("mamba_d_head") in (None, "auto")
    head_dim = wide // heads if auto else fields.size("mamba_d_head")
    kernel = fields.size("mamba_d_conv", 4, least=2)
    if head_dim * heads != wide or heads % groups or kernel > MOST_KERNEL:
        raise ConfigError(
            f"{HYBRID}: {heads} Mamba heads of size {head_dim} in {groups} groups do not make a width of {wide}, or "
            f"mamba_d_conv={kernel} is above {MOST_KERNEL}: download config.json again"
        )
    limit = fields.raw.get("time_step_limit")
    if limit is not None and limit not in [[0.0, end] for end in UNLIMITED]:
        raise ConfigError(
            f"{HYBRID}: time_step_limit={shown(limit)} is not supported, only steps without a limit"
        )
    raw = fields.raw
    return MambaConfig(
        heads,
        head_dim,
        groups,
        fields.size("mamba_d_state", 256),
        kernel,
        conv_bias=bool(raw.get("mamba_conv_bias", True)),
        biases=bool(raw.get("mamba_proj_bias", False)),
        decayed=bool(raw.get(GGUF_LAYOUT)),
    )


def _with_experts(config: DecoderConfig, fields: Fields, shared: int) -> DecoderConfig:
    """Experts by softmax in each layer, beside the MLP that every row passes."""
    moe = MoeConfig(
        fields.size("num_local_experts"), fields.size("num_experts_per_tok"), fields.size("intermediate_size")
    )
    if moe.top_k > moe.experts:
        raise ConfigError(
            f"{HYBRID}: num_experts_per_tok={moe.top_k} of only {moe.experts} experts: download config.json again"
        )
    return replace(config, moe=moe, sparse=frozenset(range(len(config.kinds))), shared_expert=shared)


def split_granite(config: DecoderConfig) -> Split:
    """What of it can be sharded among ranks. Raises UsageError for what is computed by one process only."""
    if config.delta is not None or config.moe is not None:
        raise UsageError(
            "tensor_parallel is not possible for a Granite 4 with layers of Mamba or experts: leave it out"
        )
    return split_decoder(config)


SPEC = ModelSpec(parse_granite, decoder_shapes, decoder_layout, DecoderTarget, split_granite)
