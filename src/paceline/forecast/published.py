"""config.json of published models by name, so that what they need is known before anything is downloaded.

Source: the config.json files of these repositories on the hub. Sizes follow from them: tests/forecast/test_estimate.py
compares their parameters with the published numbers.
"""

from __future__ import annotations

import re
from typing import Any

from paceline.forecast.shapes import TARGETS, fields_of

_QWEN: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0, "max_position_embeddings": 40_960, "eos_token_id": 151_645, "hidden_act": "silu",
}  # fmt: skip
_QWEN_MOE: dict[str, Any] = _QWEN | {
    "model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
_LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128_256, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
    "max_position_embeddings": 131_072, "eos_token_id": [128_001, 128_008, 128_009], "hidden_act": "silu",
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
}  # fmt: skip
_SMOL: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 49_152, "rms_norm_eps": 1e-5, "rope_theta": 100_000.0, "eos_token_id": 2,
    "max_position_embeddings": 8192, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip

_DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3", "vocab_size": 129_280, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "max_position_embeddings": 163_840,
    "eos_token_id": 1, "hidden_act": "silu",
    "rope_scaling": {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
                     "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip


def _sized(hidden: int, layers: int, heads: int, inner: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": inner,
    } | more


DECODERS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": _QWEN | _sized(1024, 28, 16, 3072, tie_word_embeddings=True),
    "Qwen/Qwen3-1.7B": _QWEN | _sized(2048, 28, 16, 6144, tie_word_embeddings=True),
    "Qwen/Qwen3-4B": _QWEN | _sized(2560, 36, 32, 9728, tie_word_embeddings=True),
    "Qwen/Qwen3-8B": _QWEN | _sized(4096, 36, 32, 12_288),
    "Qwen/Qwen3-14B": _QWEN | _sized(5120, 40, 40, 17_408),
    "Qwen/Qwen3-32B": _QWEN | _sized(5120, 64, 64, 25_600),
    "Qwen/Qwen3-30B-A3B": _QWEN_MOE | _sized(2048, 48, 32, 6144, moe_intermediate_size=768),
    "Qwen/Qwen3-235B-A22B": _QWEN_MOE | _sized(4096, 94, 64, 12_288, moe_intermediate_size=1536),
    "meta-llama/Llama-3.2-1B": _LLAMA | _sized(2048, 16, 32, 8192, tie_word_embeddings=True),
    "meta-llama/Llama-3.2-3B": _LLAMA | _sized(3072, 28, 24, 8192, tie_word_embeddings=True),
    "meta-llama/Llama-3.1-8B": _LLAMA | _sized(4096, 32, 32, 14_336),
    "meta-llama/Llama-3.1-70B": _LLAMA | _sized(8192, 80, 64, 28_672),
    "meta-llama/Llama-3.3-70B": _LLAMA | _sized(8192, 80, 64, 28_672),
    "meta-llama/Llama-3.1-405B": _LLAMA | _sized(16_384, 126, 128, 53_248),
    "deepseek-ai/DeepSeek-V3": _DEEPSEEK | _sized(7168, 61, 128, 18_432),
    "deepseek-ai/DeepSeek-R1": _DEEPSEEK | _sized(7168, 61, 128, 18_432),
    "HuggingFaceTB/SmolLM2-135M": _SMOL | _sized(576, 30, 9, 1536, num_key_value_heads=3),
    "HuggingFaceTB/SmolLM2-360M": _SMOL | _sized(960, 32, 15, 2560, num_key_value_heads=5),
    "HuggingFaceTB/SmolLM2-1.7B": _SMOL | _sized(2048, 24, 32, 8192, num_key_value_heads=32),
}
GEMMA = {f"google/gemma-4-{name.removeprefix('gemma-4-').upper()}": name for name in TARGETS}
_TUNED = re.compile(r"-(it|instruct|base)$", re.IGNORECASE)


def published(name: str) -> tuple[str, dict[str, Any]] | None:
    """(hub id, config.json) of a model named by its hub id or the last part of it; None for one not known here.

    Instruction-tuned and base models have the same shape; the id is the one that was asked for.
    """
    owner, _, last = name.rpartition("/")
    wanted = _TUNED.sub("", last).lower()
    for hub_id in (*GEMMA, *DECODERS):
        its, _, known = hub_id.rpartition("/")
        if known.lower() == wanted and owner in ("", its):
            return f"{its}/{last if owner else known + last[len(wanted) :]}", (
                fields_of(GEMMA[hub_id]) if hub_id in GEMMA else DECODERS[hub_id]
            )
    return None
