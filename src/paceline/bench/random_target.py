"""Targets of real shapes with random weights, made in memory: speed depends on shapes, not on what is in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.models.config import FULL, SLIDING, GemmaConfig, parse_target
from paceline.models.gemma4 import GemmaTarget, target_shapes
from paceline.models.loading import Shapes
from paceline.ops.base import Runner, Weight, WeightKind
from paceline.ops.quantize import GROUP, kind_for

_POOL = 1 << 24  # random values that all matrices are cut from


def e2b_config(vocab_size: int = 16384) -> GemmaConfig:
    """Gemma 4 E2B: all 35 layers at their widths; only the embedding tables are shortened to `vocab_size`."""
    fields: dict[str, Any] = {
        "model_type": "gemma4_text", "vocab_size": vocab_size, "vocab_size_per_layer_input": vocab_size,
        "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "num_attention_heads": 8,
        "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512, "sliding_window": 512,
        "layer_types": [FULL if i % 5 == 4 else SLIDING for i in range(35)], "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True, "hidden_size_per_layer_input": 256, "final_logit_softcapping": 30.0,
        "max_position_embeddings": 131072, "eos_token_id": 1, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        },
    }  # fmt: skip
    return parse_target(fields)


class RandomWeights:
    """Stands in for `Weights`: the same questions, answered with random values of the right shape and kind."""

    def __init__(self, shapes: Shapes, kind: WeightKind) -> None:
        self.device, self.folder = torch.device("cpu"), Path("random")
        self.skipped: dict[str, object] = {}
        self._shapes, self._kind = shapes, kind
        generator = torch.Generator().manual_seed(0)
        self._values = torch.randn(_POOL, generator=generator).bfloat16()
        self._bytes = torch.randint(0, 256, (_POOL,), generator=generator, dtype=torch.uint8)
        self._at = 0

    def matrix(self, name: str) -> Weight:
        out, width = self._shapes[f"{name}.weight"]
        return random_weight(self, (out, width), self._kind_of(name, width))

    def stack(self, name: str) -> tuple[Weight, ...]:
        count, out, width = self._shapes[name]
        return tuple(random_weight(self, (out, width), self._kind_of(name, width)) for _ in range(count))

    def vector(self, name: str) -> Tensor:
        return torch.ones(self._shapes[name])

    def norm(self, name: str) -> Tensor:
        return self.vector(f"{name}.weight")

    def ids(self, name: str) -> Tensor:
        return torch.arange(self._shapes[name][0])

    def _kind_of(self, name: str, width: int) -> WeightKind:
        if self._kind in ("int8", "int4"):
            return kind_for(name, width, self._kind) or "bfloat16"
        return self._kind

    def cut(self, source: Tensor, count: int) -> Tensor:
        """`count` values of `source`, from a place that moves on, copied."""
        self._at = (self._at + 4096 + 64) % _POOL
        rolled = torch.cat((source[self._at :], source[: self._at]))
        return rolled.repeat(-(-count // _POOL))[:count].clone()

    def floats(self, count: int) -> Tensor:
        return self.cut(self._values, count)

    def raw(self, count: int) -> Tensor:
        return self.cut(self._bytes, count)


def random_weight(source: RandomWeights, shape: tuple[int, int], kind: WeightKind) -> Weight:
    """[out, in] of unit gain."""
    out, width = shape
    if kind == "int8":
        data = source.raw(out * width).view(torch.int8).view(out, width)
        return Weight(data, kind, torch.full((out,), width**-0.5 / 73))
    if kind == "int4":
        data = source.raw(out * width // 2).view(out, width // 2)
        return Weight(data, kind, torch.full((out, width // GROUP), width**-0.5 / 4.6))
    values = source.floats(out * width).view(out, width)
    values *= width**-0.5
    return Weight(values.to(getattr(torch, kind)), kind)


def random_target(config: GemmaConfig, kind: WeightKind, runner: Runner) -> GemmaTarget:
    """A `GemmaTarget` of `config` with random weights stored as `kind`."""
    weights = RandomWeights(target_shapes(config), kind)
    return GemmaTarget(config, weights, runner, torch.float32)  # type: ignore[arg-type]
