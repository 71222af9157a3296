"""Targets of real shapes with random weights, made in memory: speed depends on shapes, not on what is in them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoints.loading import Shapes
from paceline.forecast.shapes import stored_as
from paceline.models.drafters.gemma4_assistant import GemmaAssistant, assistant_shapes, check_pair
from paceline.models.families.gemma4.config import AssistantConfig, GemmaConfig
from paceline.models.families.gemma4.target import GemmaTarget, target_shapes
from paceline.ops.base import Runner, Weight, WeightKind
from paceline.ops.blocks import BLOCKS
from paceline.ops.quantize import GROUP

CPU = torch.device("cpu")
_POOL = 1 << 24  # random values that all matrices are cut from
# Where the float16 scales of a block stand, and what they are for random bits to stand for values of about unit size.
_SCALES: Mapping[str, tuple[tuple[int, float], ...]] = {
    "q4_0": ((0, 1 / 4.6),), "q4_1": ((0, 1 / 4.6), (2, -7.5 / 4.6)), "q5_0": ((0, 1 / 9.2),),
    "q5_1": ((0, 1 / 9.2), (2, -15.5 / 9.2)), "q8_0": ((0, 1 / 74),), "q4_k": ((0, 1 / 290), (2, 7.5 / 290)),
    "q5_k": ((0, 1 / 580), (2, 15.5 / 580)), "q6_k": ((208, 1 / 1370),), "iq4_nl": ((0, 1 / 66),),
    "iq4_xs": ((0, 1 / 1220),), "q2_k": ((80, 1 / 12), (82, 1.5 / 12)), "q3_k": ((108, 1 / 43),),
    **dict.fromkeys(("iq2_xxs", "iq2_xs", "iq2_s"), ((0, 1 / 58),)), "iq3_xxs": ((0, 1 / 160),), "iq3_s": ((0, 1 / 165),),
    "iq1_s": ((0, 1 / 7.5),), "tq1_0": ((52, 1.2),), "tq2_0": ((64, 0.8),), "q1_0": ((0, 1.0),), "q2_0": ((0, 0.8),),
}  # fmt: skip


class RandomWeights:
    """Stands in for `Weights`: the same questions, answered with random values of the right shape and kind."""

    def __init__(self, shapes: Shapes, kind: WeightKind) -> None:
        self.device, self.folder = torch.device("cpu"), Path("random")
        self.skipped: dict[str, object] = {}
        self._shapes, self._kind = shapes, kind
        self._generator = torch.Generator().manual_seed(0)
        self._at = 0

    @cached_property
    def _values(self) -> Tensor:
        return torch.randn(_POOL, generator=self._generator).bfloat16()

    @cached_property
    def _bytes(self) -> Tensor:
        return torch.randint(0, 256, (_POOL,), generator=self._generator, dtype=torch.uint8)

    def matrix(self, name: str) -> Weight:
        out, width = self._shapes[f"{name}.weight"]
        if (
            name == "embed_tokens_per_layer"
        ):  # gigabytes of which a step reads a few rows: memory that is never touched
            return Weight(torch.zeros(out, width, dtype=torch.bfloat16, device=self.device), "bfloat16")
        return random_weight(self, (out, width), stored_as(name, width, self._kind))

    def unpacked(self, name: str) -> Weight:
        return self.matrix(name)

    def stack(self, name: str) -> tuple[Weight, ...]:
        count, out, width = self._shapes[name]
        kind = stored_as(name, width, self._kind)
        return tuple(random_weight(self, (out, width), kind) for _ in range(count))

    def vector(self, name: str) -> Tensor:
        return torch.ones(self._shapes[name], device=self.device)

    exact = vector

    def norm(self, name: str) -> Tensor:
        return self.vector(f"{name}.weight")

    def ids(self, name: str) -> Tensor:
        return torch.arange(self._shapes[name][0], device=self.device)

    def cut(self, source: Tensor, count: int) -> Tensor:
        """`count` values of `source`, from a place that moves on, copied."""
        self._at = (self._at + 4096 + 64) % _POOL
        if self._at + count <= _POOL:
            return source[self._at : self._at + count].clone()
        rolled = torch.cat((source[self._at :], source[: self._at]))
        return rolled.repeat(-(-count // _POOL))[:count].clone()

    def floats(self, count: int) -> Tensor:
        return self.cut(self._values, count)

    def raw(self, count: int) -> Tensor:
        return self.cut(self._bytes, count)


class GeneratedWeights(RandomWeights):
    """The same, with values that are generated on `device`: a GPU makes those of 31B in seconds."""

    def __init__(self, shapes: Shapes, kind: WeightKind, device: torch.device) -> None:
        super().__init__(shapes, kind)
        self.device = device
        self._generator = torch.Generator(device).manual_seed(0)

    def stack(self, name: str) -> tuple[Weight, ...]:
        """Views of one tensor, as of a file."""
        count, out, width = self._shapes[name]
        every = random_weight(self, (count * out, width), stored_as(name, width, self._kind))
        return tuple(every.rows(slice(i * out, (i + 1) * out)) for i in range(count))

    def floats(self, count: int) -> Tensor:
        return torch.randn(count, dtype=torch.bfloat16, device=self.device, generator=self._generator)

    def raw(self, count: int) -> Tensor:
        return torch.randint(
            0, 256, (count,), dtype=torch.uint8, device=self.device, generator=self._generator
        )


def random_weights(shapes: Shapes, kind: WeightKind, device: torch.device) -> RandomWeights:
    return RandomWeights(shapes, kind) if device.type == "cpu" else GeneratedWeights(shapes, kind, device)


def random_weight(source: RandomWeights, shape: tuple[int, int], kind: WeightKind) -> Weight:
    """[out, in] of unit gain."""
    out, width = shape
    if kind == "int8":
        data = source.raw(out * width).view(torch.int8).view(out, width)
        return Weight(data, kind, torch.full((out,), width**-0.5 / 73, device=data.device))
    if kind == "int4":
        data = source.raw(out * width // 2).view(out, width // 2)
        scale = torch.full((out, width // GROUP), width**-0.5 / 4.6, device=data.device)
        return Weight(data, kind, scale)
    if kind in BLOCKS:
        return Weight(_random_blocks(source, shape, kind), kind)
    values = source.floats(out * width).view(out, width)
    values *= width**-0.5
    return Weight(values.to(getattr(torch, kind)), kind)


def _random_blocks(source: RandomWeights, shape: tuple[int, int], kind: WeightKind) -> Tensor:
    """uint8 [out, bytes of a row]: random integers under scales that are alike."""
    layout, (out, width) = BLOCKS[kind], shape
    data = source.raw(out * width // layout.elements * layout.size).view(-1, layout.size)
    for at, size in _SCALES.get(kind, ()):
        half = torch.tensor([size * width**-0.5], dtype=torch.float16, device=data.device)
        data[:, at : at + 2] = half.view(torch.uint8)
    if kind == "mxfp4":  # a power of two
        data[:, 0] = 126 - round(math.log2(width) / 2)
    if kind == "nvfp4":  # four powers of two
        data[:, :4] = max(1, 6 - round(math.log2(width) / 2)) << 3
    if kind == "iq1_m":  # a float16 in the highest four bits of four words
        bits = int(torch.tensor(width**-0.5 / 7.5, dtype=torch.float16).view(torch.int16))
        for i in range(4):
            data[:, 49 + 2 * i] = data[:, 49 + 2 * i] & 15 | (bits >> 4 * i & 15) << 4
    return data.view(out, -1)


def random_target(
    config: GemmaConfig,
    kind: WeightKind,
    runner: Runner,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> GemmaTarget:
    """A `GemmaTarget` of `config` with random weights stored as `kind` on `device`; activations are of `dtype`."""
    weights = random_weights(target_shapes(config), kind, device)
    return GemmaTarget(config, weights, runner, dtype)  # type: ignore[arg-type]


def random_assistant(config: AssistantConfig, target: GemmaTarget) -> GemmaAssistant:
    """The assistant of `config` for `target` with random weights in bfloat16."""
    check_pair(config, target.config, ("the random assistant", "the random target"))
    weights = random_weights(assistant_shapes(config), "bfloat16", target.device)
    return GemmaAssistant(config, weights, target, target.runner)  # type: ignore[arg-type]
