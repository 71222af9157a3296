"""How one target is sharded among ranks: which rows and columns of each weight a rank has, by the weight's name.

Query heads are cut evenly, and so are the inner sizes of MLPs and experts. A rank has the K/V heads that its query
heads read; where there are fewer of them than ranks, several ranks have the same. What is not named here (embeddings,
norms, routers, per-layer inputs) each rank has whole; the head is rank 0's.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoints.loading import Weights
from paceline.errors import UsageError
from paceline.models.families import FAMILIES, spec_of
from paceline.models.spec import ModelConfig, Split
from paceline.ops.base import Weight

_ROWS = ("q_proj", "gate_proj", "up_proj")
_KV = ("k_proj", "v_proj")
_COLUMNS = ("o_proj", "down_proj")
_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank has of a model."""

    rank: int
    ranks: int
    split: Split

    @classmethod
    def of(cls, split: Split, rank: int, ranks: int) -> Shard:
        """Raises UsageError for sizes that so many ranks do not divide."""
        if not _divides(split, ranks):
            sizes = f"{split.heads} heads, inner sizes {', '.join(map(str, sorted(set(split.inner))))}"
            most = most_ranks(split, ranks)
            then = f"use {most}" if most > 1 else "leave it out" + more_ranks(split, ranks)
            raise UsageError(f"tensor_parallel={ranks} does not divide this model ({sizes}): {then}")
        return cls(rank, ranks, split)

    @property
    def heads(self) -> int:
        """Query heads of a rank."""
        return self.split.heads // self.ranks

    def kv_heads(self, layer: int) -> list[int]:
        """The K/V heads that the rank has of a layer, in the order in which its query heads read them.

        They depend on the number of K/V heads alone: a drafter that reads them finds those of its own query heads.
        """
        group = self.split.heads // self.split.kv_heads[layer]
        each = math.gcd(self.heads, group)  # query heads that read one of them, the same number for all
        first = self.rank * self.heads
        return [(first + i) // group for i in range(0, self.heads, each)]

    def config(self) -> Any:
        """The config of a model that has only this rank's heads."""
        return self.split.local(
            self.heads, tuple(len(self.kv_heads(i)) for i in range(len(self.split.kv_heads)))
        )


def split_of(config: ModelConfig) -> Split:
    """What of a model is cut. Raises UsageError for a family that cannot be sharded."""
    cut = spec_of(config.model_type).split
    if cut is None:
        able = [name for name in FAMILIES if spec_of(name).split is not None]
        raise UsageError(
            f"tensor_parallel is not possible for {config.model_type}, only for {', '.join(able)}: leave it out"
        )
    return cut(config)


def most_ranks(split: Split, ranks: int) -> int:
    """As many as that, or the largest number below it that divides the model."""
    return next(n for n in range(ranks, 0, -1) if _divides(split, n))


def more_ranks(split: Split, ranks: int) -> str:
    """The least number above it that divides the model, as advice."""
    least = next((n for n in range(ranks + 1, split.heads + 1) if _divides(split, n)), None)
    return "" if least is None else f", or use {least}"


def _divides(split: Split, ranks: int) -> bool:
    return all(size % ranks == 0 for size in (split.heads, *split.inner))


def sharded(weights: Weights, shard: Shard) -> tuple[Weights, Any]:
    """(weights that give of each tensor what a rank has, the config of that share)."""
    return _ShardedWeights(weights, shard), shard.config()


class _ShardedWeights(Weights):
    """Quantized first, then cut: the values are those of the whole model."""

    def __init__(self, whole: Weights, shard: Shard) -> None:
        vars(self).update(vars(whole))
        self.shard = shard

    def matrix(self, name: str) -> Weight:
        if name == "lm_head" and self.shard.rank:  # nobody reads it
            return Weight(self._tensors.take(f"{name}.weight").to("meta"), "float32")
        return self._cut(name, super().matrix(name))

    def stack(self, name: str) -> tuple[Weight, ...]:
        return tuple(self._cut(name, weight) for weight in super().stack(name))

    def vector(self, name: str) -> Tensor:
        data = super().vector(name)
        if name.endswith(".sinks"):  # one for each head
            return data[self._even(len(data))].contiguous()
        if name.endswith("gate_up_bias"):
            return data[:, self._halves(data.shape[1])]
        if name.endswith("experts.down_bias"):  # added to a sum over the ranks
            return torch.zeros_like(data) if self.shard.rank else data
        owner, _, what = name.rpartition(".")
        ids = self._rows(owner, len(data)) if what == "bias" else None
        return data if ids is None else data[ids].contiguous()

    def _cut(self, name: str, weight: Weight) -> Weight:
        if name.endswith(_COLUMNS):
            return self._columns(name, weight)
        if name.endswith("gate_up_proj"):
            return weight.rows(self._halves(weight.out_features))
        ids = self._rows(name, weight.out_features)
        return weight if ids is None else weight.rows(ids)

    def _rows(self, name: str, count: int) -> slice | Tensor | None:
        """The outputs of a matrix that this rank has; None: all of them."""
        if name.endswith(_ROWS):
            return self._even(count)
        match = _LAYER.match(name)
        if match is None or not name.endswith(_KV):
            return None
        layer = int(match[1])
        each = torch.arange(count).view(self.shard.split.kv_heads[layer], -1)  # [kv heads, head_dim]
        return each[self.shard.kv_heads(layer)].flatten()

    def _halves(self, count: int) -> Tensor:
        """This rank's share of gates and of values, of as many outputs."""
        own = torch.arange(count // 2)[self._even(count // 2)]
        return torch.cat([own, own + count // 2])

    def _even(self, count: int) -> slice:
        each = count // self.shard.ranks
        return slice(self.shard.rank * each, (self.shard.rank + 1) * each)

    def _columns(self, name: str, weight: Weight) -> Weight:
        part, ranks = self._even(weight.in_features), self.shard.ranks
        if (part.stop - part.start) % weight.unit:
            split = self.shard.split
            best = next(
                n
                for n in range(ranks, 0, -1)
                if not weight.in_features % (n * weight.unit) and _divides(split, n)
            )
            raise UsageError(
                f"{name} is stored in groups of {weight.unit} inputs ({weight.kind}), which {ranks} ranks do not share "
                f"evenly: use tensor_parallel={best}, or weights of another format"
            )
        return weight.part(part.start, part.stop)
