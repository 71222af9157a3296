"""From a model's logits to the distribution that a request asked for.

Order: constraint, allowed/bad tokens and words, min_tokens, logit_bias, repetition, presence and frequency penalties,
DRY, temperature, top_k, top_p, min_p, with the samplers of truncation.py among them; each filter sees what the one
before it left, renormalised. A refused token has -inf. A row's result depends on no other row. Greedy rows are neither
divided nor filtered.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from paceline.core import SamplingParams, Sequence
from paceline.errors import UsageError, shown
from paceline.sampling.cells import Cells
from paceline.sampling.filters import Filter, host_threshold, thresholds
from paceline.sampling.history import Counts
from paceline.sampling.repeats import Breakers, dry_penalties
from paceline.sampling.truncation import (
    cool,
    dynamic_temperature,
    exclude_top,
    excludes,
    keep_expected,
    keep_near_best,
    keep_typical,
)

__all__ = [
    "Counts", "LogitRow", "check_token_ids", "edited", "edited_there", "is_edited", "is_filtered", "is_greedy",
    "is_only_masked", "is_plain", "is_truncated", "shape", "shape_candidates", "truncated", "truncated_there",
]  # fmt: skip

GREEDY_BELOW = 1e-5  # colder than this cannot be distinguished from greedy in float32


class Banned(Protocol):
    """Texts that may not be written."""

    def after(self, text: Counts) -> np.ndarray:
        """The tokens that would complete one of them after the output of `text`, int64 [n]."""
        ...


@dataclass(slots=True)
class LogitRow:
    """What one row of logits needs to know of its request: the logits say what comes at `position`."""

    params: SamplingParams
    seed: int
    position: int  # absolute position of the token that this row chooses
    history: Counts  # everything before `position`, the draft tokens of the block included
    mask: np.ndarray | None = None  # bool [V], allowed by the constraint; None = all
    stop_ids: tuple[int, ...] = ()  # may not come before min_tokens are out
    breakers: Breakers = ()  # no repetition reaches over them (repeats.py)
    banned: Banned | None = None  # tokens that would complete what may not be written
    mu: float | None = None  # the threshold of Mirostat; None = as at the beginning of a text


LEAST_MASS = 1e-9  # below what the most likely of any number of tokens has


def is_greedy(text: LogitRow | Sequence) -> bool:
    return text.params.temperature < GREEDY_BELOW


def is_filtered(row: LogitRow) -> bool:
    """Whether a filter can remove a token."""
    p = row.params
    return not is_greedy(row) and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0 or p.truncates)


def is_truncated(row: LogitRow) -> bool:
    """Whether samplers shape this row that only the host computes."""
    return row.params.truncates and not is_greedy(row)


def truncated(x: np.ndarray, ids: np.ndarray | None, row: LogitRow) -> np.ndarray:
    """A shaped float32 copy of logits [C] on the host, from which to draw at temperature 1. All NaN where one is."""
    out = x.astype(np.float32)
    _shape_row(out, ids, row)
    if np.isnan(x).any():
        out[:] = np.nan
    return out


def is_plain(row: LogitRow) -> bool:
    """Whether nothing but the temperature shapes this row."""
    return not (is_filtered(row) or is_edited(row))


def shape(logits: torch.Tensor, rows: Seq[LogitRow]) -> torch.Tensor:
    """[M, V] -> new float32 [M, V], one LogitRow per row."""
    return _shape(logits, None, rows)


def shape_candidates(logits: torch.Tensor, ids: torch.Tensor, rows: Seq[LogitRow]) -> torch.Tensor:
    """[b, C] logits of token ids [b, C] -> new float32 [b, C]: the same distribution over these candidates only."""
    return _shape(logits, ids, rows)


def edited(x: np.ndarray, ids: np.ndarray | None, row: LogitRow) -> np.ndarray:
    """A float32 copy of logits [C] on the host, shaped by everything but temperature and filters."""
    x = x.astype(np.float32)
    edit(Cells(x, ids, np), row)
    return x


def edited_there(x: torch.Tensor, ids: torch.Tensor | None, row: LogitRow) -> torch.Tensor:
    """`edited` where the logits [C] lie; nothing is read by the host. All NaN where the logits have one."""
    out = x.to(torch.float32, copy=True)
    edit(Cells(out, ids, torch), row)
    return out.masked_fill_(x.isnan().any(), torch.nan)


def truncated_there(x: torch.Tensor, ids: torch.Tensor | None, row: LogitRow) -> torch.Tensor:
    """`truncated` for logits [C] on a device, by way of the host."""
    own = None if ids is None else ids.cpu().numpy()
    return torch.from_numpy(truncated(x.detach().float().cpu().numpy(), own, row)).to(x.device)


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise UsageError for a token id in `params` that the vocabulary does not have."""
    named: list[tuple[str, Iterable[int]]] = [
        ("logit_bias", params.logit_bias), ("bad_token_ids", params.bad_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or ()), ("stop_token_ids", params.stop_token_ids),
        ("reference", () if isinstance(params.reference, str) else params.reference or ()),
    ]  # fmt: skip
    for name, ids in named:
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise UsageError(f"{name} has token id {shown(token)}: give ids from 0 to {vocab_size - 1}")


