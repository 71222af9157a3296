"""Tensor names of GGUF architectures -> the names that Hugging Face checkpoints have, without their prefix.

`Piece` says from which tensors one is made: most are taken as they are; rows of q and k of some architectures are
put back into the order of half-split rotary embeddings, and gate and up of experts are laid one upon the other. Both
move whole rows only, so they work on blocks as they are stored, too. Source of the names: llama.cpp's
`gguf-py/gguf/tensor_mapping.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoints.gguf.reader import Gguf
from paceline.drafter_kinds import DFLASH, EAGLE3
from paceline.errors import WeightsError

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_TOP = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
_ATTENTION = {
    "attn_q.weight": "self_attn.q_proj.weight", "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight", "attn_output.weight": "self_attn.o_proj.weight",
}  # fmt: skip
_BIASES = {
    "attn_q.bias": "self_attn.q_proj.bias", "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias", "attn_output.bias": "self_attn.o_proj.bias",
}  # fmt: skip
_HEAD_NORMS = {
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}
_MLP = {
    "ffn_gate.weight": "mlp.gate_proj.weight", "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}  # fmt: skip
_MLP_BIASES = {name.replace("weight", "bias"): to.replace("weight", "bias") for name, to in _MLP.items()}
_TWO_NORMS = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_EXPERTS = {
    "ffn_gate_inp.weight": "mlp.gate.weight", "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_up_exps.weight": "mlp.experts.gate_up_proj", "ffn_down_exps.weight": "mlp.experts.down_proj",
}  # fmt: skip
_BIASED_EXPERTS = _EXPERTS | {
    "ffn_gate_inp.bias": "mlp.gate.bias", "ffn_gate_exps.bias": "mlp.experts.gate_up_bias",
    "ffn_up_exps.bias": "mlp.experts.gate_up_bias", "ffn_down_exps.bias": "mlp.experts.down_bias",
}  # fmt: skip
# what newer converters may write in place of gate and up of experts: all gates before all ups
_GATE_UP = {
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj", "ffn_gate_up_exps.bias": "mlp.experts.gate_up_bias",
}  # fmt: skip
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
    "ffn_gate_shexp.weight": "mlp.shared_expert.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_expert.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_expert.down_proj.weight",
}
_DELTA = {  # of linear attention, see models/layers/delta_net.py
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight", "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight", "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight", "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log", "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
    "attn_norm.weight": "input_layernorm.weight", "post_attention_norm.weight": "post_attention_layernorm.weight",
}  # fmt: skip
_MAMBA = {  # see models/layers/mamba.py
    "ssm_in.weight": "mamba.in_proj.weight", "ssm_conv1d.weight": "mamba.conv1d.weight",
    "ssm_conv1d.bias": "mamba.conv1d.bias", "ssm_dt.bias": "mamba.dt_bias", "ssm_a": "mamba.A_log", "ssm_d": "mamba.D",
    "ssm_norm.weight": "mamba.norm.weight", "ssm_out.weight": "mamba.out_proj.weight",
}  # fmt: skip
_ONE_PART = {name: to.replace("self_attn.", "mixer.") for name, to in _ATTENTION.items()} | {
    name: to.replace("mamba.", "mixer.") for name, to in _MAMBA.items()
} | {
    f"ffn_{name}.{end}": f"mixer.{name}_proj.{end}" for name in ("up", "down") for end in ("weight", "bias")
} | {"attn_norm.weight": "norm.weight"}  # fmt: skip
_ONE_MIXTURE = {  # experts without gates, which may read narrower rows
    "ffn_gate_inp.weight": "mixer.gate.weight", "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps.weight": "mixer.experts.up_proj", "ffn_down_exps.weight": "mixer.experts.down_proj",
    "ffn_up_shexp.weight": "mixer.shared_experts.up_proj.weight",
    "ffn_down_shexp.weight": "mixer.shared_experts.down_proj.weight",
    "ffn_latent_down.weight": "mixer.fc1_latent_proj.weight", "ffn_latent_up.weight": "mixer.fc2_latent_proj.weight",
}  # fmt: skip
_HALVED_MLP = {  # stored as one in checkpoints; beside experts, too
    "ffn_gate.weight": "mlp.gate_up_proj.weight", "ffn_up.weight": "mlp.gate_up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight", "ffn_gate_shexp.weight": "mlp.gate_up_proj.weight",
    "ffn_up_shexp.weight": "mlp.gate_up_proj.weight", "ffn_down_shexp.weight": "mlp.down_proj.weight",
}  # fmt: skip
_DELTA_NEXT = _DELTA | {"ssm_ba.weight": "linear_attn.in_proj_ba.weight"}
_ROUTED = _EXPERTS | {
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_experts.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_experts.down_proj.weight",
}
_LATENT = {
    "attn_q.weight": "self_attn.q_proj.weight", "attn_q_a.weight": "self_attn.q_a_proj.weight",
    "attn_q_a_norm.weight": "self_attn.q_a_layernorm.weight", "attn_q_b.weight": "self_attn.q_b_proj.weight",
    "attn_kv_a_mqa.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attn_kv_a_norm.weight": "self_attn.kv_a_layernorm.weight", "attn_kv_b.weight": "self_attn.kv_b_proj.weight",
    "attn_k_b.weight": "self_attn.kv_b_proj.weight", "attn_v_b.weight": "self_attn.kv_b_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
}  # fmt: skip
_NEXTN = {  # of modules for multi-token prediction
    "nextn.eh_proj.weight": "eh_proj.weight", "nextn.enorm.weight": "enorm.weight", "nextn.hnorm.weight": "hnorm.weight",
    "nextn.shared_head_norm.weight": "shared_head.norm.weight",
    "nextn.shared_head_head.weight": "shared_head.head.weight", "nextn.embed_tokens.weight": "embed_tokens.weight",
}  # fmt: skip
_GEMMA = _ATTENTION | _HEAD_NORMS | _MLP | {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate.weight": "per_layer_input_gate.weight", "proj.weight": "per_layer_projection.weight",
    "post_norm.weight": "post_per_layer_input_norm.weight",
    "ffn_gate_inp.weight": "router.proj.weight", "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj", "ffn_down_exps.weight": "experts.down_proj",
    "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
    "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
    "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
}  # fmt: skip
_AFTER = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
_AROUND = _AFTER | {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
}
_GLM4_NORMS = {
    "attn_norm.weight": "input_layernorm.weight", "post_attention_norm.weight": "post_self_attn_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight", "post_ffw_norm.weight": "post_mlp_layernorm.weight",
}  # fmt: skip
_CONV = {  # of short convolutions, see models/layers/short_conv.py
    "shortconv.conv.weight": "conv.conv.weight", "shortconv.in_proj.weight": "conv.in_proj.weight",
    "shortconv.out_proj.weight": "conv.out_proj.weight",
}  # fmt: skip
_CONV_TOP = {
    "token_embd.weight": "embed_tokens.weight",
    "token_embd_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
_CONV_TAPS = "shortconv.conv.weight"  # stored without the middle axis that checkpoints have
_FUSED_MLP = {"ffn_up.weight": "mlp.gate_up_proj.weight", "ffn_down.weight": "mlp.down_proj.weight"}
_FUSED_ATTENTION = {
    "attn_qkv.weight": "self_attn.qkv_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
}
_GEMMA_TOP = _TOP | {
    "per_layer_token_embd.weight": "embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "per_layer_projection_norm.weight",
}
_EAGLE_TOP = _TOP | {"fc.weight": "fc.weight", "enc.output_norm.weight": "input_norm.weight", "d2t": "d2t"}
_DFLASH_TOP = _TOP | {  # and of its relatives
    "fc.weight": "fc.weight", "enc.output_norm.weight": "hidden_norm.weight", "d2t": "d2t",
    "markov_w1.weight": "markov_head.markov_w1.weight", "markov_w2.weight": "markov_head.markov_w2.weight",
    "conf_proj.weight": "confidence_head.proj.weight", "conf_proj.bias": "confidence_head.proj.bias",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
}  # fmt: skip
_CONVOLUTIONS = {
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj.weight": "attention_conv.kernel_projection.weight",
    "ffn_conv_base": "mlp_conv.base_kernel", "ffn_conv_proj.weight": "mlp_conv.kernel_projection.weight",
}  # fmt: skip
_ASSISTANT_TOP = _TOP | {
    "nextn.pre_projection.weight": "pre_projection.weight", "nextn.post_projection.weight": "post_projection.weight",
    "masked_embd_centroids.weight": "masked_embedding.centroids.weight",
    "masked_embd_ordering": "masked_embedding.token_ordering",
}  # fmt: skip

# architecture -> (names outside of layers, names in a layer)
NAMES: Mapping[str, tuple[Mapping[str, str], Mapping[str, str]]] = {
    "llama": (_TOP, _ATTENTION | _BIASES | _MLP | _MLP_BIASES | _EXPERTS | _TWO_NORMS),
    "qwen2": (_TOP, _ATTENTION | _BIASES | _MLP | _TWO_NORMS),
    "qwen2moe": (_TOP, _ATTENTION | _BIASES | _MLP | _EXPERTS | _SHARED_EXPERT | _TWO_NORMS),
    "qwen3": (_TOP, _ATTENTION | _HEAD_NORMS | _MLP | _TWO_NORMS),
    "qwen3moe": (_TOP, _ATTENTION | _HEAD_NORMS | _MLP | _EXPERTS | _TWO_NORMS),
    "qwen35": (_TOP, _ATTENTION | _HEAD_NORMS | _MLP | _DELTA | _NEXTN),
    "qwen35moe": (_TOP, _ATTENTION | _HEAD_NORMS | _MLP | _EXPERTS | _SHARED_EXPERT | _DELTA | _NEXTN),
    "qwen3next": (_TOP, _ATTENTION | _HEAD_NORMS | _MLP | _EXPERTS | _SHARED_EXPERT | _DELTA_NEXT | _NEXTN),
    "deepseek2": (_TOP, _LATENT | _MLP | _ROUTED | _TWO_NORMS),
    "glm4moe": (
        _TOP,
        _ATTENTION
        | _BIASES
        | _HEAD_NORMS
        | _MLP
        | _ROUTED
        | _NEXTN
        | {
            "attn_norm.weight": "input_layernorm.weight",
            "post_attention_norm.weight": "post_attention_layernorm.weight",
        },
    ),
    "gemma2": (_TOP, _ATTENTION | _MLP | _AROUND),
    "gemma3": (_TOP, _ATTENTION | _HEAD_NORMS | _MLP | _AROUND),
    "cohere2": (_TOP, _ATTENTION | _MLP | {"attn_norm.weight": "input_layernorm.weight"}),
    "smollm3": (_TOP, _ATTENTION | _MLP | _TWO_NORMS),
    "olmo2": (_TOP, _ATTENTION | _HEAD_NORMS | _MLP | _AFTER),
    "granite": (_TOP, _ATTENTION | _BIASES | _MLP | _MLP_BIASES | _TWO_NORMS),
    "granitehybrid": (_TOP, _ATTENTION | _HALVED_MLP | _EXPERTS | _MAMBA | _TWO_NORMS),
    "nemotron_h": (_TOP, _ONE_PART),
    "nemotron_h_moe": (_TOP, _ONE_PART | _ONE_MIXTURE),
    EAGLE3.gguf: (_EAGLE_TOP, _ATTENTION | _MLP | _TWO_NORMS | {"attn_norm_2.weight": "hidden_norm.weight"}),
    DFLASH.gguf: (_DFLASH_TOP, _ATTENTION | _HEAD_NORMS | _MLP | _TWO_NORMS | _CONVOLUTIONS),
    "mistral3": (_TOP, _ATTENTION | _MLP | _TWO_NORMS),
    "glm4": (_TOP, _ATTENTION | _BIASES | _FUSED_MLP | _GLM4_NORMS),
    "gpt-oss": (
        _TOP,
        _ATTENTION
        | _BIASES
        | _BIASED_EXPERTS
        | {
            "attn_sinks.weight": "self_attn.sinks",
            "attn_norm.weight": "input_layernorm.weight",
            "post_attention_norm.weight": "post_attention_layernorm.weight",
        },
    ),
    "lfm2": (_CONV_TOP, _ATTENTION | _HEAD_NORMS | _MLP | _CONV | _TWO_NORMS),
    "lfm2moe": (
        _CONV_TOP,
        _ATTENTION
        | _HEAD_NORMS
        | _MLP
        | _EXPERTS
        | _CONV
        | _TWO_NORMS
        | {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
    ),
    "seed_oss": (
        _TOP,
        _ATTENTION
        | _BIASES
        | _MLP
        | {
            "attn_norm.weight": "input_layernorm.weight",
            "post_attention_norm.weight": "post_attention_layernorm.weight",
        },
    ),
    "exaone4": (_TOP, _ATTENTION | _HEAD_NORMS | _MLP | _AFTER),
    "ernie4_5": (_TOP, _ATTENTION | _BIASES | _MLP | _TWO_NORMS),
    "ernie4_5-moe": (_TOP, _ATTENTION | _MLP | _ROUTED | _TWO_NORMS),
    "phi3": (_TOP, _FUSED_ATTENTION | _FUSED_MLP | _TWO_NORMS),
    "gemma4": (_GEMMA_TOP, _GEMMA),
    "gemma4-assistant": (_ASSISTANT_TOP, _GEMMA),
}
# Tensors that say something about the config and are no weights: the factors of scaled rotary embeddings.
DERIVED = re.compile(r"(blk\.\d+\.)?rope_(freqs|factors_long|factors_short)\.weight")
_ROTATED = re.compile(r"attn_([qk])\.(weight|bias)")
_PAIRED = (
    EAGLE3.gguf,
    "llama",
    "smollm3",
    "granite",
    "granitehybrid",
    "nemotron_h",
    "nemotron_h_moe",
    "mistral3",
)  # q and k are stored with rotated pairs side by side
# matrices of a checkpoint whose halves, one upon the other, files have as two
_HALVES = {"granite": {"mlp.gate_up_proj.weight": ("ffn_gate.weight", "ffn_up.weight")}}
_ROW_BIAS = {"ernie4_5-moe": "mlp.gate.e_score_correction_bias"}  # a row of a matrix in checkpoints
_SHIFTS = {"gemma2": 1.0, "gemma3": 1.0}  # what llama.cpp's converter adds to the norms of a checkpoint
NVFP4 = "NVFP4"
WINDOWED = (
    "gemma2",
    "gemma3",
    "cohere2",
    "olmo2",
    "phi3",
    "gpt-oss",
    "gemma4",
    "gemma4-assistant",
    "exaone4",
    "lfm2",
    "lfm2moe",
)  # files know the kinds of their layers


@dataclass(frozen=True, slots=True)
class Piece:
    """One checkpoint tensor: the GGUF tensors that are laid along `axis`, in order; `heads` > 0: rows of
    that many heads go back from pairs side by side to half and half; `shift` is subtracted from the values. `latent`:
    of each head the keys [heads, rank, width], turned, and then the values [heads, width, rank]."""

    sources: tuple[str, ...]
    shape: tuple[int, ...]
    heads: int = 0
    shift: float = 0.0
    latent: bool = False
    axis: int = -2  # rows; -1: of biases, which are a row for each expert
    offsets: bool = False  # ids are stored, of which checkpoints hold what is added to 0, 1, ...
    beside: tuple[
        str, ...
    ] = ()  # of NVFP4: what the scales of each source are multiplied with, "" for nothing


def rotated_heads(architecture: str, name: str, heads: int, kv_heads: int) -> int:
    """Heads of a GGUF tensor whose rows are stored pair by pair; 0 where they are in the order of the checkpoint."""
    match = _ROTATED.search(name) if architecture in _PAIRED else None
    return 0 if match is None else heads if match[1] == "q" else kv_heads


def stored_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a GGUF tensor that holds a checkpoint tensor of `shape`."""
    if name.endswith("exp_probs_b.bias"):
        return shape[-1:]
    return (shape[0], shape[2]) if name.endswith(_CONV_TAPS) else shape


