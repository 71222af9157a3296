"""Which token a row emits: argmax if greedy, else argmax of shaped logits plus the position's noise.

This is the whole of the rule `match`: the token is a function of (logits, request, position), whoever asks and
beside whichever rows. Ties go to the lowest id.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from paceline.core import TokenLogprob
from paceline.ops.base import Rule
from paceline.ops.draws import Draw, draw_of
from paceline.sampling import noise
from paceline.sampling.draw import draw_device, draw_host, greedy
from paceline.sampling.filters import kth_largest
from paceline.sampling.shape import (
    GREEDY_BELOW,
    LogitRow,
    edited,
    edited_there,
    is_greedy,
    is_only_masked,
    is_plain,
    is_truncated,
    mass_kept,
    shape,
    shape_candidates,
    truncated,
    truncated_there,
)

_GREEDY = Rule(0.0, 0, 0)
_M64, _MOST = 0xFFFFFFFFFFFFFFFF, 0x7FFFFFFF


class Choice:
    """One token per row. ok is False where the row had NaN or nothing left to choose: its token is then 0."""

    __slots__ = ("_shaped", "ok", "tokens")

    def __init__(self, picked: list[int], shaped: torch.Tensor | Callable[[], torch.Tensor] | None) -> None:
        self.ok = [t >= 0 for t in picked]
        self.tokens = picked if all(self.ok) else [max(t, 0) for t in picked]
        self._shaped = shaped

    @property
    def shaped(self) -> torch.Tensor | None:
        """[M, V] float32, what was sampled from; None if all rows were plain greedy.

        May be computed on first use, from the logits that were given: ask before they are overwritten.
        """
        if self._shaped is not None and not isinstance(self._shaped, torch.Tensor):
            self._shaped = self._shaped()
        return self._shaped


@dataclass(slots=True)
class Proposal:
    """Draft tokens, the drafter's own probability of each, and the distributions they came from if needed."""

    tokens: list[int]
    confidence: list[float]
    q: list[torch.Tensor | None]  # [V] float64; None = one-hot (greedy rows, and every row under `match`)


def choose(logits: torch.Tensor, rows: Seq[LogitRow]) -> Choice:
    """The target's token for each row of logits [M, V]."""
    if draw := draw_of(logits, None):
        picked, _, plain = _draw_whole(draw, logits, None, rows, confidence=False)
        return Choice(picked, None if plain else partial(shape, logits, rows))
    if all(is_greedy(row) and is_plain(row) for row in rows):
        return Choice(greedy(logits, None).tolist(), None)
    shaped = shape(logits, rows)
    return Choice(_draw(logits, shaped, None, rows, noise.TARGET), shaped)


def choose_candidates(
    logits: torch.Tensor,
    ids: torch.Tensor | None,
    rows: Seq[LogitRow],
    purpose: int,
    vocab_size: int | None = None,
) -> Proposal:
    """A drafter's token for each row of logits [b, V], or [b, C] of candidates `ids` [b, C].

    With purpose TARGET (rule `match`) the noise is the target's own and q stays None. With DRAFT, q is the
    distribution that was sampled from, over `vocab_size` tokens (needed with `ids`). A row with NaN proposes token 0
    at confidence 0.
    """
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    if purpose == noise.TARGET and (draw := draw_of(logits, ids)):
        picked, confidence, _ = _draw_whole(draw, logits, ids, rows, confidence=True)
        return Proposal([max(t, 0) for t in picked], confidence, [None] * len(rows))
    shaped = shape(logits, rows) if ids is None else shape_candidates(logits, ids, rows)
    picked = _draw(logits, shaped, ids, rows, purpose)
    confidence = _mass(shaped, ids, picked)
    q: list[torch.Tensor | None] = [None] * len(rows)
    if purpose != noise.TARGET:
        for i, row in enumerate(rows):
            if picked[i] >= 0 and not is_greedy(row):
                q[i] = _spread(shaped[i], None if ids is None else ids[i], vocab_size)
    return Proposal([max(t, 0) for t in picked], confidence, q)


def distribution(shaped: torch.Tensor, rows: Seq[LogitRow]) -> torch.Tensor:
    """p of each row, float64 [M, V]: the softmax of shaped logits; all mass on one token for greedy rows."""
    p = torch.softmax(shaped.double(), -1)
    for i, row in enumerate(rows):
        if is_greedy(row):
            p[i] = 0
            p[i, shaped[i].argmax()] = 1
    return p


def logprobs(logits: torch.Tensor, shaped: torch.Tensor | None, token: int, n: int) -> TokenLogprob:
    """Log probabilities at one position from raw logits [V] and shaped logits [V] (None = the same as raw).

    `shaped` is the distribution after penalties, temperature and filters; for a greedy row that of temperature 1, not
    the certainty that greedy choice makes of it.
    """
    x = logits.detach().float().cpu().numpy()
    whole = _log_mass(x)
    raw = float(x[token]) - whole
    own = raw
    if shaped is not None:
        y = shaped.cpu().numpy()
        own = float(y[token]) - _log_mass(y)
    top = [(i, float(x[i]) - whole) for i in _largest(x, n)]
    return TokenLogprob(token, raw, own, top)


def _log_mass(x: np.ndarray) -> float:
    """log of the sum of exp(x)."""
    most = x.max()
    return float(most) + math.log(float(np.exp(x - most).sum(dtype=np.float64)))


