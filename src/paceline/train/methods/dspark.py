"""DSpark (arXiv 2607.05147): DFlash's block with a thin head that chains its tokens, for any target.

Rows are scored beside the text's own token before (teacher forcing). A state is a row of the block and what the chain
makes of that token, side by side; the head has W2 beside it. So a score is one product, as the loss wants it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from paceline.errors import PairError
from paceline.models.drafters.dspark import CONFIDENCE, HEADS, KIND, W1, W2, DSparkNet, parse_dspark
from paceline.models.target import GraphTarget
from paceline.ops.differentiable import DifferentiableOps, Rounds, Rows
from paceline.train.methods.base import CardText
from paceline.train.methods.dflash import BLOCK, DFlash
from paceline.train.networks import HEAD, BlockModule, Described, NetworkModule
from paceline.train.parallel import Captured

RANK = 256
WEIGHTS = (f"{W1}.weight", f"{W2}.weight", f"{CONFIDENCE}.weight", f"{CONFIDENCE}.bias")


class DSparkModule(BlockModule):
    """One with a Markov head of the kind `vanilla` and a confidence head. A head of its own is a copy that stays."""

    net: DSparkNet

    @property
    def head(self) -> torch.Tensor:
        """[C, H + rank]"""
        return torch.cat((self.head_rows, self.named(f"{W2}.weight")), 1)

    @property
    def outside(self) -> list[torch.Tensor]:
        return [self.named(name) for name in WEIGHTS]

    def unroll(self, captured: Captured, anchors: torch.Tensor, steps: int) -> list[torch.Tensor]:
        states = super().unroll(captured, anchors, steps)
        at = torch.arange(anchors.shape[0], device=anchors.device)[:, None]
        out = []
        for i, state in enumerate(states):
            ops = self._alone(captured.tokens[at, anchors + i])
            latent = self.net.token(ops).view(*anchors.shape, -1)
            out.append(torch.cat((state, latent.to(state.dtype)), -1))
        return out

    def sureness(self, states: torch.Tensor) -> torch.Tensor:
        """Of states [M, H + rank] the logit [M] that a token drawn from such scores is kept."""
        ops = self._alone(torch.zeros(len(states), 1, dtype=torch.int64, device=states.device))
        hidden, token = states.to(self.dtype).tensor_split([self.net.hidden_size], -1)
        logit: torch.Tensor = self.net.sureness(ops, hidden, token)
        return logit[:, 0]

    def _alone(self, tokens: torch.Tensor) -> DifferentiableOps:
        """A forward over rows [B, A] that see nothing beside themselves."""
        rows = Rows(tokens[..., None], torch.zeros_like(tokens)[..., None], "own")
        return DifferentiableOps(rows, Rounds(self.net.layout, _blind), {}, self.dtype)


def _blind(window: int | None) -> torch.Tensor:
    raise AssertionError("the chain has no attention")


@dataclass(frozen=True, slots=True)
class DSpark(DFlash):
    """As `DFlash`, but the first row of a block drafts, too. `rank`: of the head that chains tokens."""

    rank: int = RANK

    undrafted: ClassVar[int] = 0
    name: ClassVar[str] = KIND
    title: ClassVar[str] = "DSpark"
    card_text: ClassVar[CardText] = CardText(
        "DSpark drafter", "speculative-decoding, dspark",
        "It has the layout of `speculators`, which vLLM reads: compared with their source, not loaded there.",
    )  # fmt: skip
    # arXiv 2607.05147: each token counts exp(-1/4) times the one before it
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType(
        dict(DFlash.defaults)
        | {
            "draft_tokens": BLOCK,
            "objective": "ce-tv",
            "weights": "decay",
            "decay": round(math.exp(-0.25), 4),
        }
    )

    @staticmethod
    def reads(raw: Mapping[str, Any]) -> bool:
        return raw.get("speculators_model_type") == KIND

    def check_init(self, raw: Mapping[str, Any], folder: Path) -> None:
        DFlash.check_init(self, raw, folder)
        config = parse_dspark(raw)
        if config.markov != "vanilla" or not config.rank or not (config.confident and config.reads_token):
            raise PairError(
                f"{folder} has other heads than a vanilla Markov head and a confidence head that reads it, which is not "
                "trained: use --init scratch"
            )

    def config(self, target: GraphTarget, size: int) -> dict[str, Any]:
        raw = DFlash.config(self, target, size)
        heads: dict[str, Any] = dict(zip(HEADS, (self.rank, "vanilla", True, True), strict=True))
        return raw | heads | {
            "architectures": ["DSparkSpeculator"], "speculators_model_type": KIND, "sample_from_anchor": True,
        }  # fmt: skip

    def module(self, described: Described, shared: Mapping[str, torch.Tensor]) -> DSparkModule:
        if any(tap < 0 for tap in described.network.taps):
            raise PairError(
                f"{described.folder} reads the target's last state, which is not trained: use --init scratch"
            )
        return DSparkModule(described, shared, fixed=(HEAD,))

    def begin(self, module: NetworkModule) -> None:
        """The chain says nothing at first, and nothing is known of confidence."""
        for name in WEIGHTS[1:]:
            torch.nn.init.zeros_(module.named(name))


METHOD = DSpark

__all__ = ["METHOD", "DSpark"]
