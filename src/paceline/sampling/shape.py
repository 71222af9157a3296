"""From a model's logits to the law that a request asked for.

Order: constraint, allowed/bad tokens, min_tokens, logit_bias, repetition, presence and frequency penalties,
temperature, top_k, top_p, min_p; each filter sees what the one before it left, renormalised. A refused token
has -inf. A row's result depends on no other row. Greedy rows are neither divided nor filtered: it would move
no argmax.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from paceline.core import SamplingParams
from paceline.errors import UsageError
from paceline.sampling.filters import Filter, keep_filtered
from paceline.sampling.history import Counts

__all__ = [
    "Counts", "LogitRow", "check_token_ids", "is_filtered", "is_greedy", "is_plain", "shape",
    "shape_candidates",
]  # fmt: skip

GREEDY_BELOW = 1e-5  # colder than this cannot be told from greedy in float32


@dataclass(slots=True)
class LogitRow:
    """What one row of logits needs to know of its request: the logits say what comes at `position`."""

    params: SamplingParams
    seed: int
    position: int  # absolute position of the token that this row chooses
    history: Counts  # everything before `position`, the draft tokens of the block included
    mask: np.ndarray | None = None  # bool [V], allowed by the constraint; None = all
    stop_ids: tuple[int, ...] = ()  # may not come before min_tokens are out


def is_greedy(row: LogitRow) -> bool:
    return row.params.temperature < GREEDY_BELOW


def is_filtered(row: LogitRow) -> bool:
    """Whether top_k, top_p or min_p can remove a token."""
    p = row.params
    return not is_greedy(row) and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)


def is_plain(row: LogitRow) -> bool:
    """Whether nothing but the temperature shapes this row."""
    return not (is_filtered(row) or _is_edited(row))


def shape(logits: torch.Tensor, rows: Seq[LogitRow]) -> torch.Tensor:
    """[M, V] -> new float32 [M, V], one LogitRow per row."""
    return _shape(logits, None, rows)


def shape_candidates(logits: torch.Tensor, ids: torch.Tensor, rows: Seq[LogitRow]) -> torch.Tensor:
    """[b, C] logits of token ids [b, C] -> new float32 [b, C]: the same law over these candidates only."""
    return _shape(logits, ids, rows)


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise UsageError for a token id in `params` that the vocabulary does not have."""
    named: list[tuple[str, Iterable[int]]] = [
        ("logit_bias", params.logit_bias), ("bad_token_ids", params.bad_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or ()), ("stop_token_ids", params.stop_token_ids),
    ]  # fmt: skip
    for name, ids in named:
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise UsageError(f"{name} has token id {token!r}: give ids from 0 to {vocab_size - 1}")


def _shape(logits: torch.Tensor, ids: torch.Tensor | None, rows: Seq[LogitRow]) -> torch.Tensor:
    assert logits.shape[0] == len(rows)
    out = logits.to(torch.float32, copy=True)  # [M, C]
    for i, row in enumerate(rows):
        if _is_edited(row):
            _edit(_Cells(out[i], None if ids is None else ids[i]), row)
    factors = [1.0 if is_greedy(row) else 1.0 / row.params.temperature for row in rows]
    if any(f != 1.0 for f in factors):
        out *= torch.tensor(factors, dtype=torch.float32).to(out.device)[:, None]
    chosen = [i for i, row in enumerate(rows) if is_filtered(row)]
    if chosen:
        filters = [Filter(rows[i].params.top_k, rows[i].params.top_p, rows[i].params.min_p) for i in chosen]
        if len(chosen) == len(rows):
            return keep_filtered(out, filters)
        out[chosen] = keep_filtered(out[chosen], filters)
    return out


def _is_edited(row: LogitRow) -> bool:
    p = row.params
    return bool(
        row.mask is not None or p.allowed_token_ids is not None or p.bad_token_ids or p.logit_bias
        or p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
        or (row.stop_ids and row.history.output_len < p.min_tokens)
    )  # fmt: skip


@dataclass(slots=True)
class _Cells:
    """One row's logits, addressed by token id: the whole vocabulary, or candidates in any order."""

    x: torch.Tensor  # [C], changed in place
    ids: torch.Tensor | None  # [C]

    def find(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(columns [n], which of `tokens` they are [n]) for those that have a column here."""
        if self.ids is None:
            keep = (tokens < self.x.shape[0]).nonzero()[:, 0]
            return tokens[keep], keep
        order = self.ids.argsort()
        place = torch.searchsorted(self.ids[order], tokens).clamp_(max=len(order) - 1)
        columns = order[place]
        keep = (self.ids[columns] == tokens).nonzero()[:, 0]
        return columns[keep], keep

    def tensor(self, values: object) -> torch.Tensor:
        return torch.as_tensor(values, device=self.x.device)

    def ban(self, tokens: Seq[int]) -> None:
        columns, _ = self.find(self.tensor(list(tokens)).long())
        self.x[columns] = -torch.inf

    def allow(self, tokens: Seq[int]) -> None:
        columns, _ = self.find(self.tensor(sorted(set(tokens))).long())
        kept = self.x[columns]
        self.x.fill_(-torch.inf)
        self.x[columns] = kept

    def restrict(self, mask: np.ndarray) -> None:
        """Refuse what `mask` refuses; tokens beyond its end (vocabulary padding) are refused too."""
        allowed = self.tensor(np.ascontiguousarray(mask, dtype=bool))
        if self.ids is None:
            width = min(len(allowed), len(self.x))
            self.x[:width].masked_fill_(~allowed[:width], -torch.inf)
            self.x[width:] = -torch.inf
        else:
            inside = self.ids < len(allowed)
            self.x.masked_fill_(~(inside & allowed[self.ids.clamp(max=len(allowed) - 1)]), -torch.inf)


def _edit(cells: _Cells, row: LogitRow) -> None:
    p = row.params
    if row.mask is not None:
        cells.restrict(row.mask)
    if p.allowed_token_ids is not None:
        cells.allow(p.allowed_token_ids)
    if p.bad_token_ids:
        cells.ban(p.bad_token_ids)
    if row.stop_ids and row.history.output_len < p.min_tokens and not _only_stops(row):
        cells.ban(row.stop_ids)
    if p.logit_bias:
        columns, which = cells.find(cells.tensor(list(p.logit_bias)).long())
        cells.x[columns] += cells.tensor(list(p.logit_bias.values())).float()[which]
    if p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0:
        _penalise(cells, row)


def _penalise(cells: _Cells, row: LogitRow) -> None:
    p = row.params
    ids, counts = row.history.table()
    columns, which = cells.find(cells.tensor(ids))
    x = cells.x[columns]
    if p.repetition_penalty != 1:
        x = torch.where(x > 0, x / p.repetition_penalty, x * p.repetition_penalty)
    used = cells.tensor(counts)[which]
    cells.x[columns] = x - (p.presence_penalty * (used > 0) + p.frequency_penalty * used)


def _only_stops(row: LogitRow) -> bool:
    """Whether the constraint has ended: then min_tokens gives way, or nothing could be emitted."""
    if row.mask is None:
        return False
    stops = sum(bool(row.mask[t]) for t in set(row.stop_ids) if t < len(row.mask))
    return stops > 0 and int(np.count_nonzero(row.mask)) == stops