def _largest(x: np.ndarray, n: int) -> list[int]:
    """Ids of the n largest values, largest first, lower ids first among equals."""
    n = min(n, len(x))
    if n == 0:
        return []
    ids = np.flatnonzero(x >= kth_largest(x, n, x.max()))
    return [int(i) for i in ids[np.lexsort((ids, -x[ids]))[:n]]]


def _draw_whole(
    draw: Draw, logits: torch.Tensor, ids: torch.Tensor | None, rows: Seq[LogitRow], *, confidence: bool
) -> tuple[list[int], list[float], bool]:
    """(token or -1, its probability or 0) of each row, with the target's noise and without shaped logits.

    And whether all rows are plain greedy.
    """
    edits: dict[int, torch.Tensor | np.ndarray] = {}
    broken: list[int] = []  # rows with a NaN that an edit may have hidden
    rules = [rule_of(row) for row in rows]
    for i, row in enumerate(rows):
        mask = row.mask
        own = None if ids is None else ids[i]
        if is_truncated(row):
            edits[i] = _truncated(draw, logits[i], own, row)
            continue
        if mask is None and not (row.params.edits or row.stop_ids):
            continue
        if is_only_masked(row) and (mask is None or draw.masks):
            if mask is not None:
                edits[i] = mask
            continue
        if not draw.masks:
            edits[i] = edited_there(logits[i], own, row)
            continue
        x = logits[i].detach().numpy()
        edits[i] = torch.from_numpy(edited(x, None if own is None else own.numpy(), row))
        if np.isnan(x.max()):
            broken.append(i)
    tokens, mass = draw.call(logits, ids, rules, noise.TARGET, confidence, edits)
    for i in broken:
        tokens[i], mass[i] = -1, 0.0
    return tokens, mass, not edits and rules.count(_GREEDY) == len(rules)


def _truncated(draw: Draw, x: torch.Tensor, ids: torch.Tensor | None, row: LogitRow) -> torch.Tensor:
    if not draw.masks:
        return truncated_there(x, ids, row)
    return torch.from_numpy(truncated(x.detach().numpy(), None if ids is None else ids.numpy(), row))


def rule_of(row: LogitRow) -> Rule:
    """What is left to do where a row is drawn; a truncated one has been shaped before."""
    p = row.params
    if p.temperature < GREEDY_BELOW:
        return _GREEDY
    if p.truncates:
        return Rule(1.0, row.seed & _M64, row.position)
    least = float(np.log(np.float32(p.min_p))) if p.min_p > 0 else -math.inf  # rounded as in host_threshold
    return Rule(
        1.0 / p.temperature,
        row.seed & _M64,
        row.position,
        min(p.top_k, _MOST),
        mass_kept(p.top_p),
        least,
    )


def _draw(
    logits: torch.Tensor,
    shaped: torch.Tensor,
    ids: torch.Tensor | None,
    rows: Seq[LogitRow],
    purpose: int,
) -> list[int]:
    """The token of each row; -1 where there is none, or where the logits had a NaN that a mask has hidden."""
    draw = draw_of(shaped, ids)
    rules = [Rule(0.0 if is_greedy(r) else 1.0, r.seed & _M64, r.position) for r in rows]
    if draw is not None and not draw.masks:
        sound = shaped.masked_fill(logits.amax(-1).isnan()[:, None], torch.nan)
        return draw.call(sound, ids, rules, purpose, False)[0]
    if shaped.device.type != "cpu":
        picked = draw_device(shaped, ids, rows, purpose).masked_fill(logits.amax(-1).isnan(), -1)
        return [int(t) for t in picked.tolist()]
    broken = np.isnan(logits.detach().numpy().max(-1))  # [M]
    if draw is not None:
        tokens, _ = draw.call(shaped, ids, rules, purpose, False)
        return [-1 if b else t for b, t in zip(broken, tokens, strict=True)]
    x, cells = shaped.numpy(), None if ids is None else ids.numpy()
    return [
        -1 if broken[i] else draw_host(x[i], None if cells is None else cells[i], row, purpose)
        for i, row in enumerate(rows)
    ]


def _mass(shaped: torch.Tensor, ids: torch.Tensor | None, picked: Seq[int]) -> list[float]:
    """The probability of each row's token under its shaped distribution [M, C]; 0 where no token was found (-1)."""
    if shaped.device.type == "cpu":
        out = []
        for i, token in enumerate(picked):
            x = shaped[i].numpy()
            column = token if ids is None else int((ids[i].numpy() == token).argmax())
            out.append(float(1 / np.exp(x - x[column]).sum()) if token >= 0 else 0.0)
        return out
    chosen = torch.tensor(picked).to(shaped.device)[:, None]
    p = torch.softmax(shaped, -1)
    own = p.gather(1, chosen.clamp(min=0)) if ids is None else p.masked_fill(ids != chosen, 0)
    return [c if t >= 0 else 0.0 for t, c in zip(picked, own.sum(-1).tolist(), strict=True)]


def _spread(shaped: torch.Tensor, ids: torch.Tensor | None, vocab_size: int | None) -> torch.Tensor:
    """The distribution of one row over the whole vocabulary, float64 [V]."""
    q = torch.softmax(shaped.double(), -1)
    if ids is None:
        return q
    assert vocab_size is not None, "candidates do not say how large the vocabulary is"
    return torch.zeros(vocab_size, dtype=torch.float64, device=q.device).index_add_(0, ids, q)
