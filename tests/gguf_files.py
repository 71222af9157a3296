"""Writes small GGUF files as llama.cpp's converter does, from state dicts of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch

LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip
TOP = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
GEMMA_LAYER = LAYER | {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm", "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm", "router.proj": "ffn_gate_inp",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2", "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}  # fmt: skip
GEMMA_WHOLE = {
    "layer_scalar": "layer_output_scale.weight", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale", "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}  # fmt: skip
GEMMA_TOP = TOP | {
    "embed_tokens_per_layer": "per_layer_token_embd", "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
}  # fmt: skip


def gguf_name(name: str, gemma: bool = False) -> str:
    """The GGUF name of a checkpoint tensor (without prefix)."""
    layer, top = (GEMMA_LAYER, GEMMA_TOP) if gemma else (LAYER, TOP)
    stem, _, end = name.rpartition(".")
    if not name.startswith("layers."):
        return f"{top[stem]}.{end}"
    _, number, inside = name.split(".", 2)
    if gemma and inside in GEMMA_WHOLE:
        return f"blk.{number}.{GEMMA_WHOLE[inside]}"
    stem, _, end = inside.rpartition(".")
    return f"blk.{number}.{layer[stem]}.{end}"


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """What the converter does to q and k of `llama`."""
    return (
        rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


def write_gguf(
    path: Path,
    architecture: str,
    fields: Mapping[str, object],
    tensors: Mapping[str, np.ndarray],
    kind_of: Callable[[str, np.ndarray], gguf.GGMLQuantizationType] | None = None,
    tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """`fields` without the architecture's prefix unless they hold a dot-separated `general` or `tokenizer`."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        name = key if key.split(".")[0] in ("general", "tokenizer") else f"{architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    if tokenizer is not None:
        tokenizer(writer)
    else:
        small_tokenizer(writer)
    for name, data in tensors.items():
        kind = gguf.GGMLQuantizationType.F32 if kind_of is None else kind_of(name, data)
        if data.dtype == np.int64:
            writer.add_tensor(name, data)
        elif data.dtype == np.uint8:  # blocks already
            writer.add_tensor(name, data, raw_dtype=kind)
        elif kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, data.astype(np.float32))
        else:
            writer.add_tensor(name, gguf.quants.quantize(data.astype(np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def small_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(["a", "b", "ab", "<|eot_id|>", "<s>"])
    writer.add_token_types([1, 1, 1, 3, 3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(4)


def state_of(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Checkpoint name without prefix -> values."""
    return {
        name.removeprefix("model.").removeprefix("language_model."): value.detach().float().numpy()
        for name, value in model.state_dict().items()
    }
