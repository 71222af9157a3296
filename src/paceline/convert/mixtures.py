"""Which block type each tensor of a GGUF file gets in a mixture like q4_k_m: the rules of llama.cpp's `llama-quantize`.

What says most about the next token gets more bits: the head, values of attention, and the last matrix of an MLP in the
first and last eighth of the layers and in each third one between. Without an importance matrix, which llama.cpp may be
given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

# mixture -> the type of what no rule names
MIXTURES: Mapping[str, str] = {
    "q6_k": "q6_k", "q5_k_m": "q5_k", "q5_k_s": "q5_k", "q4_k_m": "q4_k", "q4_k_s": "q4_k", "q3_k_l": "q3_k",
    "q3_k_m": "q3_k", "q3_k_s": "q3_k", "q2_k": "q2_k",
}  # fmt: skip
# where rows are no multiple of 256 values
SMALLER_BLOCKS: Mapping[str, str] = {
    "q2_k": "q4_0",
    "q3_k": "q4_0",
    "q4_k": "q5_0",
    "q5_k": "q5_1",
    "q6_k": "q8_0",
}
LARGE_BLOCK, SMALL_BLOCK = 256, 32
_LAYER = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Shape:
    """What the rules ask of a model."""

    layers: int
    heads_per_kv: int = 1  # query heads that read one K/V head
    experts: int = 0
    tied: bool = False  # the embeddings are the head


def kind_for(name: str, width: int, mixture: str, shape: Shape) -> str:
    """The type of the tensor `name` with rows of `width` values; f16 where no block fits."""
    kind = _by_name(name, mixture, shape)
    if width % LARGE_BLOCK:
        kind = SMALLER_BLOCKS[kind] if width % SMALL_BLOCK == 0 else "f16"
    return kind


def _by_name(name: str, mixture: str, shape: Shape) -> str:
    plain, match = MIXTURES[mixture], _LAYER.match(name)
    layer = int(match[1]) if match else 0
    if name == "output.weight" or (name == "token_embd.weight" and shape.tied):
        return "q6_k"
    if ".attn_v." in name:
        return _values(layer, mixture, shape)
    if ".ffn_down" in name:
        return _down(layer, mixture, shape)
    if ".attn_k." in name and shape.experts == 8:
        return "q8_0"
    if ".attn_output." in name:
        if shape.experts == 8 and mixture in ("q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m"):
            return "q5_k"
        return {"q2_k": "q3_k", "q3_k_m": "q4_k", "q3_k_l": "q5_k"}.get(mixture, plain)
    if ".attn_qkv." in name:
        return {"q3_k_m": "q4_k", "q3_k_l": "q4_k", "q4_k_m": "q5_k", "q5_k_m": "q6_k"}.get(mixture, plain)
    return plain


def _more(layer: int, layers: int) -> bool:
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _values(layer: int, mixture: str, shape: Shape) -> str:
    plain = MIXTURES[mixture]
    if shape.experts == 8:
        return "q8_0"
    if mixture == "q2_k":
        return "q4_k" if shape.heads_per_kv >= 4 else "q3_k"
    if mixture in ("q3_k_m", "q3_k_l"):
        return "q5_k" if mixture == "q3_k_l" or layer < 2 else "q4_k"
    if mixture in ("q4_k_m", "q5_k_m") and _more(layer, shape.layers):
        return "q6_k"
    if mixture == "q4_k_s" and layer < 4:
        return "q5_k"
    return plain


def _down(layer: int, mixture: str, shape: Shape) -> str:
    plain = MIXTURES[mixture]
    if mixture == "q2_k":
        return "q3_k"
    if mixture == "q3_k_m":
        return "q5_k" if layer < shape.layers // 16 else "q4_k"
    if mixture == "q3_k_l":
        return "q5_k"
    if mixture in ("q4_k_m", "q5_k_m"):
        return "q6_k" if _more(layer, shape.layers) else plain
    if mixture == "q4_k_s":
        return "q5_k" if layer < shape.layers // 8 else plain
    return plain
