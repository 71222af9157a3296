"""Published shapes of Gemma 4 and of the assistants made for them, and what they need of memory.

Source: the config.json files of google/gemma-4-*-it and google/gemma-4-*-it-assistant on the hub (2026).
"""

from __future__ import annotations

from math import prod
from typing import Any

from paceline.checkpoints.loading import Shapes
from paceline.errors import CapacityError, UsageError
from paceline.models.drafters.gemma4_assistant import assistant_shapes
from paceline.models.families.gemma4 import target_shapes
from paceline.models.families.gemma4_config import AssistantConfig, GemmaConfig, parse_assistant, parse_gemma
from paceline.models.spec import FULL, SLIDING
from paceline.ops.base import WeightKind
from paceline.ops.blocks import BLOCKS
from paceline.ops.quantize import GROUP, kind_for

VOCABULARY = 262_144
_COMMON: dict[str, Any] = {
    "model_type": "gemma4_text", "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "head_dim": 256, "global_head_dim": 512,
    "final_logit_softcapping": 30.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "eos_token_id": 1,
    "max_position_embeddings": 131_072,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    },
}  # fmt: skip
_WIDE: dict[str, Any] = {"sliding_window": 1024, "attention_k_eq_v": True, "max_position_embeddings": 262_144}
TARGETS: dict[str, dict[str, Any]] = {
    "gemma-4-e2b": {
        "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "num_attention_heads": 8,
        "num_key_value_heads": 1, "sliding_window": 512, "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 256,
    },
    "gemma-4-e4b": {
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 42, "num_attention_heads": 8,
        "num_key_value_heads": 2, "sliding_window": 512, "num_kv_shared_layers": 18,
        "hidden_size_per_layer_input": 256,
    },
    "gemma-4-12b": _WIDE | {
        "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48, "num_attention_heads": 16,
        "num_key_value_heads": 8, "num_global_key_value_heads": 1,
    },
    "gemma-4-26b-a4b": _WIDE | {
        "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16,
        "num_key_value_heads": 8, "num_global_key_value_heads": 2, "enable_moe_block": True, "num_experts": 128,
        "top_k_experts": 8, "moe_intermediate_size": 704,
    },
    "gemma-4-31b": _WIDE | {
        "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60, "num_attention_heads": 32,
        "num_key_value_heads": 16, "num_global_key_value_heads": 4,
    },
}  # fmt: skip
SMALL, LARGE = ("gemma-4-e2b", "gemma-4-e4b"), ("gemma-4-12b", "gemma-4-26b-a4b", "gemma-4-31b")


def fields_of(name: str) -> dict[str, Any]:
    """The config.json of a published target's text model."""
    if name not in TARGETS:
        raise UsageError(f"shape {name!r} is unknown: use one of {', '.join(TARGETS)}")
    fields = _COMMON | TARGETS[name]
    every = 5 if name == "gemma-4-e2b" else 6  # the layer that sees everything
    layers = fields["num_hidden_layers"]
    return fields | {"layer_types": [SLIDING if (i + 1) % every else FULL for i in range(layers)]}


def target_config(name: str, vocab_size: int | None = None) -> GemmaConfig:
    """The text model of a published target. A shorter vocabulary than its own makes the head cheaper than it is."""
    shorter = (
        {} if vocab_size is None else {"vocab_size": vocab_size, "vocab_size_per_layer_input": vocab_size}
    )
    return parse_gemma(fields_of(name) | shorter)


def assistant_config(name: str) -> AssistantConfig:
    """The published assistant: four Q-only layers; E2B's and E4B's have the centroid head."""
    target, small = fields_of(name), name in SMALL
    keep = ("num_key_value_heads", "num_global_key_value_heads", "attention_k_eq_v", "sliding_window")
    text = _COMMON | {key: target[key] for key in keep if key in target} | {
        "hidden_size": 256 if small else 1024, "intermediate_size": 2048 if small else 8192,
        "num_attention_heads": 4 if small else target["num_attention_heads"], "num_hidden_layers": 4,
        "num_kv_shared_layers": 4, "layer_types": [SLIDING] * 3 + [FULL], "final_logit_softcapping": None,
    }  # fmt: skip
    return parse_assistant(
        {
            "model_type": "gemma4_assistant", "backbone_hidden_size": target["hidden_size"], "text_config": text,
            "use_ordered_embeddings": small, "num_centroids": 2048, "centroid_intermediate_top_k": 32,
        }
    )  # fmt: skip


def stored_as(name: str, width: int, kind: WeightKind) -> WeightKind:
    """How a matrix is kept where the model is kept as `kind`."""
    layout = BLOCKS.get(kind)
    if layout is not None and kind_for(name, width, "int4") is None:
        return "bfloat16"
    if layout is not None:
        return kind if width % layout.elements == 0 else "q8_0"
    return (kind_for(name, width, kind) or "bfloat16") if kind in ("int8", "int4") else kind


def row_bytes(kind: WeightKind, width: int) -> int:
    """Bytes of one output of a matrix with `width` inputs."""
    layout = BLOCKS.get(kind)
    if layout is not None:
        return width // layout.elements * layout.size
    sizes = {"int8": width + 4, "int4": width // 2 + width // GROUP * 4, "float32": 4 * width}
    return sizes.get(kind, 2 * width)


def bytes_of(shapes: Shapes, kind: WeightKind) -> int:
    """Of all matrices as they are kept; tables that are only looked up take no memory here (see random_target)."""
    total = 0
    for name, shape in shapes.items():
        if name.startswith("embed_tokens_per_layer") or len(shape) < 2:
            continue
        stored = stored_as(name.removesuffix(".weight"), shape[-1], kind)
        total += prod(shape[:-1]) * row_bytes(stored, shape[-1])
    return total


def need_of(name: str, kind: WeightKind, drafter: bool) -> int:
    """Bytes of the weights of a target and, with `drafter`, of its assistant (always bfloat16)."""
    own = bytes_of(target_shapes(target_config(name)), kind)
    return own + (bytes_of(assistant_shapes(assistant_config(name)), "bfloat16") if drafter else 0)


def check_memory(name: str, kind: WeightKind, sizes: tuple[int, int], *, drafter: bool) -> None:
    """Raise CapacityError with the sum unless it fits. `sizes`: (bytes for K/V, bytes that are free)."""
    cache, free = sizes
    weights = need_of(name, kind, drafter)
    room = weights // 20 + (1 << 29)  # matrices are turned into tiles one by one; activations
    if weights + cache + room <= free:
        return
    smaller = [
        k for k in ("int8", "int4") if need_of(name, k, drafter) * 21 // 20 + cache + (1 << 29) <= free
    ]
    hint = f"use --quantize {smaller[0]}" if kind not in ("int4",) and smaller else "choose a smaller --shape"
    raise CapacityError(
        f"{name} as {kind} does not fit: {weights / 1e9:.1f} GB of weights, {cache / 1e9:.1f} GB of K/V and "
        f"{room / 1e9:.1f} GB beside them make {(weights + cache + room) / 1e9:.1f} GB, "
        f"{free / 1e9:.1f} GB are free: {hint}"
    )
