"""Which token a row emits: argmax if greedy, else argmax of shaped logits plus the position's noise.

This is the whole of the rule `match`: the token is a function of (logits, request, position), whoever asks.
Ties go to the lowest id. Scores are compared in float64: the draw does not hang on how a device rounds a log.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from paceline.core import TokenLogprob
from paceline.sampling import noise
from paceline.sampling.shape import LogitRow, is_filtered, is_greedy, is_plain, shape, shape_candidates

_SCREEN_FROM = 1024  # more tokens than that are screened before their exact noise is computed


@dataclass(slots=True)
class Choice:
    """One token per row. ok is False where the row had NaN or nothing left to choose: its token is then 0."""

    tokens: list[int]
    ok: list[bool]
    shaped: torch.Tensor | None  # [M, V] float32, what was sampled from; None if all rows were plain greedy


@dataclass(slots=True)
class Proposal:
    """Draft tokens, the drafter's own probability of each, and the laws they came from if needed."""

    tokens: list[int]
    confidence: list[float]
    q: list[torch.Tensor | None]  # [V] float64; None = one-hot (greedy rows, and every row under `match`)


def choose(logits: torch.Tensor, rows: Seq[LogitRow]) -> Choice:
    """The target's token for each row of logits [M, V]."""
    if all(is_greedy(row) and is_plain(row) for row in rows):
        return _choice(_greedy(logits, None), None)
    shaped = shape(logits, rows)
    picked = _draw(shaped, None, rows, noise.TARGET)
    picked = picked.masked_fill(logits.amax(-1).isnan(), -1)  # a NaN that a mask hid is still one
    return _choice(picked, shaped)


def choose_candidates(
    logits: torch.Tensor,
    ids: torch.Tensor | None,
    rows: Seq[LogitRow],
    purpose: int,
    vocab_size: int | None = None,
) -> Proposal:
    """A drafter's token for each row of logits [b, V], or [b, C] of candidates `ids` [b, C].

    With purpose TARGET (rule `match`) the noise is the target's own and q stays None. With DRAFT, q is the
    law that was sampled from, over `vocab_size` tokens (needed with `ids`). A row with NaN proposes token 0
    at confidence 0.
    """
    shaped = shape(logits, rows) if ids is None else shape_candidates(logits, ids, rows)
    picked = _draw(shaped, ids, rows, purpose).masked_fill(logits.amax(-1).isnan(), -1)  # [b]
    mass = torch.softmax(shaped, -1)
    if ids is None:
        hit = mass.gather(1, picked.clamp(min=0)[:, None])[:, 0]
    else:
        hit = mass.masked_fill(ids != picked[:, None], 0).sum(-1)
    tokens, confidence = torch.stack([picked.double(), hit.double()]).tolist()
    bad = [t < 0 or not c <= 1.0001 for t, c in zip(tokens, confidence, strict=True)]
    q: list[torch.Tensor | None] = [None] * len(rows)
    if purpose != noise.TARGET:
        for i, row in enumerate(rows):
            if not (is_greedy(row) or bad[i]):
                q[i] = _spread(shaped[i], None if ids is None else ids[i], vocab_size)
    return Proposal(
        [0 if b else int(t) for t, b in zip(tokens, bad, strict=True)],
        [0.0 if b else min(c, 1.0) for c, b in zip(confidence, bad, strict=True)], q,
    )  # fmt: skip


def law(shaped: torch.Tensor, rows: Seq[LogitRow]) -> torch.Tensor:
    """p of each row, float64 [M, V]: the softmax of shaped logits; all mass on one token for greedy rows."""
    p = torch.softmax(shaped.double(), -1)
    for i, row in enumerate(rows):
        if is_greedy(row):
            p[i] = 0
            p[i, shaped[i].argmax()] = 1
    return p


def logprobs(logits: torch.Tensor, shaped: torch.Tensor | None, token: int, n: int) -> TokenLogprob:
    """Log probabilities at one position from raw logits [V] and shaped logits [V] (None = the same as raw).

    `shaped` is the law after penalties, temperature and filters; for a greedy row that of temperature 1, not
    the certainty that greedy choice makes of it.
    """
    raw = torch.log_softmax(logits.float(), -1)
    own = raw[token].item() if shaped is None else torch.log_softmax(shaped, -1)[token].item()
    top: list[tuple[int, float]] = []
    if n:
        least = raw.topk(min(n, len(raw))).values[-1]
        ids = (raw >= least).nonzero()[:, 0].tolist()
        top = sorted(zip(ids, raw[ids].tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))[:n]
    return TokenLogprob(token, raw[token].item(), own, top)


