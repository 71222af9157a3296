"""Generated conversations with their states, in batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.models.hub import smollm2
from paceline.models.registry import load_target

HIDDEN, TAPS, STRIDE = 576, 4, 4 * 576


class Target:
    """What training needs of the target: embedding (its head, too) and final norm."""

    def __init__(self) -> None:
        target = load_target(smollm2(), dtype=torch.float32)
        self.embedding, self.norm, self.eps = (
            target.embedding.data.float(),
            target.norm.float(),
            target.config.eps,
        )

    def final(self, state: Tensor) -> Tensor:
        """What the head reads, of the last tap."""
        return torch.nn.functional.rms_norm(state.float(), (HIDDEN,), self.norm, self.eps)


class Shard:
    def __init__(self, file: Path) -> None:
        data = np.load(file)
        self.tokens = torch.from_numpy(data["tokens"].astype(np.int64))
        self.starts, self.answers = data["starts"].tolist(), data["answers"].tolist()
        self.states = np.memmap(file.with_suffix(".states"), np.int16, "r").reshape(-1, TAPS, HIDDEN)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def length(self, i: int) -> int:
        return int(self.starts[i + 1] - self.starts[i])

    def get(self, i: int) -> tuple[Tensor, Tensor]:
        a, b = self.starts[i], self.starts[i + 1]
        return self.tokens[a:b], torch.from_numpy(np.array(self.states[a:b])).view(torch.bfloat16)


def shards(folder: Path) -> list[Path]:
    """Those that are whole."""
    return [
        f
        for f in sorted(folder.glob("[0-9]*.npz"))
        if ".part" not in f.name and f.with_suffix(".states").exists()
    ]


def counts(folder: Path, vocabulary: int) -> np.ndarray:
    """How often each token was written by the target; the system prompt is not counted."""
    total = np.zeros(vocabulary, np.int64)
    for file in shards(folder):
        data = np.load(file)
        for a, b in zip(data["starts"][:-1], data["starts"][1:], strict=True):
            total += np.bincount(data["tokens"][a + 35 : b], minlength=vocabulary)
    return total