def _shape(logits: torch.Tensor, ids: torch.Tensor | None, rows: Seq[LogitRow]) -> torch.Tensor:
    assert logits.shape[0] == len(rows)
    if logits.device.type == "cpu":
        out = logits.detach().numpy().astype(np.float32)  # [M, C], a copy
        for i, row in enumerate(rows):
            _shape_row(out[i], None if ids is None else ids[i].numpy(), row)
        return torch.from_numpy(out)
    return _shape_device(logits, ids, rows)


def _shape_row(x: np.ndarray, ids: np.ndarray | None, row: LogitRow) -> None:
    """Shape one row [C] on the host, in place."""
    if is_edited(row):
        edit(Cells(x, ids, np), row)
    if is_greedy(row):
        return
    if row.params.truncates:
        if np.isfinite(x.max()):
            _truncate(x, row)
        return
    if row.params.temperature != 1:
        x *= _factor(row)
    if is_filtered(row):
        _drop_below(x, _filter(row))


def _truncate(x: np.ndarray, row: LogitRow) -> None:
    """Temperature and all filters of a row [C] that has possible tokens and no NaN, in place."""
    p = row.params
    if p.mirostat:
        cool(x, p.temperature)
        keep_expected(x, 2 * p.mirostat_tau if row.mu is None else row.mu)
        return
    last = p.temperature_last or p.dynatemp_range > 0
    if not last:
        cool(x, p.temperature)
    if p.top_n_sigma > 0:
        keep_near_best(x, p.top_n_sigma)
    if p.top_k > 0:
        _drop_below(x, Filter(p.top_k))
    if p.typical_p < 1:
        keep_typical(x, p.typical_p)
    if p.top_p < 1 or p.min_p > 0:
        _drop_below(x, Filter(0, mass_kept(p.top_p), p.min_p))
    if p.xtc_threshold <= 0.5 and excludes(p, row.seed, row.position):
        exclude_top(x, p.xtc_threshold)
    if last:
        cool(x, dynamic_temperature(x, p) if p.dynatemp_range > 0 else p.temperature)


def _drop_below(x: np.ndarray, limits: Filter) -> None:
    x[~(x >= host_threshold(x, limits))] = -np.inf


def _shape_device(logits: torch.Tensor, ids: torch.Tensor | None, rows: Seq[LogitRow]) -> torch.Tensor:
    """All rows together, with nothing read back unless a request edits candidate logits, or truncates."""
    x = logits.to(torch.float32, copy=True)  # [M, C]
    apart = [is_truncated(row) for row in rows]
    for i, row in enumerate(rows):
        own = None if ids is None else ids[i]
        if apart[i]:
            x[i] = truncated_there(x[i], own, row)
        elif is_edited(row):
            edit(Cells(x[i], own, torch), row)
    factors = [1.0 if is_greedy(row) or apart[i] else float(_factor(row)) for i, row in enumerate(rows)]
    x *= torch.tensor(factors).to(x.device)[:, None]
    chosen = [i for i, row in enumerate(rows) if is_filtered(row) and not apart[i]]
    if chosen:
        part = x[chosen]
        t = thresholds(part, [_filter(rows[i]) for i in chosen])
        x[chosen] = part.masked_fill(~(part >= t[:, None]), -torch.inf)
    return x


def _factor(row: LogitRow) -> np.float32:
    return np.float32(1.0 / row.params.temperature)


def _filter(row: LogitRow) -> Filter:
    return Filter(row.params.top_k, mass_kept(row.params.top_p), row.params.min_p)


def mass_kept(top_p: float) -> float:
    """The mass that top_p keeps. 0 stands for the most likely token alone: any mass that it has by itself."""
    return max(top_p, LEAST_MASS)


def is_edited(row: LogitRow) -> bool:
    """Whether more than temperature and filters shapes this row."""
    return row.mask is not None or not is_only_masked(row)


def is_only_masked(row: LogitRow) -> bool:
    """Whether nothing but a constraint, temperature and filters shapes this row."""
    p = row.params
    return not p.edits and not (row.stop_ids and row.history.output_len < p.min_tokens)


def _only_stops(row: LogitRow) -> bool:
    """Whether the constraint has ended: then min_tokens gives way, or nothing could be emitted."""
    if row.mask is None:
        return False
    stops = sum(bool(row.mask[t]) for t in set(row.stop_ids) if t < len(row.mask))
    return stops > 0 and int(np.count_nonzero(row.mask)) == stops


def edit(cells: Cells, row: LogitRow) -> None:
    """Everything that changes single logits, in the documented order."""
    p = row.params
    if row.mask is not None:
        cells.restrict(row.mask)
    if p.allowed_token_ids is not None:
        cells.allow(p.allowed_token_ids)
    if p.bad_token_ids:
        cells.ban(p.bad_token_ids)
    if row.banned is not None:
        cells.ban(row.banned.after(row.history))
    if row.stop_ids and row.history.output_len < p.min_tokens and not _only_stops(row):
        cells.ban(row.stop_ids)
    if p.logit_bias:
        cells.add(list(p.logit_bias), list(p.logit_bias.values()))
    if p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0:
        ids, counts = row.history.table() if p.penalty_last_n < 0 else row.history.window(p.penalty_last_n)
        cells.penalise(ids, p.repetition_penalty)
        cells.add(ids, -(p.presence_penalty * (counts > 0) + p.frequency_penalty * counts))
    if p.dry_multiplier > 0:
        text = np.array(row.history.last(p.dry_penalty_last_n), dtype=np.int64)
        repeated, lost = dry_penalties(text, p, row.breakers)
        cells.add(repeated, -lost)
