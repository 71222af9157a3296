"""A short convolution in the place of attention: a row reads what a few rows before it hold, and nothing older.

These rows lie in pages, as keys of a window do. So a refused row is written over, a prefix is shared, and a tree of
drafts branches, all as with keys. Source of truth for the arithmetic: transformers' models/lfm2, Lfm2ShortConv.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.checkpoints.loading import Shapes, Weights
from paceline.models.layers.decoder_config import ConvConfig
from paceline.models.layers.linear import Linear
from paceline.ops.base import Ops, Value


@dataclass(frozen=True, slots=True, eq=False)
class ShortConv:
    inputs: Linear  # -> gate of what is convolved, gate of the result, what is convolved
    taps: Tensor  # [taps, H], the row itself last
    bias: Tensor | None  # [H]
    out: Linear
    storage: int


def conv_shapes(config: ConvConfig, hidden: int, at: str) -> Shapes:
    """Name and shape of every tensor of a layer."""
    shapes: Shapes = {
        f"{at}.in_proj.weight": (3 * hidden, hidden),
        f"{at}.conv.weight": (hidden, 1, config.taps),
        f"{at}.out_proj.weight": (hidden, hidden),
    }
    sizes = {"in_proj": 3 * hidden, "conv": hidden, "out_proj": hidden} if config.biases else {}
    return shapes | {f"{at}.{name}.bias": (size,) for name, size in sizes.items()}


def read_conv(weights: Weights, config: ConvConfig, at: str, storage: int) -> ShortConv:
    """A layer of a loaded model."""

    def bias(name: str) -> Tensor | None:
        return weights.vector(f"{at}.{name}.bias") if config.biases else None

    taps = weights.vector(f"{at}.conv.weight")
    return ShortConv(
        inputs=Linear(weights.matrix(f"{at}.in_proj"), bias("in_proj")),
        taps=taps[:, 0].T.contiguous(),
        bias=bias("conv"),
        out=Linear(weights.matrix(f"{at}.out_proj"), bias("out_proj")),
        storage=storage,
    )


def convolve(ops: Ops, h: Value, conv: ShortConv) -> Value:
    """What such a layer adds to the row, of its normed input."""
    both, hidden = conv.inputs(ops, h), conv.taps.shape[1]
    first, gate, value = (ops.columns(both, i * hidden, (i + 1) * hidden) for i in range(3))
    y = ops.short_conv(ops.mul(first, value), conv.storage, conv.taps, conv.bias)
    return conv.out(ops, ops.mul(gate, y))
