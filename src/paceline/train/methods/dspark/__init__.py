"""DSpark (arXiv 2607.05147): DFlash's block with a thin head that chains its tokens, for any target."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from paceline.checkpoints.loading import Tensors
from paceline.errors import PairError
from paceline.models.config import read_config
from paceline.models.drafters.dflash import dflash_shapes
from paceline.models.drafters.dspark import HEADS, KIND, DSparkConfig, head_shapes, parse_dspark
from paceline.models.registry import load_network
from paceline.models.target import GraphTarget
from paceline.train.capture import TargetTeacher
from paceline.train.methods.base import CardText, Start
from paceline.train.methods.dflash import BLOCK, DFlash, mask_row
from paceline.train.methods.dspark.module import DSparkModule
from paceline.train.parallel import DraftModule

RANK = 256


@dataclass(frozen=True, slots=True)
class DSpark(DFlash):
    """As `DFlash`, but the first row of a block drafts, too. `rank`: of the head that chains tokens."""

    rank: int = RANK

    name: ClassVar[str] = KIND
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

    def _config(self, target: GraphTarget, size: int) -> dict[str, Any]:
        raw = DFlash._config(self, target, size)
        heads: dict[str, Any] = dict(zip(HEADS, (self.rank, "vanilla", True, True), strict=True))
        return raw | heads | {
            "architectures": ["DSparkSpeculator"], "speculators_model_type": KIND, "sample_from_anchor": True,
        }  # fmt: skip

    def module(
        self, raw: Mapping[str, Any], ids: torch.Tensor | None, head: torch.Tensor | None, target: GraphTarget
    ) -> DSparkModule:
        config = parse_dspark(raw)
        module = DSparkModule(config, ids, head, mask_row(target, config.block.mask, 1.0))
        module.unscaled = 1.0 / target.embedding_scale
        return module

    def begin(self, module: DraftModule) -> None:
        """The chain says nothing at first, and nothing is known of confidence."""
        assert isinstance(module, DSparkModule), "it trains these only"
        torch.nn.init.zeros_(module.markov_head.markov_w2.weight)
        torch.nn.init.zeros_(module.confidence_head.proj.weight)
        torch.nn.init.zeros_(module.confidence_head.proj.bias)

    def load(self, folder: Path, teacher: TargetTeacher) -> Start:
        raw, target = read_config(folder), teacher.target
        if not DSpark.reads(raw):
            raise PairError(
                f"{folder} is no DSpark drafter in speculators format: give one, or --init scratch"
            )
        config = parse_dspark(raw)
        ids = load_network(folder, target).ids  # which checks the rest
        _check_trainable(folder, config)
        found = Tensors(folder, dflash_shapes(config.block, folder) | head_shapes(config))
        if found.scales or "embed_tokens.weight" in found.entries or config.block.layers.biases:
            raise PairError(
                f"{folder} is quantized, or has a table or biases of its own, which are not trained: use --init scratch"
            )
        tensors = {name: found.take(name) for name in [*found.entries] if name not in ("d2t", "t2d")}
        module = self.module(raw, ids, None if "lm_head.weight" in tensors else teacher.narrow(ids), target)
        known = {n: t for n, t in module.state_dict().items() if n == "d2t"}
        module.load_state_dict({n: t.float() for n, t in tensors.items()} | known)
        return Start(module, raw, tensors["fc.weight"].dtype, False)


def _check_trainable(folder: Path, config: DSparkConfig) -> None:
    """Raise PairError for what is drafted with, but not trained."""
    if any(config.block.windows) or -1 in config.block.taps:
        what = "layers with a sliding window, or reads the target's last state"
    elif config.markov != "vanilla" or not config.rank or not (config.confident and config.reads_token):
        what = "other heads than a vanilla Markov head and a confidence head that reads it"
    else:
        return
    raise PairError(f"{folder} has {what}, which is not trained: use --init scratch")


__all__ = ["DSpark"]
