"""The native pass of training over logits: value and gradient of an objective, see native/losses.h."""

from __future__ import annotations

import torch

from paceline.errors import UsageError
from paceline.ops import native
from paceline.ops.binding import address


def hybrid_loss(
    logits: torch.Tensor,
    log_p: torch.Tensor,
    at: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    constants: tuple[float, float, float],
) -> torch.Tensor:
    """Values [n] of an objective that weighs KL against total variation, see native/losses.h; logits [n, C] become their
    gradient. log_p [L, C], all float32; `at`: which row of it each meets [n] and the most likely token of each row [L],
    int64, -1 for none, and weights [n]. `constants`: 1 / temperature, weight of the most likely token, decay.
    """
    row, best, weights = at
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
        constants,
        values.data_ptr(),
    )
    return values
