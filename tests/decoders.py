"""Small random checkpoints of each family of plain decoders, saved by transformers in HF layout.

One row of DECODERS is one variant of a family: (transformers' class, fields of its config).
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from transformers import PreTrainedModel

from checkpoints import VOCAB, WINDOW, finish

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 2, "eos_token_id": 1,
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
EXPERTS = {
    "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
}  # fmt: skip
GROUPED = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT = GROUPED | {
    "num_key_value_heads": 4, "q_lora_rank": 40, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 20,
}  # fmt: skip
DEEP_YARN = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.0, 1.5, 1.25, 1.0, 2.0], "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
}  # fmt: skip
LINEAR, FULL, SLIDING, CONV = "linear_attention", "full_attention", "sliding_attention", "conv"
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 5, "layer_types": [LINEAR, LINEAR, FULL, LINEAR, FULL], "head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                        "mrope_section": [2, 1, 1], "mrope_interleaved": True},
}  # fmt: skip
HYBRID_EXPERTS = EXPERTS | {"shared_expert_intermediate_size": 40}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-biases": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 16, "eos_token_id": [1, 5]}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": WINDOW, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-yarn": ("Qwen3", {"head_dim": 32, "rope_parameters": YARN}),
    "qwen3-biases": ("Qwen3", {"head_dim": 32, "attention_bias": True}),
    "qwen3-moe": ("Qwen3Moe", EXPERTS),
    "qwen3-moe-mixed": ("Qwen3Moe", EXPERTS | {"mlp_only_layers": [1], "norm_topk_prob": False}),
    "deepseek": ("DeepseekV3", LATENT | {"n_group": 4, "topk_group": 2, "rope_parameters": DEEP_YARN}),
    "deepseek-whole": ("DeepseekV3", LATENT | {"q_lora_rank": None, "attention_bias": True, "rope_interleave": False}),
    "deepseek-odd": ("DeepseekV3", LATENT | {"attention_bias": True, "norm_topk_prob": False, "rope_parameters": YARN}),
    "qwen3_5": ("Qwen3_5", HYBRID),
    "gemma3": ("Gemma3", {
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING], "sliding_window": WINDOW, "head_dim": 16,
        "query_pre_attn_scalar": 24, "tie_word_embeddings": True, "rope_parameters": {
            FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
    }),
    "gemma2": ("Gemma2", {
        "sliding_window": WINDOW, "head_dim": 16, "query_pre_attn_scalar": 4, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0, "tie_word_embeddings": True,
    }),
    "cohere2": ("Cohere2", {
        "hidden_size": 64, "sliding_window": WINDOW, "layer_types": [SLIDING, FULL, SLIDING, FULL], "logit_scale": 0.3,
        "tie_word_embeddings": True, "pad_token_id": 0,
    }),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1, 0], "pad_token_id": 0}),
    "olmo2": ("Olmo2", {"num_key_value_heads": 4, "pad_token_id": 0}),
    "olmo3": ("Olmo3", {
        "num_key_value_heads": 4, "pad_token_id": 0, "sliding_window": WINDOW, "layer_types": None, "rope_parameters": {
            FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
    }),
    "granite": ("Granite", {
        "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7, "logits_scaling": 4.0,
        "attention_bias": True,
    }),
    "glm4-moe": ("Glm4Moe", GROUPED | {"head_dim": 16, "attention_bias": True, "routed_scaling_factor": 1.7}),
    "glm4-norms": ("Glm4Moe", GROUPED | {"head_dim": 24, "use_qk_norm": True, "n_group": 2, "rope_parameters": YARN}),
    "glm4": ("Glm4", {"head_dim": 16, "pad_token_id": 0}),
    "glm4-yarn": ("Glm4", {"head_dim": 24, "pad_token_id": 0, "attention_bias": False, "rope_parameters": YARN}),
    "phi3": ("Phi3", {"sliding_window": WINDOW, "pad_token_id": 0}),
    "phi4-mini": ("Phi3", {
        "hidden_size": 64, "pad_token_id": 0, "tie_word_embeddings": True, "original_max_position_embeddings": 64,
        "rope_parameters": LONG,
    }),
    "ministral": ("Ministral", {"layer_types": [SLIDING, FULL, SLIDING, FULL], "sliding_window": WINDOW, "head_dim": 16}),
    "ministral3": ("Ministral3", {
        "head_dim": 16, "pad_token_id": 0,
        "rope_parameters": DEEP_YARN | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16},
    }),
    "gpt-oss": ("GptOss", {
        "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": WINDOW, "pad_token_id": 0,
        "rope_parameters": YARN | {"truncate": False},
    }),
    "qwen3_5-moe": ("Qwen3_5Moe", HYBRID | HYBRID_EXPERTS),
    "qwen3_next": ("Qwen3Next", HYBRID | HYBRID_EXPERTS | {"mlp_only_layers": [1], "norm_topk_prob": False}),
    "lfm2": ("Lfm2", {"layer_types": [CONV, CONV, FULL, CONV], "block_multiple_of": 8, "pad_token_id": 0}),
    "lfm2-biases": ("Lfm2", {
        "layer_types": [CONV, FULL, CONV, FULL], "conv_bias": True, "conv_L_cache": 5, "block_auto_adjust_ff_dim": False,
        "pad_token_id": 0, "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }),
    "lfm2-moe": ("Lfm2Moe", {
        "layer_types": [CONV, FULL, CONV, FULL], "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "num_dense_layers": 1, "pad_token_id": 0, "routed_scaling_factor": 1.3,
    }),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 4, "sliding_window": WINDOW, "head_dim": 16}),
    "qwen2-moe": ("Qwen2Moe", EXPERTS | {
        "shared_expert_intermediate_size": 40, "norm_topk_prob": False, "mlp_only_layers": [1], "head_dim": 12,
    }),
    "seed-oss": ("SeedOss", {"head_dim": 16, "attention_out_bias": True, "pad_token_id": 0}),
    "exaone4": ("Exaone4", {"sliding_window": WINDOW, "sliding_window_pattern": 2}),
    "exaone4-full": ("Exaone4", {"sliding_window": None, "layer_types": [FULL] * 4, "rope_parameters": LLAMA3}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 16, "pad_token_id": 0}),
    "ernie4_5-biases": ("Ernie4_5", {"head_dim": 12, "pad_token_id": 0, "use_bias": True, "tie_word_embeddings": True}),
    "ernie4_5-moe": ("Ernie4_5_Moe", {
        "moe_intermediate_size": 24, "moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 2, "pad_token_id": 0,
        "moe_layer_end_index": 2,
    }),
    "glm4-flash": ("Glm4MoeLite", {name: value for name, value in LATENT.items() if name != "first_k_dense_replace"} | {
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse"], "routed_scaling_factor": 1.8,
    }),
    "muse-glimmer": ("MuseGlimmer", {
        "head_dim": 16, "num_hidden_layers": 5, "sliding_window": WINDOW, "pad_token_id": 0, "hidden_act": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "qk_scale_factor": 0.9,
        "final_logit_softcapping": 3.0, "output_multiplier": 0.7,
    }),
    "granite4": ("GraniteMoeHybrid", {
        "layer_types": [FULL] * 4, "num_local_experts": 0, "mamba_n_heads": 8, "shared_intermediate_size": 64,
        "pad_token_id": 0, "position_embedding_type": "rope", "embedding_multiplier": 3.0, "attention_multiplier": 0.2,
        "residual_multiplier": 0.7, "logits_scaling": 4.0,
    }),
    "granite4-nope": ("GraniteMoeHybrid", {
        "layer_types": [FULL] * 4, "num_local_experts": 0, "mamba_n_heads": 8, "shared_intermediate_size": 40,
        "pad_token_id": 0, "attention_multiplier": 0.2,
    }),
    "granite4-h": ("GraniteMoeHybrid", {
        "layer_types": [LINEAR, FULL, LINEAR, LINEAR], "num_local_experts": 0, "mamba_n_heads": 8, "mamba_d_state": 24,
        "mamba_n_groups": 2, "shared_intermediate_size": 40, "pad_token_id": 0, "attention_multiplier": 0.2,
        "residual_multiplier": 0.7,
    }),
    "nemotron-h": ("NemotronH", {
        "num_hidden_layers": 6, "layer_types": [LINEAR, "mlp", LINEAR, FULL, "mlp", LINEAR], "mamba_num_heads": 8,
        "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 24, "head_dim": 16, "pad_token_id": 0,
    }),
    "nemotron-h-moe": ("NemotronH", {
        "num_hidden_layers": 5, "layer_types": [LINEAR, "moe", FULL, "moe", LINEAR], "mamba_num_heads": 8,
        "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 24, "head_dim": 16, "pad_token_id": 0,
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2,
        "moe_shared_expert_intermediate_size": 40, "routed_scaling_factor": 1.7,
    }),
    "nemotron-h-latent": ("NemotronH", {
        "num_hidden_layers": 6, "layer_types": ["moe", LINEAR, "mlp", FULL, LINEAR, "moe"], "mamba_num_heads": 8,
        "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 24, "head_dim": 16, "pad_token_id": 0,
        "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "moe_latent_size": 32,
        "moe_shared_expert_intermediate_size": 40, "mlp_bias": True, "norm_topk_prob": False,
    }),
    "granite4-h-moe": ("GraniteMoeHybrid", {
        "layer_types": [LINEAR, LINEAR, FULL, LINEAR], "num_local_experts": 6, "mamba_n_heads": 6, "mamba_d_state": 16,
        "mamba_conv_bias": False, "shared_intermediate_size": 40, "intermediate_size": 24, "pad_token_id": 0,
        "num_experts_per_tok": 2, "mamba_d_conv": 3, "mamba_proj_bias": True,
    }),
}  # fmt: skip


def build_decoder(name: str, folder: Path, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Make, save and return the transformers model of one row (eager attention, float32)."""
    torch.manual_seed(seed)
    kind, fields = DECODERS[name]
    if kind == "MuseGlimmer":
        return _muse(copy.deepcopy(SIZES | fields | changes), folder)
    known = [f"{kind}TextConfig", f"{kind}Config"]
    made = next(made for name in known if (made := getattr(transformers, name, None)) is not None)
    config = made(**copy.deepcopy(SIZES | fields | changes))
    model = finish(getattr(transformers, f"{kind}ForCausalLM")(config), folder)
    if LINEAR in (getattr(config, "layer_types", None) or ()):
        _hybrid(model, kind.startswith("Qwen"))
        model.save_pretrained(folder)
    write_letters(folder)
    return model


