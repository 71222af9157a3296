"""DFlash 2: DFlash's block with a convolution around each sublayer and codebooks of two tokens in a row, for any target.

How well a token follows the text's own token before it is one product more: a state is a row of the block and its factors
beside it, the head has the successors' codebook beside it. The published objective is not known. Here scores with what
follows are trained as those of any drafter, and scores of the head alone once more, since they choose the candidates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F

from paceline.errors import PairError
from paceline.models.drafters.dflash2 import KIND, SELECTOR, SIZES, DFlash2Net, parse_dflash2
from paceline.models.target import GraphTarget
from paceline.train.methods.base import CardText
from paceline.train.methods.dflash import BLOCK, DFlash
from paceline.train.methods.speculators import given_taps
from paceline.train.networks import BlockModule, Described, NetworkModule
from paceline.train.parallel import Captured

BEFORE, AFTER, FACTORS = (
    f"{SELECTOR}.predecessor_codebook",
    f"{SELECTOR}.successor_codebook",
    f"{SELECTOR}.hidden_projection.weight",
)


class DFlash2Module(BlockModule):
    """One with the target's own head, over all of its tokens."""

    net: DFlash2Net

    @property
    def head(self) -> torch.Tensor:
        """[V, H + rank]"""
        return torch.cat((self.head_rows, self.named(AFTER)), 1)

    @property
    def outside(self) -> list[torch.Tensor]:
        return [self.named(name) for name in (BEFORE, AFTER, FACTORS)]

    def unroll(self, captured: Captured, anchors: torch.Tensor, steps: int) -> list[torch.Tensor]:
        states = super().unroll(captured, anchors, steps)
        at = torch.arange(anchors.shape[0], device=anchors.device)[:, None]
        out = []
        for i, state in enumerate(states):
            row = F.embedding(captured.tokens[at, anchors + i], self.named(BEFORE))
            factors = row * F.linear(state, self.named(FACTORS))
            out.append(torch.cat((state, factors.to(state.dtype)), -1))
        return out

    def beside(self, states: torch.Tensor) -> list[torch.Tensor]:
        alone = torch.arange(states.shape[1], device=states.device) < self.net.hidden_size
        return [states * alone]


@dataclass(frozen=True, slots=True)
class DFlash2(DFlash):
    """As `DFlash`, of all tokens and with the target's head. `rank`: of the codebooks."""

    shared: bool = True
    rank: int = SIZES["selector_rank"]

    name: ClassVar[str] = KIND
    title: ClassVar[str] = "DFlash 2"
    card_text: ClassVar[CardText] = CardText(
        "DFlash 2 drafter", "speculative-decoding, dflash2",
        "It has the layout of `speculators`, which vLLM reads: compared with their source, not loaded there.",
    )  # fmt: skip

    @classmethod
    def of(cls, given: Mapping[str, Any], draft_tokens: int | None) -> Self:
        more = {"layers": given["layers"]} if "layers" in given else {}
        if draft_tokens is not None:
            more["block"] = draft_tokens + cls.undrafted
        return cls(taps=given_taps(given), **more)

    @staticmethod
    def reads(raw: Mapping[str, Any]) -> bool:
        return raw.get("speculators_model_type") == KIND

    def size(self, target: GraphTarget) -> int:
        return target.vocab_size

    def check_init(self, raw: Mapping[str, Any], folder: Path) -> None:
        DFlash.check_init(self, raw, folder)
        config = parse_dflash2(raw)
        if config.multiplier != 1.0 or config.softcap is not None:
            raise PairError(f"{folder} scales or bounds its scores, which is not trained: use --init scratch")

    def config(self, target: GraphTarget, size: int) -> dict[str, Any]:
        group = math.gcd(SIZES["conv_group_size"], target.hidden_size)
        return DFlash.config(self, target, size) | SIZES | {
            "architectures": ["DFlash2DraftModel"], "speculators_model_type": KIND, "selector_rank": self.rank,
            "conv_group_size": group, "selector_top_k": min(SIZES["selector_top_k"], target.vocab_size),
        }  # fmt: skip

    def module(self, described: Described, shared: Mapping[str, torch.Tensor]) -> DFlash2Module:
        if any(tap < 0 for tap in described.network.taps):
            raise PairError(
                f"{described.folder} reads the target's last state, which is not trained: use --init scratch"
            )
        return DFlash2Module(described, shared)

    def begin(self, module: NetworkModule) -> None:
        """Rows are not mixed at first, and nothing is known of what follows what."""
        torch.nn.init.zeros_(module.named(AFTER))
        for name, parameter in module.named_parameters():
            if name.endswith("_conv.base_kernel"):
                with torch.no_grad():
                    parameter.zero_()[:, 0] = 1.0
            elif name.endswith("_conv.kernel_projection.weight"):
                torch.nn.init.zeros_(parameter)


METHOD = DFlash2

__all__ = ["BLOCK", "METHOD", "DFlash2"]
