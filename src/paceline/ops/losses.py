"""The native pass of training over logits: value and gradient of an objective, see native/losses.h."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.errors import UsageError
from paceline.ops import native
from paceline.ops.binding import address


@dataclass(frozen=True, slots=True)
class Hybrid:
    """The constants of an objective that weighs KL against total variation."""

    temperature: float
    greedy: float  # weight of the most likely token
    decay: float  # of the weight of KL


def hybrid_loss(
    logits: torch.Tensor,
    log_p: torch.Tensor,
    row: torch.Tensor,
    best: torch.Tensor,
    weights: torch.Tensor,
    shape: Hybrid,
) -> torch.Tensor:
    """Values [n] of an objective that weighs KL against total variation, see native/losses.h; logits [n, C] become their
    gradient. log_p [L, C], all float32; `row`: which of them each meets [n]; `best`: the most likely token of each [L],
    -1 for none, both int64; weights [n].
    """
    count, columns = logits.shape
    values = torch.empty(count)
    if not count:
        return values
    if log_p.shape[1] != columns or not 0 <= int(row.min()) <= int(row.max()) < len(log_p):
        raise UsageError(
            f"logits {tuple(logits.shape)} do not meet distributions {tuple(log_p.shape)} in rows {row}"
        )
    if len(best) != len(log_p) or int(best.max()) >= columns:
        raise UsageError(f"the most likely tokens are {best}, of {len(log_p)} rows of {columns} columns")
    native._extension().hybrid_loss(
        address(logits, torch.float32, count, "logits"),
        address(log_p, torch.float32, 1, "log_p"),
        (count, columns),
        (
            address(row, torch.int64, count, "row"),
            address(best, torch.int64, len(log_p), "best"),
            address(weights, torch.float32, count, "weights"),
        ),
        (1.0 / shape.temperature, shape.greedy, shape.decay),
        values.data_ptr(),
    )
    return values