def norm_shift(architecture: str, name: str) -> float:
    """What a GGUF tensor holds beside the values of the checkpoint."""
    return _SHIFTS.get(architecture, 0.0) if name.endswith("norm.weight") else 0.0


def checkpoint_name(architecture: str, stored: str) -> str | None:
    """What a GGUF tensor of a known architecture is called in checkpoints; None for one that it does not have."""
    top, layer = NAMES[architecture]
    inside = _LAYER.fullmatch(stored)
    known = layer.get(inside[2]) if inside else top.get(stored, _TOP.get(stored))
    return f"layers.{inside[1]}.{known}" if inside and known else known


def pieces(model: Gguf, heads: int, kv_heads: int) -> dict[str, Piece]:
    """Checkpoint name -> what it is made of, for every tensor of the file. WeightsError for names that are unknown."""
    architecture = model["general.architecture"]
    top, layer = NAMES[architecture]
    sources: dict[str, list[str]] = {}
    for name in model.tensors:
        if DERIVED.fullmatch(name):
            continue
        inside = _LAYER.fullmatch(name)
        known = layer.get(inside[2]) if inside else top.get(name, _TOP.get(name))
        if inside and known is None and "ffn_gate_exps.weight" in layer:
            known = _GATE_UP.get(inside[2])
        if known is None and _beside_nvfp4(model, name):
            continue
        if known is None:
            raise WeightsError(
                f"{model.path}: the tensor {name[:80]!a} is not part of any {architecture} model that paceline "
                "knows: use the safetensors checkpoint of this model"
            )
        sources.setdefault(f"layers.{inside[1]}.{known}" if inside else known, []).append(name)
    out = {}
    for name, made_of in sources.items():
        made_of.sort(key=lambda source: ".ffn_up" in source or "attn_v_b." in source)  # gate and keys first
        shapes = [model.tensors[source].shape for source in made_of]
        count = rotated_heads(architecture, made_of[0], heads, kv_heads)
        if len(made_of) == 2 and "attn_k_b." in made_of[0]:
            out[name] = Piece(tuple(made_of), _latent(model, made_of, shapes), latent=True)
            continue
        axis = -1 if made_of[0].endswith("_exps.bias") else -2
        shape = _joined(model, made_of, shapes, axis)
        shift = norm_shift(architecture, made_of[0])
        shape = _as_in_checkpoints(architecture, name, shape)
        beside = tuple(scale if (scale := _scale_of(source)) in model.tensors else "" for source in made_of)
        beside = (
            beside if any(model.tensors[source].kind == NVFP4 for source in made_of) and any(beside) else ()
        )
        out[name] = Piece(
            tuple(made_of), shape, count, shift, axis=axis, offsets=name == "d2t", beside=beside
        )
        if count and out[name].shape[0] % (2 * count):
            raise WeightsError(
                f"{model.path}: {made_of[0]} has {out[name].shape[0]} rows, which are no {count} heads: get another file"
            )
    return out


