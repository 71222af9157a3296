"""GGUF files with layers of Mamba: what llama.cpp's converter changes is read as the folder that it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import paceline
from decoders import FULL, LINEAR, build_decoder
from gguf_files import gguf_name, interleaved, write_gguf
from paceline.convert.to_folder import write_folder
from paceline.errors import ConfigError, UsageError
from paceline.models.config import parse_target, read_config
from paceline.models.layers.decoder_config import DecoderConfig, MambaConfig
from small_tokenizers import SIZE, byte_level

MAMBA = {
    "in_proj.weight": "ssm_in.weight", "conv1d.weight": "ssm_conv1d.weight", "conv1d.bias": "ssm_conv1d.bias",
    "dt_bias": "ssm_dt.bias", "A_log": "ssm_a", "D": "ssm_d", "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}  # fmt: skip
PARTS = {
    "block_sparse_moe.input_linear": ("ffn_gate_exps", "ffn_up_exps"),
    "block_sparse_moe.output_linear": ("ffn_down_exps",),
    "block_sparse_moe.router": ("ffn_gate_inp",), "block_sparse_moe.router.layer": ("ffn_gate_inp",),
}  # fmt: skip
MIXTURE = {
    "gate.weight": "ffn_gate_inp.weight", "gate.e_score_correction_bias": "exp_probs_b.bias",
    "experts.up_proj": "ffn_up_exps.weight", "experts.down_proj": "ffn_down_exps.weight",
    "shared_experts.up_proj.weight": "ffn_up_shexp.weight", "shared_experts.down_proj.weight": "ffn_down_shexp.weight",
    "fc1_latent_proj.weight": "ffn_latent_down.weight", "fc2_latent_proj.weight": "ffn_latent_up.weight",
}  # fmt: skip
PROMPT = [2, 30, 31, 32, 80, 44]


def stored(name: str, value: np.ndarray, config: DecoderConfig) -> list[tuple[str, np.ndarray]]:
    """A checkpoint tensor as `conversion/granite.py` and `conversion/mamba.py` of llama.cpp write it."""
    name, mamba = name.removeprefix("model.").removeprefix("backbone."), config.delta
    assert isinstance(mamba, MambaConfig)
    if ".mamba." in name or name.partition(".mixer.")[2] in MAMBA:
        at, inside = name.split(".mamba." if ".mamba." in name else ".mixer.")
        if inside == "conv1d.weight":
            value = value[:, 0]
        elif inside in ("A_log", "D"):
            value = (-np.exp(value) if inside == "A_log" else value)[:, None]
        elif inside == "norm.weight":
            value = value.reshape(mamba.groups, -1)
        return [(f"blk.{at.removeprefix('layers.')}.{MAMBA[inside]}", value)]
    if ".mixer." in name or config.model_type == "nemotron_h":
        return [(one_part(name), value)]
    at, _, inside = name.removesuffix(".weight").partition(".shared_mlp.")
    shared = "_shexp" if config.moe else ""
    parts: tuple[str, ...] = ()
    if inside:
        parts = (
            (f"ffn_down{shared}",) if inside == "output_linear" else (f"ffn_gate{shared}", f"ffn_up{shared}")
        )
    elif ".block_sparse_moe." in name:
        at, _, inside = name.removesuffix(".weight").partition(".block_sparse_moe.")
        parts = PARTS[f"block_sparse_moe.{inside}"]
    if parts:
        pieces = np.split(value, len(parts), axis=-2)
        return [
            (f"blk.{at.removeprefix('layers.')}.{part}.weight", one)
            for part, one in zip(parts, pieces, strict=True)
        ]
    if "q_proj" in name or "k_proj" in name:
        value = interleaved(value, config.heads if "q_proj" in name else config.kv_heads)
    return [(gguf_name(name), value)]


def stacked(read: dict[str, Any]) -> dict[str, Any]:
    """With the experts of a layer, which folders have one by one, in one tensor."""
    out: dict[str, Any] = {}
    for name, value in read.items():
        at, _, one = name.removesuffix(".weight").partition(".mixer.experts.")
        if one:
            out.setdefault(f"{at}.mixer.experts.{one.partition('.')[2]}", {})[int(one.partition(".")[0])] = (
                value
            )
        else:
            out[name] = value
    return {
        name: torch.stack([value[i] for i in range(len(value))]) if isinstance(value, dict) else value
        for name, value in out.items()
    }


def one_part(name: str) -> str:
    """The name of a tensor of Nemotron-H that is not Mamba's."""
    if not name.startswith("layers."):
        return {"embeddings": "token_embd", "norm_f": "output_norm", "lm_head": "output"}[
            name.split(".")[0]
        ] + ".weight"
    _, number, inside = name.split(".", 2)
    inside = inside.removeprefix("mixer.")
    if inside in MIXTURE:
        return f"blk.{number}.{MIXTURE[inside]}"
    names = {"norm": "attn_norm", "o": "attn_output", "up": "ffn_up", "down": "ffn_down"}
    stem, _, end = inside.replace("_proj", "").partition(".")
    return f"blk.{number}.{names.get(stem, f'attn_{stem}')}.{end}"


