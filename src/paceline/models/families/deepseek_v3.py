"""DeepSeek-V3: latent attention, and experts of a router by sigmoids with groups, beside one that all rows pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.errors import ConfigError
from paceline.models.families import ModelSpec
from paceline.models.fields import Fields
from paceline.models.layers.decoder import DecoderTarget, decoder_layout, decoder_shapes
from paceline.models.layers.decoder_config import DecoderConfig, Latent, Routing, parse_decoder
from paceline.models.spec import MoeConfig

BIASED = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")


def parse_deepseek(raw: Mapping[str, Any]) -> DecoderConfig:
    """Of type `deepseek_v3`."""
    fields = Fields(raw, "deepseek_v3")
    rotated, plain = fields.size("qk_rope_head_dim"), fields.size("qk_nope_head_dim")
    if rotated % 2:
        raise ConfigError(f"{fields.where}: qk_rope_head_dim={rotated} is odd: download config.json again")
    heads = fields.size("num_attention_heads")
    if fields.size("num_key_value_heads", heads) != heads:
        raise ConfigError(f"{fields.where}: num_key_value_heads is not num_attention_heads={heads}: the heads of latent "
                          "attention share one key each, download config.json again")  # fmt: skip
    fields.refuse("rope_interleave", (None, True, False), "it is either true or false")
    config = parse_decoder({**raw, "head_dim": rotated, "num_key_value_heads": 1})
    latent = Latent(
        q_rank=None if raw.get("q_lora_rank") is None else fields.size("q_lora_rank"),
        rank=fields.size("kv_lora_rank"),
        plain=plain,
        value=fields.size("v_head_dim"),
        interleaved=raw.get("rope_interleave") is not False,
        scale=(plain + rotated) ** -0.5 * _growth(config, raw) ** 2,
    )
    biases = BIASED if raw.get("attention_bias") else ()
    return with_routing(replace(config, latent=latent, biases=frozenset(biases)), fields)


def _growth(config: DecoderConfig, raw: Mapping[str, Any]) -> float:
    """What a stretched context multiplies q and k with, each, beside what YaRN does to those that are rotated."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if config.rotary.kind == "default" or config.rotary.factor <= 1 or not rope.get("mscale_all_dim"):
        return 1.0
    share = Fields(rope, "deepseek_v3.rope_scaling").number("mscale_all_dim", 0.0)
    return 0.1 * share * math.log(config.rotary.factor) + 1


def with_routing(config: DecoderConfig, fields: Fields) -> DecoderConfig:
    """With the experts that the config describes, as GLM-4-MoE has them, too. Raises ConfigError."""
    fields.refuse("scoring_func", (None, "sigmoid"), "experts are chosen by sigmoids")
    fields.refuse("topk_method", (None, "noaux_tc"), "experts are chosen by groups and a bias")
    fields.refuse("moe_layer_freq", (None, 1), "every layer after the dense ones has experts")
    count, top = fields.size("n_routed_experts"), fields.size("num_experts_per_tok")
    groups, top_groups = fields.size("n_group"), fields.size("topk_group")
    if count % groups or top_groups > groups or (groups > 1 and count // groups < 2):
        raise ConfigError(
            f"{fields.where}: n_routed_experts={count} do not make n_group={groups} groups of two or more, of which "
            f"topk_group={top_groups} are kept: download config.json again"
        )
    if top > count // groups * top_groups:
        raise ConfigError(
            f"{fields.where}: num_experts_per_tok={top} of only {count // groups * top_groups} experts in "
            f"{top_groups} groups: "
            "download config.json again"
        )
    if fields.raw.get("norm_topk_prob") is None or fields.raw.get("routed_scaling_factor") is None:
        raise ConfigError(
            f"{fields.where} lacks norm_topk_prob or routed_scaling_factor: download config.json again"
        )
    inner = fields.size("moe_intermediate_size")
    dense = fields.size("first_k_dense_replace", least=0)
    return replace(
        config,
        moe=MoeConfig(count, top, inner),
        sparse=frozenset(range(dense, len(config.kinds))),
        renormalize=bool(fields.raw["norm_topk_prob"]),
        routing=Routing(groups, top_groups, fields.number("routed_scaling_factor", 1.0)),
        shared_expert=inner * fields.size("n_shared_experts", 0, least=0),
    )


SPEC = ModelSpec(parse_deepseek, decoder_shapes, decoder_layout, DecoderTarget)
