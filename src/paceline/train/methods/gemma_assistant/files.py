"""A trained assistant as the files that transformers 5.22 and other Gemma-4 engines load."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from paceline.models.families.gemma4.config import AssistantConfig
from paceline.train.methods.base import TORCH_NAMES, Exported
from paceline.train.methods.gemma_assistant.heads import CentroidHead
from paceline.train.methods.gemma_assistant.learning import CENTROIDS, CLUSTERS, ORDERING, AssistantModule

FROM_TARGET = (  # of its text config: what the K/V, the tokens and the rotation dictate
    "head_dim", "global_head_dim", "num_key_value_heads", "num_global_key_value_heads", "num_attention_heads",
    "attention_k_eq_v", "sliding_window", "rope_parameters", "rms_norm_eps", "hidden_activation",
    "vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def scratch_config(raw: Mapping[str, Any], layers: int = 4, hidden: int | None = None) -> dict[str, Any]:
    """config.json of a new assistant for a target's config.json: Q-only layers, the last one full attention.

    Width and depth follow the published pairs: about a fifth of the target's hidden size, FFN 8 times as wide.
    """
    target: Mapping[str, Any] = raw.get("text_config", raw)
    unified = "unified" in str(raw.get("model_type"))
    wide = int(target["hidden_size"])
    hidden = hidden or max(64, 64 * round(wide / 5.5 / 64))
    kinds = ["sliding_attention"] * (layers - 1) + ["full_attention"]
    text = {name: target[name] for name in FROM_TARGET if name in target}
    overrides = [v for v in (target.get("per_layer_config") or {}).values() if v]
    if overrides:
        text["per_layer_config"] = {str(layers - 1): dict(overrides[0])}
        text.setdefault(
            "global_head_dim", overrides[0].get("head_dim", target["head_dim"])
        )  # for older readers
    text |= {
        "model_type": "gemma4_unified_text" if unified else "gemma4_text", "hidden_size": hidden,
        "intermediate_size": 8 * hidden, "num_hidden_layers": layers, "num_kv_shared_layers": layers,
        "layer_types": kinds, "tie_word_embeddings": True, "attention_bias": False,
    }  # fmt: skip
    if not unified:  # these fields exist only there, and have other defaults
        text |= {
            "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "enable_moe_block": False,
            "use_double_wide_mlp": False,
        }  # fmt: skip
    kind = "Unified" if unified else ""
    return {
        "architectures": [f"Gemma4{kind}AssistantForCausalLM"],
        "model_type": "gemma4_unified_assistant" if unified else "gemma4_assistant",
        "backbone_hidden_size": wide, "use_ordered_embeddings": False, "tie_word_embeddings": True,
        "text_config": text,
    }  # fmt: skip


def set_head(module: AssistantModule, head: CentroidHead | None) -> AssistantModule:
    """The same drafter with another head: centroids, or dense (None)."""
    clusters = head.centroids.shape[0] if head else 0
    top = head.top_clusters if head else 0
    config = dataclasses.replace(module.config, clusters=clusters, top_clusters=top)
    tensors = {n: t.detach() for n, t in module.state_dict().items() if not n.startswith(CLUSTERS)}
    if head:
        tensors |= {CENTROIDS: head.centroids, ORDERING: head.ordering}
    return AssistantModule(config, tensors)


def config_of(base: Mapping[str, Any], config: AssistantConfig, dtype: torch.dtype) -> dict[str, Any]:
    """config.json for `config`, from the one that it started from."""
    out = dict(base)
    out |= {
        "use_ordered_embeddings": bool(config.clusters),
        "dtype": TORCH_NAMES[dtype],
        "transformers_version": "5.22.2",
    }
    if config.clusters:
        out |= {"num_centroids": config.clusters, "centroid_intermediate_top_k": config.top_clusters}
    out.pop("torch_dtype", None)
    return out


def generation_config(exported: Exported) -> dict[str, Any]:
    text = exported.config["text_config"]
    out = {
        "_from_model_config": True,
        "num_assistant_tokens": exported.draft_tokens,
        "transformers_version": "5.22.2",
    }
    out["num_assistant_tokens_schedule"] = "constant"
    return out | {
        n: text[n] for n in ("bos_token_id", "eos_token_id", "pad_token_id") if text.get(n) is not None
    }
