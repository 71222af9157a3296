"""Small random checkpoints of each Gemma 4 family and of both drafter heads, saved by transformers in HF
layout.

Scales are chosen so that logits are far from flat: matrices of unit gain, random norms and layer scalars.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    PreTrainedModel,
)

VOCAB, WINDOW = 96, 8
S, F = "sliding_attention", "full_attention"
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "hidden_size": 48, "intermediate_size": 64,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW, "layer_types": [S, S, F, S, S, F], "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0, "max_position_embeddings": 512, "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "dense": {},
    "e2b": {
        "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
        "num_key_value_heads": 1,
    },
    "e4b": {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "layer_types": [S, F, S, F, S, F]},
    "12b": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "26b": {
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 6,
        "top_k_experts": 2, "moe_intermediate_size": 24, "use_bidirectional_attention": "vision",
    },
    "31b": {
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "use_bidirectional_attention": "vision",
    },
}  # fmt: skip


def build_target(
    family: str, folder: Path, *, seed: int = 0, multimodal: bool = False, **changes: Any
) -> PreTrainedModel:
    """Make, save and return the transformers model of one family (eager attention, float32)."""
    torch.manual_seed(seed)
    fields = SIZES | FAMILIES[family] | changes
    if family == "12b":
        fields = {k: v for k, v in fields.items() if "per_layer_input" not in k}
        config = Gemma4UnifiedConfig(text_config=fields, vision_config=None, audio_config=None)
        model: PreTrainedModel = Gemma4UnifiedForConditionalGeneration(config)
    elif multimodal:
        config = Gemma4Config(text_config=fields, vision_config=None, audio_config=None)
        model = Gemma4ForConditionalGeneration(config)
    else:
        model = Gemma4ForCausalLM(Gemma4TextConfig(**fields))
    return finish(model, folder)


def build_assistant(
    family: str, folder: Path, *, ordered: bool = False, seed: int = 1, backbone: int = 48, **changes: Any
) -> PreTrainedModel:
    """Make, save and return the transformers drafter for a target of `family` made by `build_target`."""
    torch.manual_seed(seed)
    fields = SIZES | FAMILIES[family]
    keep = ("num_key_value_heads", "num_global_key_value_heads", "attention_k_eq_v")
    small = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "layer_types": [S, S, F]}
    text = SIZES | {k: fields[k] for k in keep if k in fields} | small | changes
    text = text | {"num_kv_shared_layers": text["num_hidden_layers"], "vocab_size_per_layer_input": 0}
    head = {"use_ordered_embeddings": ordered, "num_centroids": 12, "centroid_intermediate_top_k": 4}
    if family == "12b":
        text = {k: v for k, v in text.items() if "per_layer_input" not in k} | {
            "model_type": "gemma4_unified_text"
        }
        config = Gemma4UnifiedAssistantConfig(text_config=text, backbone_hidden_size=backbone, **head)
        model: PreTrainedModel = Gemma4UnifiedAssistantForCausalLM(config)
    else:
        text["model_type"] = "gemma4_text"
        model = Gemma4AssistantForCausalLM(
            Gemma4AssistantConfig(text_config=text, backbone_hidden_size=backbone, **head)
        )
    if ordered:
        model.masked_embedding.token_ordering.copy_(torch.randperm(text["vocab_size"]))
    return finish(model, folder)


def finish(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    randomize(model)
    model.eval()
    model.set_attn_implementation("eager")
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def randomize(model: PreTrainedModel) -> None:
    """Unit-gain matrices, norms in 0.6..1.4, layer scalars in 0.7..1.1; the last norm spreads the logits."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("embed_scale", "token_ordering", "inv_freq")):
            continue
        if name.endswith("layer_scalar"):
            tensor.uniform_(0.7, 1.1)
        elif tensor.dim() >= 2:
            tensor.normal_(0, tensor.shape[-1] ** -0.5)
        else:
            tensor.uniform_(0.6, 1.4)
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            tensor.mul_(tensor.shape[0] ** -0.25)  # scores of unit size: attention has scale 1
        if name.endswith(("model.norm.weight", "language_model.norm.weight", "embedding_norm.weight")):
            tensor.mul_(3.0)  # a flat distribution would hide errors
