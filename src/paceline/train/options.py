"""What a training run is made of: one frozen tree, checked once."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Literal

from paceline.core import MAX_DRAFT_TOKENS
from paceline.errors import UsageError
from paceline.train.objectives import WEIGHTINGS, Weighting, find_objective


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """One update sees batch * accumulate windows of `length` tokens."""

    objective: str = "hybrid"
    weights: Weighting = "decay"
    decay: float = 0.8  # of the weights "decay"
    draft_tokens: int = 4  # unrolled steps
    steps: int = 1000  # updates
    batch: int = 8  # windows held in memory at once
    accumulate: int = 1  # batches per update
    length: int = 512  # tokens per window
    anchors: int = 0  # draft rounds per window, 0 = from every position
    optimizer: Literal["adamw", "muon"] = (
        "adamw"  # muon: of matrices; the head, norms and vectors have AdamW with it, too
    )
    lr: float = 1e-3  # of muon usually 0.02; what has AdamW beside it learns at a tenth
    warmup: float = 0.04  # share of the steps
    weight_decay: float = 0.0
    clip: float = 1.0  # of the gradient's norm
    held_share: float = 0.05
    eval_every: int = 100
    eval_windows: int = 32
    patience: int = 0  # evaluations without a better result before it stops, 0 = never
    save_every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        find_objective(self.objective)
        if self.weights not in WEIGHTINGS:
            raise UsageError(
                f"position weights {self.weights!r} are unknown: use one of {', '.join(WEIGHTINGS)}"
            )
        if self.optimizer not in ("adamw", "muon"):
            raise UsageError(f"optimizer {self.optimizer!r} is unknown: use adamw or muon")
        low_one = ("draft_tokens", "steps", "batch", "accumulate", "eval_every", "eval_windows", "save_every")
        for name in low_one:
            _check(name, dataclasses.asdict(self)[name], 1)
        for name in ("anchors", "patience", "seed"):
            _check(name, dataclasses.asdict(self)[name], 0)
        if self.draft_tokens > MAX_DRAFT_TOKENS:
            raise UsageError(f"draft_tokens={self.draft_tokens} is more than {MAX_DRAFT_TOKENS}: lower it")
        if self.length < self.draft_tokens + 2:
            raise UsageError(
                f"length={self.length} leaves no room for a round: give at least {self.draft_tokens + 2}"
            )
        if (
            not 0 < self.lr < 10
            or not 0 <= self.warmup < 1
            or not self.clip > 0
            or not 0 < self.held_share < 1
        ):
            raise UsageError("lr must be in (0, 10), warmup in [0, 1), clip above 0, held_share in (0, 1)")

    @property
    def fingerprint(self) -> str:
        """Of everything that a resumed run must not change."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise UsageError(f"{name}={value!r} is not possible: give a whole number from {low}")