def _choice(picked: torch.Tensor, shaped: torch.Tensor | None) -> Choice:
    tokens = picked.tolist()
    return Choice([max(t, 0) for t in tokens], [t >= 0 for t in tokens], shaped)


def _greedy(x: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    """[M, C] -> token of the largest value, lowest id on ties, int64 [M]; -1 where none is finite."""
    best, column = x.max(-1)
    if ids is not None:
        column = ids.masked_fill(x != best[:, None], torch.iinfo(torch.int64).max).amin(-1)
    return column.masked_fill(~best.isfinite(), -1)


def _draw(shaped: torch.Tensor, ids: torch.Tensor | None, rows: Seq[LogitRow], purpose: int) -> torch.Tensor:
    """Token of each row of shaped logits [M, C], int64 [M]; -1 where there is none."""
    picked = _greedy(shaped, ids)
    sampled = [i for i, row in enumerate(rows) if not is_greedy(row)]
    if not sampled:
        return picked
    if shaped.device.type != "cpu":  # every token's noise at once: no read by the host
        seeds, positions = [rows[i].seed for i in sampled], [rows[i].position for i in sampled]
        cells = torch.arange(shaped.shape[-1], device=shaped.device) if ids is None else ids[sampled]
        scores = shaped[sampled].double() + noise.gumbel(noise.uniform(seeds, positions, cells, purpose))
        picked[sampled] = _greedy(scores, None if ids is None else cells)
        return picked
    tokens = picked.tolist()
    for i in sampled:
        if tokens[i] >= 0:
            tokens[i] = _draw_row(
                shaped[i].numpy(), None if ids is None else ids[i].numpy(), rows[i], purpose
            )
    return torch.tensor(tokens)


def _draw_row(x: np.ndarray, ids: np.ndarray | None, row: LogitRow, purpose: int) -> int:
    """One row on the host: exact noise only for tokens that can win."""
    columns = np.flatnonzero(x > -np.inf) if is_filtered(row) else np.arange(len(x))
    if len(columns) > _SCREEN_FROM:
        columns = _screen(x, columns, ids, row, purpose)
    tokens, scores = _scores(x, columns, ids, row, purpose)
    return int(tokens[scores == scores.max()].min())


def _screen(
    x: np.ndarray, columns: np.ndarray, ids: np.ndarray | None, row: LogitRow, purpose: int
) -> np.ndarray:
    """Those columns whose score may reach that of the best of a few others.

    A token reaches score s only if v <= 1 - exp(-exp(x - s)), and that is less than exp(x - s).
    """
    few = np.append(columns[:: max(1, len(columns) // 256)], x.argmax())
    least = _scores(x, few, ids, row, purpose)[1].max()
    tokens = columns if ids is None else ids[columns]
    reach = np.exp(x[columns] - np.float32(least - 1e-3)) * np.float32(2.0**32)
    return columns[noise.host_bits(row.seed, row.position, purpose, tokens) <= reach]


def _scores(
    x: np.ndarray, columns: np.ndarray, ids: np.ndarray | None, row: LogitRow, purpose: int
) -> tuple[np.ndarray, np.ndarray]:
    """(token ids, exact scores float64) of some columns."""
    tokens = columns if ids is None else ids[columns]
    h = noise.host_bits(row.seed, row.position, purpose, tokens)
    return tokens, x[columns] + noise.host_gumbel(h)


def _spread(shaped: torch.Tensor, ids: torch.Tensor | None, vocab_size: int | None) -> torch.Tensor:
    """The law of one row over the whole vocabulary, float64 [V]."""
    q = torch.softmax(shaped.double(), -1)
    if ids is None:
        return q
    assert vocab_size is not None, "candidates do not say how large the vocabulary is"
    return torch.zeros(vocab_size, dtype=torch.float64, device=q.device).index_add_(0, ids, q)
