"""A GGUF model as a checkpoint: config, and tensors under the names and in the shapes of a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.checkpoints.gguf.blocks import dequantize
from paceline.checkpoints.gguf.metadata import config_of
from paceline.checkpoints.gguf.names import Piece, half_split_rows, pieces
from paceline.checkpoints.gguf.reader import Gguf

# kind -> (numpy's type of the same width, torch's type)
PLAIN: Mapping[str, tuple[str, torch.dtype]] = {
    "F32": ("<f4", torch.float32), "F16": ("<f2", torch.float16), "BF16": ("<i2", torch.bfloat16),
    "I32": ("<i4", torch.int32), "I64": ("<i8", torch.int64),
}  # fmt: skip


class GgufCheckpoint:
    """`config` as config.json has it, `pieces` by checkpoint name. Opening reads no weights. Raises LoadError."""

    def __init__(self, path: Path) -> None:
        self.model = Gguf(path)
        self.config: dict[str, Any] = config_of(path)

    @cached_property
    def pieces(self) -> dict[str, Piece]:
        text = self.config.get("text_config", self.config)
        return pieces(self.model, text["num_attention_heads"], text["num_key_value_heads"])

    def nbytes(self, name: str) -> int:
        """Bytes that a tensor takes in the file."""
        return sum(self.model.tensors[source].nbytes for source in self.pieces[name].sources)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as it is computed with: F32, F16, BF16 and integers as stored, values of any block type as float32,
        which holds them exactly."""
        plain, piece = PLAIN.get(self.kind(name)), self.pieces[name]
        if plain is None or piece.shift:
            return torch.from_numpy(self.floats(name) - np.float32(piece.shift))
        stored, dtype = plain
        data = np.ascontiguousarray(self.blocks(name)).view(stored).reshape(piece.shape)
        if piece.offsets:
            data = data - np.arange(len(data), dtype=data.dtype)
        return torch.from_numpy(data).view(dtype)

    def kind(self, name: str) -> str:
        """The block type of a tensor, "Q4_1"; "mixed" where it is made of several that differ."""
        if self.pieces[name].latent:
            return "mixed"
        kinds = {self.model.tensors[source].kind for source in self.pieces[name].sources}
        return kinds.pop() if len(kinds) == 1 else "mixed"

    def blocks(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor of one kind, [..., rows, bytes of a row], its rows in the order of the checkpoint.

        A view of the mapped file where nothing moves.
        """
        piece = self.pieces[name]
        parts = [self.model.raw(source) for source in piece.sources]
        data = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=piece.axis)
        if not piece.heads:
            return data
        if data.ndim == 1:  # a bias: its values are its rows, and none of them is quantized
            data = data.reshape(piece.shape[0], -1)
            return data[half_split_rows(piece.shape[0], piece.heads)].reshape(-1)
        return data[half_split_rows(data.shape[0], piece.heads)]

    def beside(self, name: str) -> NDArray[np.float32] | None:
        """What the scales in the blocks of each row are multiplied with, [..., rows]; None: nothing."""
        piece = self.pieces[name]
        if not piece.beside:
            return None
        parts = [self._beside(source, scale) for source, scale in zip(piece.sources, piece.beside)]
        return np.ascontiguousarray(np.concatenate(parts, axis=-1))

    def _beside(self, source: str, scale: str) -> NDArray[np.float32]:
        rows = self.model.tensors[source].shape[:-1]
        scales = self.model.floats(scale).reshape(-1) if scale else np.ones(1, np.float32)
        return np.broadcast_to(scales[:, None] if len(rows) == 2 else scales, rows)

    def _floats_of(self, source: str, scale: str = "") -> NDArray[np.float32]:
        if not scale:
            return self.model.floats(source)
        return dequantize(
            self.model.tensors[source].kind, self.model.raw(source), self._beside(source, scale)
        )

    def floats(self, name: str) -> NDArray[np.float32]:
        """The values of a tensor in its shape."""
        sources = self.pieces[name].sources
        if self.pieces[name].latent:
            keys, values = (self.model.floats(source) for source in sources)
            return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(self.pieces[name].shape)
        if self.kind(name) == "mixed":
            axis, beside = self.pieces[name].axis, self.pieces[name].beside or ("",) * len(sources)
            return np.concatenate([self._floats_of(*both) for both in zip(sources, beside)], axis=axis)
        return dequantize(self.kind(name), self.blocks(name), self.beside(name)).reshape(
            self.pieces[name].shape
        )