def _scale_of(source: str) -> str:
    return f"{source.removesuffix('.weight')}.scale"


def _beside_nvfp4(model: Gguf, name: str) -> bool:
    """Whether a tensor is one of the scales that stand beside a matrix in NVFP4; those of inputs are not read."""
    stem, _, end = name.rpartition(".")
    weight = model.tensors.get(f"{stem}.weight")
    if end not in ("scale", "input_scale") or weight is None or weight.kind != NVFP4:
        return False
    experts = weight.shape[0] if len(weight.shape) == 3 else 1
    return prod(model.tensors[name].shape) in (1, experts)


def _as_in_checkpoints(architecture: str, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """With axes of one element that files leave out: of matrices of one row, and of convolutions."""
    rows = ("shared_expert_gate.weight", "confidence_head.proj.weight", _ROW_BIAS.get(architecture, ""))
    if len(shape) == 1 and name.endswith(tuple(filter(None, rows))):
        return (1, *shape)
    return (shape[0], 1, shape[1]) if len(shape) == 2 and name.endswith("conv.conv.weight") else shape


def _joined(model: Gguf, names: list[str], shapes: list[tuple[int, ...]], axis: int) -> tuple[int, ...]:
    if len(shapes) == 1:
        return shapes[0]
    first = shapes[0]
    if len(first) < 2 or len({(*s[:axis], 0, *s[axis:][1:]) for s in shapes}) > 1:
        raise WeightsError(
            f"{model.path}: {' and '.join(names)} do not fit together: the file is damaged, download it again"
        )
    return (*first[:axis], sum(s[axis] for s in shapes), *first[axis:][1:])


def _latent(model: Gguf, names: list[str], shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    keys, values = shapes
    if len(keys) != 3 or len(values) != 3 or keys[0] != values[0] or keys[1] != values[2]:
        raise WeightsError(
            f"{model.path}: {' and '.join(names)} do not fit together: the file is damaged, download it again"
        )
    return (keys[0] * (keys[2] + values[1]), keys[1])


def half_split_rows(rows: int, heads: int) -> NDArray[np.int64]:
    """Which stored row is at each row of the checkpoint.

    llama.cpp's converter writes, in each head, row i of the first half and row i of the second side by side.
    """
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def interleaved_rows(rows: int, heads: int) -> NDArray[np.int64]:
    """The other way round: which row of the checkpoint is at each stored row."""
    return np.argsort(half_split_rows(rows, heads))


def names_of(architecture: str, name: str) -> list[str]:
    """The GGUF tensors that a checkpoint tensor is stored as, gate before up; none where there is no place for it."""
    top, layer = NAMES[architecture]
    inside = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    known, wanted = (layer, inside[2]) if inside else (top, name)
    stored_names = [stored for stored, checkpoint in known.items() if checkpoint == wanted]
    stored_names += _HALVES.get(architecture, {}).get(wanted, ())
    return [f"blk.{inside[1]}.{stored}" for stored in stored_names] if inside else stored_names