def _muse(fields: dict[str, Any], folder: Path) -> PreTrainedModel:
    """It is published with an eye only."""
    fields = {key: value for key, value in fields.items() if value is not None}
    sees = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "pos_emb_height": 2, "pos_emb_width": 2}  # fmt: skip
    text = transformers.MuseGlimmerTextConfig(**fields)
    config = transformers.MuseGlimmerConfig(
        text_config=text, vision_config=transformers.MuseGlimmerVisionConfig(**sees), out_hidden_size=64,
        projector_hidden_size=16,
    )  # fmt: skip
    model = finish(transformers.MuseGlimmerForConditionalGeneration(config), folder)
    write_letters(folder)
    return model


def write_letters(folder: Path) -> None:
    """A tokenizer of one character for each token."""
    letters = {chr(ord("0") + i): i for i in range(VOCAB)}
    Backend(WordLevel(letters, unk_token="0")).save(str(folder / "tokenizer.json"))


@torch.no_grad()
def _hybrid(model: PreTrainedModel, shifted: bool) -> None:
    """`shifted`: norms hold what is added to 1. Some heads remember for long, others for a moment."""
    for name, tensor in model.named_parameters():
        if shifted and name.endswith("norm.weight") and "linear_attn" not in name:
            tensor.sub_(1.0)
        if name.endswith("A_log"):
            tensor.uniform_(-5, 0)
        if name.endswith("conv1d.weight"):
            tensor.mul_(2.0)
        if name.endswith("dt_bias"):
            tensor.uniform_(-2, 1)
