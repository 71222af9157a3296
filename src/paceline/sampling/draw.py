"""Draws from shaped rows: one at a time on the host, all at once on a GPU. Both find the same token.

The token drawn is the lowest id that maximises shaped logit + Gumbel noise, compared in float64, so that a draw
does not hang on how a device rounds a logarithm. Rows that cannot be drawn from give -1.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from paceline.sampling import noise
from paceline.sampling.shape import LogitRow, is_greedy

_SCREEN_FROM = 1024  # more tokens than that are screened before their exact noise is computed


def draw_host(x: np.ndarray, ids: np.ndarray | None, row: LogitRow, purpose: int) -> int:
    """The token of one shaped row [C]; noise is computed only for tokens that can win."""
    best = int(x.argmax())  # the first of equals; NaN counts as largest
    most = x[best]
    if not np.isfinite(most):
        return -1
    if is_greedy(row):
        return best if ids is None else int(ids[x == most].min())
    keys = noise.keys(row.seed, row.position, purpose)
    columns = np.flatnonzero(x > -np.inf)
    if len(columns) > _SCREEN_FROM:
        columns = _screen(x, ids, keys)
    tokens = _tokens(columns, ids)
    scores = _scores(x[columns], tokens, keys)
    return int(tokens[scores == scores.max()].min())


def greedy(x: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    """[M, C] -> token of the largest value, lowest id on ties, int64 [M]."""
    best, column = x.max(-1)
    if ids is not None:
        column = ids.masked_fill(x != best[:, None], torch.iinfo(torch.int64).max).amin(-1)
    return column.masked_fill(~best.isfinite(), -1)


def draw_device(x: torch.Tensor, ids: torch.Tensor | None, rows: Seq[LogitRow], purpose: int) -> torch.Tensor:
    """The tokens of shaped rows [M, C], int64 [M]; the noise of every token, and nothing read by the host."""
    picked = greedy(x, ids)
    sampled = [i for i, row in enumerate(rows) if not is_greedy(row)]
    if sampled:
        seeds, positions = [rows[i].seed for i in sampled], [rows[i].position for i in sampled]
        cells = torch.arange(x.shape[-1], device=x.device) if ids is None else ids[sampled]
        scores = x[sampled].double() + noise.gumbel(noise.uniform(seeds, positions, cells, purpose))
        picked[sampled] = greedy(scores, None if ids is None else cells)
    return picked


def _screen(x: np.ndarray, ids: np.ndarray | None, keys: tuple[int, int]) -> np.ndarray:
    """Those columns whose score may reach that of the best of a few.

    No noise exceeds GUMBEL_MAX, and a token reaches score s only if v <= 1 - exp(-exp(x - s)), which is less
    than exp(x - s). All of it is relative to the largest logit: cold rows have logits too large for float32 sums.
    """
    most = x.max()
    few = np.append(np.arange(0, len(x), len(x) // 128), x.argmax())
    least = float(_scores(x[few], _tokens(few, ids), keys).max() - most) - 1e-3  # more than float32 loses
    floor = np.nextafter(np.float32(most + (least - noise.GUMBEL_MAX)), np.float32(-np.inf))
    columns = np.flatnonzero(x >= floor)
    if 4 * len(columns) < len(x):
        x = x[columns]
    else:
        columns = np.arange(len(x))  # picking most of a row costs more than looking at all of it
    reach = np.exp(x - most) * np.float32(2.0**32 * np.exp(-least))
    near: np.ndarray = columns[noise.host_bits(keys, _tokens(columns, ids)) <= reach]
    return near


def _tokens(columns: np.ndarray, ids: np.ndarray | None) -> np.ndarray:
    return columns if ids is None else ids[columns]


def _scores(x: np.ndarray, tokens: np.ndarray, keys: tuple[int, int]) -> np.ndarray:
    """Exact scores, float64 [n], of logits [n] of tokens [n]."""
    scores: np.ndarray = x + noise.host_gumbel(noise.host_bits(keys, tokens))
    return scores
