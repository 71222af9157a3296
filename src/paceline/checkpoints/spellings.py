"""Tensors that some families name in their own way -> the names that all others have, and back.

Source of the names: transformers' models/lfm2, lfm2_moe, mixtral, granitemoehybrid, ernie4_5_moe.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_LAYER = re.compile(r"(layers\.\d+\.)(.+)")
# beginnings of names within a layer, own -> usual; the first that fits is replaced
_LFM2 = {
    "operator_norm.": "input_layernorm.", "ffn_norm.": "post_attention_layernorm.",
    "self_attn.out_proj.": "self_attn.o_proj.", "self_attn.q_layernorm.": "self_attn.q_norm.",
    "self_attn.k_layernorm.": "self_attn.k_norm.", "feed_forward.expert_bias": "mlp.gate.e_score_correction_bias",
    "feed_forward.": "mlp.",
}  # fmt: skip
_MIXTRAL = {"block_sparse_moe.": "mlp."}
_GRANITE = {
    "block_sparse_moe.router.layer.": "mlp.gate.", "block_sparse_moe.router.": "mlp.gate.",
    "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj",
    "shared_mlp.input_linear.": "mlp.gate_up_proj.", "shared_mlp.output_linear.": "mlp.down_proj.",
}  # fmt: skip
_ERNIE = {
    "mlp.moe_statics.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
    "mlp.gate.moe_statics.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
}
_ALL = _GRANITE | _LFM2 | _MIXTRAL | _ERNIE
_LAST_NORM = "embedding_norm.weight"  # LFM2's; it stands behind all layers
_OUTSIDE = {
    _LAST_NORM: "norm.weight",
    "norm_f.weight": "norm.weight",
    "embeddings.weight": "embed_tokens.weight",
}
_MATRICES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_MATRIX = re.compile(r"(mlp\.(?:experts\.\d+\.)?)(w[123])(\..+)")
_USUAL_MATRIX = re.compile(r"((?:feed_forward|block_sparse_moe)\.(?:experts\.\d+\.)?)(\w+_proj)(\..+)")
FAMILIES: Mapping[str, Mapping[str, str]] = {
    "lfm2": _LFM2, "lfm2_moe": _LFM2, "mixtral": _MIXTRAL, "ernie4_5_moe": _ERNIE,
}  # fmt: skip


def usual(name: str) -> str:
    """The usual name of a tensor, itself where nobody spells it otherwise."""
    inside = _LAYER.fullmatch(name)
    if inside is None:
        return _OUTSIDE.get(name, name)
    at, rest = inside.groups()
    for own, other in _ALL.items():
        if rest.startswith(own):
            rest = other + rest[len(own) :]
            break
    matrix = _MATRIX.fullmatch(rest)
    if matrix is not None:
        rest = matrix[1] + _MATRICES[matrix[2]] + matrix[3]
    return at + rest


def own(model_type: str, name: str) -> str:
    """What the family calls a tensor of the usual name, without a prefix: what `usual` makes it of."""
    spelled, inside = FAMILIES.get(model_type), _LAYER.fullmatch(name)
    if spelled is None or inside is None:
        return _LAST_NORM if spelled is _LFM2 and name == "norm.weight" else name
    at, rest = inside.groups()
    for theirs, other in spelled.items():
        if rest.startswith(other):
            rest = theirs + rest[len(other) :]
            break
    matrix = _USUAL_MATRIX.fullmatch(rest)
    if matrix is not None:
        short = {usual: short for short, usual in _MATRICES.items()}
        rest = matrix[1] + short[matrix[2]] + matrix[3]
    return at + rest
