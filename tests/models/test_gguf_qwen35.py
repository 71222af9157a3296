"""A GGUF file of Qwen3.5: what llama.cpp's converter moves, adds and renames is read as the folder it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file

import paceline
from decoders import build_decoder
from gguf_files import gguf_name, write_gguf
from mtp_files import build_mtp
from paceline.convert.to_folder import write_folder
from paceline.errors import ConfigError, UsageError
from paceline.models.config import parse_target, read_config
from paceline.models.layers.decoder_config import DecoderConfig
from small_tokenizers import SIZE, byte_level

DELTA = {
    "in_proj_qkv.weight": "attn_qkv.weight", "in_proj_z.weight": "attn_gate.weight",
    "in_proj_b.weight": "ssm_beta.weight", "in_proj_a.weight": "ssm_alpha.weight",
    "conv1d.weight": "ssm_conv1d.weight", "dt_bias": "ssm_dt.bias", "A_log": "ssm_a",
    "norm.weight": "ssm_norm.weight", "out_proj.weight": "ssm_out.weight",
}  # fmt: skip
MODULE = {
    "mtp.fc": "nextn.eh_proj", "mtp.pre_fc_norm_embedding": "nextn.enorm", "mtp.pre_fc_norm_hidden": "nextn.hnorm",
    "mtp.norm": "nextn.shared_head_norm",
}  # fmt: skip
SHARED = {
    "shared_expert_gate": "ffn_gate_inp_shexp", "shared_expert.gate_proj": "ffn_gate_shexp",
    "gate": "ffn_gate_inp", "shared_expert.up_proj": "ffn_up_shexp", "shared_expert.down_proj": "ffn_down_shexp",
}  # fmt: skip
PROMPT = [2, 30, 31, 32, 80, 44]


def tiled(rows: np.ndarray, config: DecoderConfig, width: int) -> np.ndarray:
    """Value heads as the converter orders them: the first of each key head, then the second."""
    assert config.delta is not None
    keys, values = config.delta.key_heads, config.delta.value_heads
    shape = (keys, values // keys, width, *rows.shape[1:])
    return rows.reshape(shape).swapaxes(0, 1).reshape(rows.shape)


def stored(name: str, value: np.ndarray, config: DecoderConfig) -> tuple[str, np.ndarray]:
    """A checkpoint tensor as `conversion/qwen.py` of llama.cpp writes it."""
    delta = config.delta
    assert delta is not None
    name = name.removeprefix("model.")
    if "norm" in name and ".linear_attn." not in name:
        value = value + 1
    if name.rpartition(".")[0] in MODULE:
        return f"blk.{config.layer_count}.{MODULE[name.rpartition('.')[0]]}.weight", value
    name = name.replace("mtp.layers.0.", f"layers.{config.layer_count}.")
    at, _, expert = name.rpartition(".weight")[0].rpartition(".mlp.")
    if expert in SHARED:
        row = value[0] if expert == "shared_expert_gate" else value
        return f"blk.{at.removeprefix('layers.')}.{SHARED[expert]}.weight", row
    if ".linear_attn." not in name:
        made = gguf_name(name)
        return made.replace("ffn_norm", "post_attention_norm"), value
    at, inside = name.split(".linear_attn.")
    if inside in ("in_proj_qkv.weight", "conv1d.weight"):
        value = value.reshape(delta.channels, -1)
        value = np.concatenate(
            [value[: 2 * delta.keys], tiled(value[2 * delta.keys :], config, delta.value_dim)]
        )
    elif inside == "in_proj_z.weight":
        value = tiled(value, config, delta.value_dim)
    elif inside == "out_proj.weight":
        value = tiled(value.T, config, delta.value_dim).T
    elif inside != "norm.weight":
        value = tiled(-np.exp(value) if inside == "A_log" else value, config, 1)
    return f"blk.{at.removeprefix('layers.')}.{DELTA[inside]}", value


def fields_of(config: DecoderConfig, modules: int = 1) -> dict[str, Any]:
    delta, moe = config.delta, config.moe
    assert delta is not None
    experts = {} if moe is None else {
        "expert_count": moe.experts, "expert_used_count": moe.top_k,
        "expert_feed_forward_length": moe.intermediate_size, "expert_shared_feed_forward_length": config.shared_expert,
    }  # fmt: skip
    return experts | {
        "block_count": config.layer_count + modules, "nextn_predict_layers": modules, "context_length": config.max_len,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.heads, "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim, "attention.layer_norm_rms_epsilon": config.eps,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config.kinds] + [False] * modules,
        "rope.freq_base": config.rotary.theta, "rope.dimension_count": config.rotated,
        "ssm.conv_kernel": delta.kernel, "ssm.state_size": delta.key_dim, "ssm.group_count": delta.key_heads,
        "ssm.time_step_rank": delta.value_heads, "ssm.inner_size": delta.values,
    }  # fmt: skip


def build(folder: Path, name: str = "qwen3_5", **changes: Any) -> DecoderConfig:
    plain = folder.with_name("plain")
    build_decoder(name, plain, vocab_size=SIZE, **changes)
    byte_level(plain, "qwen2")
    build_mtp(plain, folder, "qwen")
    config = parse_target(read_config(folder))
    assert isinstance(config, DecoderConfig)
    return config


def write(folder: Path, file: Path, config: DecoderConfig, drop: str = "-", **changes: Any) -> Path:
    read = {
        name: value.float().numpy()
        for part in folder.glob("*.safetensors")
        for name, value in load_file(part).items()
    }
    tensors = dict(stored(name, value, config) for name, value in read.items() if ".experts." not in name)
    for name in read:
        if ".experts.0." in name:  # one tensor for all of them
            at, _, what = name.partition(".mlp.experts.0.")
            at = at.removeprefix("model.").replace("mtp.layers.0", f"layers.{config.layer_count}")
            assert config.moe is not None
            each = [read[name.replace(".experts.0.", f".experts.{e}.")] for e in range(config.moe.experts)]
            made = f"blk.{at.removeprefix('layers.')}.ffn_{what.partition('_')[0]}_exps.weight"
            tensors[made] = np.stack(each)
    fields = {key: value for key, value in (fields_of(config) | changes).items() if key != drop}
    return write_gguf(file, "qwen35" if config.moe is None else "qwen35moe", fields, tensors)


def text(path: Path, **options: Any) -> tuple[list[int], int]:
    """(token ids, drafts kept) of a text."""
    with paceline.LLM(str(path), max_model_len=128, activations="float32", threads=1, **options) as llm:
        params = paceline.SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
        done = llm.generate(PROMPT, params)[0]
        return done.token_ids, done.stats.accepted


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5-moe"])
def test_a_file_writes_and_drafts_as_its_folder(name: str, tmp_path: Path) -> None:
    config = build(tmp_path / "hf", name)
    file = write(tmp_path / "hf", tmp_path / "m.gguf", config, "feed_forward_length" if config.moe else "-")
    for options in ({"drafter": "none"}, {"drafter": "mtp", "draft_tokens": 3}):
        assert text(file, **options) == text(tmp_path / "hf", **options)


def test_blocks_need_not_be_taken_apart(tmp_path: Path) -> None:
    """The inputs of the output projection stand as the file has them."""
    config = build(tmp_path / "hf", linear_key_head_dim=16, linear_value_head_dim=16)
    tensors = {}
    for name, value in load_file(tmp_path / "hf" / "model.safetensors").items():
        made, data = stored(name, value.float().numpy(), config)
        tensors[made] = data
    q8 = gguf.GGMLQuantizationType.Q8_0
    plain = gguf.GGMLQuantizationType.F32
    file = write_gguf(
        tmp_path / "m.gguf", "qwen35", fields_of(config), tensors,
        lambda name, data: q8 if data.ndim == 2 and data.shape[1] % 32 == 0 and "conv" not in name else plain,
    )  # fmt: skip
    assert text(file, drafter="mtp", draft_tokens=3)[0] == text(file, drafter="none")[0]


@pytest.mark.parametrize(
    ("changes", "drop", "message"),
    [
        ({}, "ssm.state_size", "lacks qwen35.ssm.state_size in its metadata"),
        ({"ssm.time_step_rank": 3}, "-", "3 value heads over 2 key heads"),
        ({"ssm.time_step_rank": 0}, "-", "linear_num_value_heads is 0"),
        ({"attention.key_length": 0}, "-", "head_dim"),
        ({"rope.dimension_count": 64}, "-", "is not an even number of columns"),
        ({"attention.recurrent_layers": [True] * 6}, "-", "has no full_attention"),
    ],
)
def test_metadata_that_cannot_be(changes: dict[str, Any], drop: str, message: str, tmp_path: Path) -> None:
    config = build(tmp_path / "hf")
    file = write(tmp_path / "hf", tmp_path / "m.gguf", config, drop, **changes)
    with pytest.raises(ConfigError, match=message):
        paceline.LLM(str(file), drafter="none", max_model_len=64)


def test_no_folder_is_written_of_it(tmp_path: Path) -> None:
    config = build(tmp_path / "hf")
    file = write(tmp_path / "hf", tmp_path / "m.gguf", config)
    with pytest.raises(UsageError, match="take the safetensors checkpoint of this model"):
        write_folder(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()
