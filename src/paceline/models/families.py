"""Which module runs which `model_type`, and what such a module has to offer: the one list of model families.

A module is imported when a model of its family is looked at, not before. It holds a `SPEC`.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from paceline.kv.layout import Layout
    from paceline.models.loading import Shapes, Weights
    from paceline.models.target import GraphTarget
    from paceline.ops.base import Runner

# model_type of config.json -> module of this package; the order is that in which a user is told what paceline runs
FAMILIES: Mapping[str, str] = {
    "gemma4_text": "gemma4", "gemma4_unified_text": "gemma4", "gemma4": "gemma4", "gemma4_unified": "gemma4",
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3", "qwen3_moe": "qwen3",
    "deepseek_v3": "deepseek_v3",
    "qwen3_5": "qwen3_5", "qwen3_5_text": "qwen3_5", "qwen3_5_moe": "qwen3_5", "qwen3_5_moe_text": "qwen3_5",
    "qwen3_next": "qwen3_5",
    "glm4_moe": "glm4_moe",
}  # fmt: skip


class ModelConfig(Protocol):
    """What every parsed config says of its model. Sizes in elements."""

    @property
    def model_type(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def max_len(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def tied(self) -> bool: ...

    @property
    def layer_count(self) -> int: ...

    @property
    def shared_layers(self) -> frozenset[int]:
        """Layers that read another layer's K/V: what a checkpoint may hold of their own is skipped."""
        ...

    def describe(self) -> str:
        """The layers in a few words, as `paceline info` shows them."""
        ...


@dataclass(frozen=True, slots=True)
class Split:
    """What of a model can be shared out among ranks (models/shards.py)."""

    heads: int
    kv_heads: tuple[int, ...]  # by layer
    inner: tuple[int, ...]  # the inner sizes of its MLPs and experts
    local: Callable[[int, tuple[int, ...]], Any]  # (heads, K/V heads by layer) of a rank -> its config


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """All that loading and looking at a model of one family needs. `Any` is the family's own config."""

    parse: Callable[[Mapping[str, Any]], ModelConfig]  # of config.json; raises ConfigError
    shapes: Callable[[Any], Shapes]  # every tensor of the language model, by its canonical name
    layout: Callable[[Any], Layout]  # of its K/V cache
    build: Callable[[Any, Weights, Runner, torch.dtype], GraphTarget]
    split: Callable[[Any], Split] | None = None  # None: only one process computes it


def spec_of(model_type: str) -> ModelSpec:
    """The spec of a `model_type` of FAMILIES."""
    spec = importlib.import_module(f"paceline.models.{FAMILIES[model_type]}").SPEC
    assert isinstance(spec, ModelSpec)
    return spec


def layers_line(kinds: list[str], extras: list[str]) -> str:
    """Layers by kind, and what else there is to say of them, for `paceline info`."""
    counts = Counter(kind.removesuffix("_attention") for kind in kinds)
    named = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items(), reverse=True))
    return f"{len(kinds)} ({'; '.join([named, *extras])})"