def fields_of(config: DecoderConfig) -> dict[str, Any]:
    mamba, moe = config.delta, config.moe
    assert isinstance(mamba, MambaConfig)
    widths: Any = config.intermediate_size if moe is None else moe.intermediate_size
    if config.model_type == "nemotron_h":
        widths = [widths if kind in ("mlp", "moe") else 0 for kind in config.kinds]
    experts: dict[str, Any] = {}
    if moe is not None:
        experts = {"expert_count": moe.experts, "expert_used_count": moe.top_k}
    if moe is not None and config.routing is not None:  # of Nemotron-H
        experts |= {
            "expert_weights_norm": config.renormalize, "expert_weights_scale": config.routing.factor,
            "expert_group_count": config.routing.groups, "expert_group_used_count": config.routing.kept,
            "expert_shared_count": 1,
        } | ({} if moe.width is None else {"moe_latent_size": moe.width})  # fmt: skip
    return experts | {
        "block_count": config.layer_count, "context_length": config.max_len, "embedding_length": config.hidden_size,
        "feed_forward_length": widths,
        "expert_shared_feed_forward_length": config.shared_expert if config.routing else config.intermediate_size,
        "attention.head_count": config.heads,
        "attention.head_count_kv": [config.kv_heads if kind == "full_attention" else 0 for kind in config.kinds],
        "attention.layer_norm_rms_epsilon": config.eps, "rope.dimension_count": config.head_dim,
        "rope.freq_base": config.rotary.theta, "rope.scaling.finetuned": False,
        "attention.key_length": config.head_dim,
        "attention.scale": config.attention_scale or config.head_dim**-0.5, "residual_scale": config.residual_scale,
        "embedding_scale": config.embedding_scale, "logit_scale": 1.0 / config.logit_scale,
        "ssm.conv_kernel": mamba.kernel, "ssm.state_size": mamba.state, "ssm.group_count": mamba.groups,
        "ssm.inner_size": mamba.inner, "ssm.time_step_rank": mamba.heads,
    } | ({} if moe is None else {"expert_feed_forward_length": moe.intermediate_size})  # fmt: skip


def text(path: Path) -> list[int]:
    params = paceline.SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with paceline.LLM(str(path), drafter="none", max_model_len=64, activations="float32", threads=1) as llm:
        return llm.generate(PROMPT, params)[0].token_ids


@pytest.mark.parametrize(
    "name", ["granite4-h", "granite4-h-moe", "nemotron-h", "nemotron-h-moe", "nemotron-h-latent"]
)
def test_a_file_is_the_folder_it_came_from(name: str, tmp_path: Path) -> None:
    folder, file = tmp_path / "hf", tmp_path / "m.gguf"
    changes = {"mamba_proj_bias": False} if name == "granite4-h-moe" else {}  # which files have no place for
    if (
        name == "nemotron-h-latent"
    ):  # layers of MLPs have no file beside experts: all widths are those of experts
        changes = {"mlp_bias": False, "layer_types": ["moe", LINEAR, LINEAR, FULL, LINEAR, "moe"]}
    build_decoder(name, folder, vocab_size=SIZE, **changes)
    byte_level(folder, "qwen2")
    config = parse_target(read_config(folder))
    assert isinstance(config, DecoderConfig)
    read = stacked(load_file(folder / "model.safetensors"))
    tensors = dict(one for key, value in read.items() for one in stored(key, value.numpy(), config))
    nemotron = "nemotron_h_moe" if config.moe else "nemotron_h"
    write_gguf(file, nemotron if "nemotron" in name else "granitehybrid", fields_of(config), tensors)
    assert text(file) == text(folder)
    with pytest.raises(UsageError, match=f"of a {config.model_type} stand otherwise in a folder"):
        write_folder(file, tmp_path / "back")


def test_a_block_for_multi_token_prediction_is_refused_by_name(tmp_path: Path) -> None:
    folder, file = tmp_path / "hf", tmp_path / "m.gguf"
    build_decoder("nemotron-h-moe", folder, vocab_size=SIZE)
    byte_level(folder, "qwen2")
    config = parse_target(read_config(folder))
    assert isinstance(config, DecoderConfig)
    tensors = {"token_embd.weight": np.zeros((SIZE, 48), np.float32)}
    write_gguf(file, "nemotron_h_moe", fields_of(config) | {"nextn_predict_layers": 1}, tensors)
    with pytest.raises(ConfigError, match="get a file of it that was converted without that block"):
        paceline.LLM(str(file), drafter="none")
