"""The best tokens of a row of scores, found with the noise that a draw of it will have."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.ops.base import Rule
from paceline.sampling import noise

NEAR = 16.0  # a token whose score is so much below the best one is not looked at, however much noise it has
FETCHED = 256  # tokens of a row that are fetched from a GPU


def best_tokens(scores: torch.Tensor, count: int, rule: Rule | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores, ids) of the `count` best of scores [V], on the host; see `best_of`."""
    ids = None
    if scores.is_cuda:
        top = scores.topk(min(FETCHED, len(scores)))
        x, ids = top.values.float().cpu().numpy(), top.indices.cpu().numpy()
    else:
        x = scores.float().numpy()
    at = best_of(x, ids, count, rule)
    tokens = at if ids is None else ids[at]
    return torch.from_numpy(np.ascontiguousarray(x[at])), torch.from_numpy(np.ascontiguousarray(tokens))


def best_of(
    x: NDArray[np.float32], ids: NDArray[np.int64] | None, count: int, rule: Rule | None
) -> NDArray[np.int64]:
    """The places of the `count` largest of x [V], the token ids of which are `ids` (None: all), lower ids first among
    equals; those that `rule` draws from, by their scores with its noise.
    """
    count = min(count, len(x))
    factor, seed, position = (0.0, 0, 0) if rule is None else (rule.factor, rule.seed, rule.position)
    near = np.flatnonzero(x >= x.max() - (NEAR / factor if factor else NEAR))
    if len(near) < count:
        near = np.argpartition(-x, count - 1)[:count] if len(x) > count else np.arange(len(x))
        near = np.flatnonzero(x >= x[near].min()) if np.isfinite(x[near]).all() else np.sort(near)
    tokens = near if ids is None else ids[near]
    worth = x[near].astype(np.float64)
    if factor:
        keys = noise.keys(seed, position, noise.TARGET)
        worth = worth * factor + noise.host_gumbel(noise.host_bits(keys, tokens))
    return near[np.lexsort((tokens, -worth))[:count]]
