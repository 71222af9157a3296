"""The layers of a vision tower by the native kernels (`native/tower.cpp`), some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.ops.base import Weight
from paceline.ops.binding import address
from paceline.ops.extension import extension
from paceline.ops.recording import Code
from paceline.ops.tiles import KINDS, PAIRS, packed

ROWS = 128  # of a thread's piece of work


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """What a layer multiplies with. Norms: before and after attention, before and after the MLP, of queries, of keys."""

    norms: list[Tensor]
    linears: list[Tensor]  # q, k, v, o, gate, up, down, as stored
    bounds: list[list[float]] | None  # of each linear: lowest and highest input, lowest and highest output


class Matrix:
    """x @ weight.T by the native kernels, weights as stored and inputs float32. A row's bits depend on no other row, and
    not on the number of threads, as those of BLAS do."""

    def __init__(self, native: Any, values: Tensor) -> None:
        self._tiles, code = packed(native, _weight(values), exact=True)
        self._out, width = values.shape
        self._program = native.Program()
        self._program.begin_step()
        matrix = (self._tiles.data_ptr(), 0, self._out, width, code)
        self._program.add(int(Code.LINEAR), [(0, 0, width), (1, 0, self._out)], [matrix], [], 0.0)

    def __call__(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, out] float32."""
        x, y = x.float().contiguous(), torch.empty(len(x), self._out)
        for buffer, values in enumerate((x, y)):
            self._program.bind(buffer, values.data_ptr(), values.stride(0))
        self._program.run(len(x), 0, 0, 0)
        return y


def _weight(values: Tensor) -> Weight:
    if values.dtype == torch.bfloat16:
        return Weight(values.contiguous(), "bfloat16")
    return Weight(values.float().contiguous(), "float32")


class Encoder:
    """Packs the weights of all layers; those as stored are not kept.

    bfloat16 weights are multiplied with inputs rounded to bfloat16 where the CPU multiplies pairs of it, and then keys,
    values and shares of attention are rounded to it, too. All sums, norms and the rows between layers are float32.
    """

    def __init__(self, native: Any, layers: Iterator[EncoderLayer], heads: int, eps: float) -> None:
        self._native, self._held, self._tower, self._threads = native, list[Tensor](), None, 1
        self.layers = 0
        for layer in layers:
            if self._tower is None:
                self._tower = self._begun(layer, heads, eps)
            self._add(layer)
            self.layers += 1

    @staticmethod
    def available(device: torch.device) -> Any:
        """The extension that computes such layers, or None: on a GPU, or where it was built before it could."""
        return extension("Tower") if device.type == "cpu" else None

    def _begun(self, layer: EncoderLayer, heads: int, eps: float) -> Any:
        q, gate = layer.linears[0], layer.linears[4]
        pairs = q.dtype == torch.bfloat16 and self._native.bf16_dot()
        self._pairs, self._width = pairs, q.shape[0] // heads
        seen = PAIRS if pairs else KINDS["float32"]
        return self._native.Tower(q.shape[1], gate.shape[0], heads, self._width, eps, seen)

    def _add(self, layer: EncoderLayer) -> None:
        norms = [norm.float().contiguous() for norm in layer.norms]
        self._held += norms
        matrices = []
        for values in layer.linears:
            tiles, code = packed(self._native, _weight(values), exact=not self._pairs)
            self._held.append(tiles)
            matrices.append((tiles.data_ptr(), 0, *values.shape, code))
        bounds = [bound for some in layer.bounds or () for bound in some]
        assert self._tower is not None
        self._tower.add([address(norm, torch.float32, 1, "norm") for norm in norms], matrices, bounds)

    def run(self, x: Tensor, places: tuple[Tensor, Tensor], theta: float) -> Iterator[None]:
        """Overwrite rows x [N, hidden] with what the layers make of them, a slice at each step of the iterator.

        A slice is `ROWS` rows for each thread of the pool, of one half of a layer. `places`: column and row of each.
        """
        width = self._width // 2
        angles = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
        turned = torch.cat([place.float()[:, None] * angles for place in places], dim=1)
        cos, sin, count = turned.cos().contiguous(), turned.sin().contiguous(), len(x)
        at = [address(tensor, torch.float32, count, "rows") for tensor in (x, cos, sin)]
        sight = self._native.Sight(self._tower, at[0], count, *at[1:])
        for layer in range(self.layers):
            for half in (sight.keys, sight.rows):
                step, begin = ROWS * self._native.threads(), 0
                while begin < count:
                    half(layer, begin, begin + step)
                    begin += step
                    yield
