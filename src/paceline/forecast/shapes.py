"""Published shapes of Gemma 4 and of the assistants made for them, and what they need of memory.

Source: the config.json files of google/gemma-4-*-it and google/gemma-4-*-it-assistant on the hub (2026).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from paceline.checkpoints.loading import Shapes
from paceline.errors import CapacityError, UsageError
from paceline.models.drafters.gemma4_assistant import assistant_shapes
from paceline.models.families.gemma4.config import AssistantConfig, GemmaConfig, parse_assistant, parse_gemma
from paceline.models.families.gemma4.target import target_shapes
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
SMALL = ("gemma-4-e2b", "gemma-4-e4b")


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
    return assistant_of(fields_of(name), name in SMALL)


def assistant_of(target: Mapping[str, Any], small: bool) -> AssistantConfig:
    """The assistant for the config.json of a target; `small`: as those of E2B and E4B are."""
    keep = (
        "num_key_value_heads", "num_global_key_value_heads", "attention_k_eq_v", "sliding_window", "head_dim",
        "global_head_dim", "vocab_size", "vocab_size_per_layer_input",
    )  # fmt: skip
    width = min(256 if small else 1024, target["hidden_size"])
    text = _COMMON | {key: target[key] for key in keep if key in target} | {
        "hidden_size": width, "intermediate_size": 8 * width,
        "num_attention_heads": 4 if small else target["num_attention_heads"], "num_hidden_layers": 4,
        "num_kv_shared_layers": 4, "layer_types": [SLIDING] * 3 + [FULL], "final_logit_softcapping": None,
    }  # fmt: skip
    return parse_assistant(
        {
            "model_type": "gemma4_assistant", "backbone_hidden_size": target["hidden_size"], "text_config": text,
            "use_ordered_embeddings": small, "num_centroids": 2048, "centroid_intermediate_top_k": 32,
        }
    )  # fmt: skip


def shallow(name: str, layers: int) -> dict[str, Any]:
    """The config.json of a published target with its first layers only, where no layer shares K/V with another."""
    fields = fields_of(name)
    return fields | {"num_hidden_layers": layers, "layer_types": fields["layer_types"][:layers]}


def shrunk(name: str) -> dict[str, Any]:
    """The config.json of a target that has all parts of a published one, and next to no weights: to try code with."""
    fields = fields_of(name)
    every = fields["layer_types"].index(FULL) + 1
    small: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2 * every, "num_attention_heads": 4,
        "layer_types": fields["layer_types"][: 2 * every], "head_dim": 32, "global_head_dim": 64,
        "vocab_size": 4096, "vocab_size_per_layer_input": 4096, "sliding_window": 32,
        "num_key_value_heads": min(2, fields["num_key_value_heads"]), "max_position_embeddings": 4096,
        "num_kv_shared_layers": every if fields["num_kv_shared_layers"] else 0,
        "hidden_size_per_layer_input": 16 if fields["hidden_size_per_layer_input"] else 0,
    }  # fmt: skip
    if "num_global_key_value_heads" in fields:
        small["num_global_key_value_heads"] = min(2, fields["num_global_key_value_heads"])
    if fields.get("enable_moe_block"):
        small |= {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}
    return fields | small


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


def bytes_of(shapes: Shapes, kind: WeightKind, tables: bool = False) -> int:
    """Of all matrices as they are kept. `tables`: also those that are only looked up, which take memory on a GPU only
    (see random_target)."""
    total = 0
    for name, shape in shapes.items():
        if len(shape) < 2:
            continue
        if name.startswith("embed_tokens_per_layer"):
            total += 2 * prod(shape) if tables else 0
            continue
        stored = stored_as(name.removesuffix(".weight"), shape[-1], kind)
        total += prod(shape[:-1]) * row_bytes(stored, shape[-1])
    return total


def need_of(name: str, kind: WeightKind, drafter: bool, tables: bool = False) -> int:
    """Bytes of the weights of a target and, with `drafter`, of its assistant (always bfloat16); `tables`: see above."""
    own = bytes_of(target_shapes(target_config(name)), kind, tables)
    return own + (bytes_of(assistant_shapes(assistant_config(name)), "bfloat16") if drafter else 0)


def check_memory(
    name: str, kind: WeightKind, cache: int, free: int, *, drafter: bool, gpu: bool = False
) -> None:
    """Raise CapacityError with the sum unless it fits. `cache`: bytes for K/V, `free`: bytes that are free."""
    weights = need_of(name, kind, drafter, gpu)
    room = weights // 20 + (1 << 29)  # matrices are turned into tiles one by one; activations
    if weights + cache + room <= free:
        return
    smaller = [
        k for k in ("int8", "int4") if need_of(name, k, drafter, gpu) * 21 // 20 + cache + (1 << 29) <= free
    ]
    hint = f"use --quantize {smaller[0]}" if kind not in ("int4",) and smaller else "choose a smaller --shape"
    raise CapacityError(
        f"{name} as {kind} does not fit: {weights / 1e9:.1f} GB of weights, {cache / 1e9:.1f} GB of K/V and "
        f"{room / 1e9:.1f} GB beside them make {(weights + cache + room) / 1e9:.1f} GB, "
        f"{free / 1e9:.1f} GB are free: {hint}"
    )
