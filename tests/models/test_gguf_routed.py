"""GGUF files of DeepSeek-V3, GLM-4-MoE and Qwen3-Next, as llama.cpp's converter writes them: logits are transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from checkpoints import VOCAB
from decoders import build_decoder
from gguf_files import write_gguf
from paceline.errors import ConfigError, WeightsError
from paceline.kv.cache import KVCache
from paceline.models.config import read_config
from paceline.models.registry import load_target
from paceline.ops import native
from paceline.ops.reference import EagerRunner

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek": ("deepseek2", {}),
    "glm4-moe": ("glm4moe", {}),
    "glm4-norms": ("glm4moe", {}),
    "qwen3_next": ("qwen3next", {"mlp_only_layers": [], "norm_topk_prob": True}),
}
RENAMED = {"e_score_correction_bias": "e_score_correction.bias", "dt_bias": "dt_proj.bias"}
Tensors = dict[str, np.ndarray]


def stored(name: str, data: np.ndarray, config: Any) -> Tensors:
    """A checkpoint tensor by the names that the converter looks up, with the values that it writes."""
    at, _, what = name.rpartition(".mlp.experts.")
    if what == "gate_up_proj":
        parts = dict(zip(("gate_proj", "up_proj"), np.split(data, 2, axis=1)))
        return {f"{at}.mlp.experts.{part}.weight": value for part, value in parts.items()}
    if what == "down_proj":
        return {f"{name}.weight": data}
    at, _, what = name.rpartition(".")
    name = f"{at}.{RENAMED[what]}" if what in RENAMED else name
    if "kv_b_proj" in name:
        heads, plain = config.num_attention_heads, config.qk_nope_head_dim
        k, v = np.split(data.reshape(heads, -1, data.shape[-1]), [plain], axis=1)
        return {name.replace("kv_b", "k_b"): k.swapaxes(1, 2), name.replace("kv_b", "v_b"): v}
    if config.model_type != "qwen3_next":
        return {name: data}
    if what == "A_log":
        data = -np.exp(data)
    elif "conv1d" in name or "shared_expert_gate" in name:
        data = data.squeeze()
    elif name.endswith("norm.weight") and "linear_attn" not in name:
        data = data + 1
    if "in_proj_qkvz" not in name:
        return {name: data}
    keys, wide = config.linear_num_key_heads, config.linear_key_head_dim
    per = config.linear_num_value_heads // keys * config.linear_value_head_dim
    cut = np.split(data.reshape(keys, -1, data.shape[-1]), np.cumsum([wide, wide, per]), axis=1)
    q, k, v, z = (part.reshape(-1, data.shape[-1]) for part in cut)
    return {f"{at}.attn_qkv": np.concatenate([q, k, v]), f"{at}.attn_gate": z}


def fields_of(config: Any) -> dict[str, object]:
    rope = config.rope_parameters
    out: dict[str, object] = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": float(rope["rope_theta"]),
        "expert_used_count": config.num_experts_per_tok, "expert_feed_forward_length": config.moe_intermediate_size,
    }  # fmt: skip
    if rope["rope_type"] == "yarn":
        out |= {
            "rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }  # fmt: skip
    if config.model_type == "qwen3_next":
        return out | {
            "attention.key_length": config.head_dim, "rope.dimension_count": config.head_dim // 2,
            "expert_count": config.num_experts,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
            "ssm.conv_kernel": config.linear_conv_kernel_dim, "ssm.state_size": config.linear_key_head_dim,
            "ssm.group_count": config.linear_num_key_heads, "ssm.time_step_rank": config.linear_num_value_heads,
            "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
            "attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types],
        }  # fmt: skip
    out |= {
        "expert_count": config.n_routed_experts, "expert_shared_count": config.n_shared_experts,
        "leading_dense_block_count": config.first_k_dense_replace, "expert_gating_func": 2,
        "expert_weights_scale": config.routed_scaling_factor, "expert_weights_norm": config.norm_topk_prob,
        "expert_group_count": config.n_group, "expert_group_used_count": config.topk_group,
    }  # fmt: skip
    if config.model_type == "glm4_moe":
        share = rope.get("partial_rotary_factor", 0.5)
        return out | {
            "attention.key_length": config.head_dim,
            "rope.dimension_count": int(config.head_dim * share),
        }
    return out | {
        "attention.head_count_kv": 1, "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank, "attention.key_length": config.kv_lora_rank + 8,
        "attention.key_length_mla": config.qk_nope_head_dim + 8, "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": 8, "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
    }  # fmt: skip


def written(name: str, folder: Path, **fields: object) -> tuple[Any, Path]:
    architecture, changes = MODELS[name]
    model = build_decoder(name, folder / "hf", **changes)
    config, tensors = model.config, Tensors()
    arch = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for key, value in model.state_dict().items():
        for known, data in stored(key, value.numpy(), config).items():
            what = known.rpartition(".")[2]
            made = f"blk.{known.split('.')[2]}.{what}.weight" if what.startswith("attn_") else names.get_name(
                known, (".weight", ".bias")
            )  # fmt: skip
            assert made is not None, known
            tensors[made] = np.ascontiguousarray(data)
    return model, write_gguf(folder / "m.gguf", architecture, fields_of(config) | fields, tensors)


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_the_file_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs, file = written(name, tmp_path)
    text = torch.randint(3, VOCAB, (30,), generator=torch.Generator().manual_seed(5)).tolist()
    for runner in (EagerRunner(), *([native.NativeRunner(2)] if native.available() else [])):
        target = load_target(file, runner=runner)
        pages = dict.fromkeys(target.layout.kinds, 8)
        cache = KVCache(target.layout, pages, max_sequences=1, max_tokens=64, dtype=target.kv_dtype)
        cache.open(0, text, share=False)
        with torch.no_grad(), cache.tail([(0, text)]) as tail:
            got = target.logits(target.forward(tail.rows(), cache))
            expected = theirs(torch.tensor([text])).logits[0]
        assert expected.std() > 0.5
        assert (got - expected).abs().max() < 1e-4


def test_other_routers_and_torn_attention_are_one_line(tmp_path: Path) -> None:
    _, file = written("deepseek", tmp_path, expert_gating_func=1)
    with pytest.raises(ConfigError, match="chooses experts by another function than sigmoids"):
        read_config(file)
    fields = {"block_count": 1, "context_length": 9, "attention.head_count": 2, "embedding_length": 8}
    torn = {"token_embd.weight": np.zeros((9, 8)), "blk.0.attn_k_b.weight": np.zeros((2, 4, 4)),
            "blk.0.attn_v_b.weight": np.zeros((2, 4, 8))}  # fmt: skip
    sizes = {"attention.kv_lora_rank": 4, "attention.key_length_mla": 8, "attention.value_length_mla": 4}
    experts = {
        "expert_count": 2,
        "expert_used_count": 1,
        "expert_feed_forward_length": 4,
        "feed_forward_length": 8,
    }
    more = {"rope.dimension_count": 4, "attention.head_count_kv": 1}
    write_gguf(tmp_path / "torn.gguf", "deepseek2", fields | sizes | experts | more, torn)
    with pytest.raises(WeightsError, match=r"attn_k_b.weight and blk.0.attn_v_b.weight do not fit together"):
        load_target(tmp_path / "torn.gguf")
