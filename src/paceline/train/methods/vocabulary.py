"""Which tokens a drafter can draft: those that the target writes most often."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from paceline.train.windows import Windows


def choose(train: Windows, size: int, vocab: int, always: Iterable[int]) -> torch.Tensor:
    """The `size` tokens [size] that are counted most often in `train`, and those of `always`, rising.

    Where fewer were written, the rest is filled up from the lowest ids: tokenizers number by frequency.
    """
    often = np.bincount(train.tokens[train.counted], minlength=vocab).astype(np.int64)
    often[list(always)] = often.sum() + 1
    return torch.from_numpy(np.sort(np.argsort(-often, kind="stable")[:size]))
