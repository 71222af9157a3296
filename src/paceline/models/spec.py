"""What every family's parsed config says of its model, in one vocabulary: sizes, layer kinds, what ranks split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

SLIDING, FULL = "sliding_attention", "full_attention"
CONV = "conv"  # of layers of a short convolution


@dataclass(frozen=True, slots=True)
class MoeConfig:
    experts: int
    top_k: int
    intermediate_size: int
    width: int | None = None  # of the rows that experts read and give; None: those of the model


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
    """What of a model can be sharded among ranks (models/shards.py)."""

    heads: int
    kv_heads: tuple[int, ...]  # by layer
    inner: tuple[int, ...]  # the inner sizes of its MLPs and experts
    local: Callable[[int, tuple[int, ...]], Any]  # (heads, K/V heads by layer) of a rank -> its config


def layers_line(kinds: list[str], extras: list[str]) -> str:
    """Layers by kind, and what else there is to say of them, for `paceline info`."""
    counts = Counter(kind.removesuffix("_attention") for kind in kinds)
    named = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items(), reverse=True))
    return f"{len(kinds)} ({'; '.join([named, *extras])})"
