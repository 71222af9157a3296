"""GGUF files with layers of Mamba: what llama.cpp's converter changes is read as the folder that it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import paceline
from decoders import build_decoder
from gguf_files import gguf_name, interleaved, write_gguf
from paceline.convert.to_folder import write_folder
from paceline.errors import UsageError
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


def one_part(name: str) -> str:
    """The name of a tensor of Nemotron-H that is not Mamba's."""
    if not name.startswith("layers."):
        return {"embeddings": "token_embd", "norm_f": "output_norm", "lm_head": "output"}[
            name.split(".")[0]
        ] + ".weight"
    _, number, inside = name.split(".", 2)
    inside = inside.removeprefix("mixer.").replace("_proj", "")
    names = {"norm": "attn_norm", "o": "attn_output", "up": "ffn_up", "down": "ffn_down"}
    stem = inside.partition(".")[0]
    return f"blk.{number}.{names.get(stem, f'attn_{stem}')}.weight"


def fields_of(config: DecoderConfig) -> dict[str, Any]:
    mamba, moe = config.delta, config.moe
    assert isinstance(mamba, MambaConfig)
    widths: Any = config.intermediate_size if moe is None else moe.intermediate_size
    if config.model_type == "nemotron_h":
        widths = [widths if kind == "mlp" else 0 for kind in config.kinds]
    experts = {} if moe is None else {"expert_count": moe.experts, "expert_used_count": moe.top_k}
    return experts | {
        "block_count": config.layer_count, "context_length": config.max_len, "embedding_length": config.hidden_size,
        "feed_forward_length": widths,
        "expert_shared_feed_forward_length": config.intermediate_size, "attention.head_count": config.heads,
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


@pytest.mark.parametrize("name", ["granite4-h", "granite4-h-moe", "nemotron-h"])
def test_a_file_is_the_folder_it_came_from(name: str, tmp_path: Path) -> None:
    folder, file = tmp_path / "hf", tmp_path / "m.gguf"
    changes = {"mamba_proj_bias": False} if name == "granite4-h-moe" else {}  # which files have no place for
    build_decoder(name, folder, vocab_size=SIZE, **changes)
    byte_level(folder, "qwen2")
    config = parse_target(read_config(folder))
    assert isinstance(config, DecoderConfig)
    read = load_file(folder / "model.safetensors")
    tensors = dict(one for key, value in read.items() for one in stored(key, value.numpy(), config))
    write_gguf(file, "nemotron_h" if name == "nemotron-h" else "granitehybrid", fields_of(config), tensors)
    assert text(file) == text(folder)
    with pytest.raises(UsageError, match=f"of a {config.model_type} stand otherwise in a folder"):
        write_folder(file, tmp_path / "back")
