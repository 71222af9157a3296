"""DFlash: a block of tokens drafted in one forward, beside hidden states of some layers of any target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from paceline.core import MAX_DRAFT_TOKENS
from paceline.errors import PairError, UsageError
from paceline.models.drafters.dflash import KIND, TAPS
from paceline.models.drafters.speculators import windows_of
from paceline.models.target import GraphTarget
from paceline.train.methods.base import CardText
from paceline.train.methods.speculators import (
    TappingMethod,
    check_vocabulary,
    default_taps,
    given_taps,
    layer_config,
    reading,
    speculators_config,
)
from paceline.train.networks import BlockModule, Described
from paceline.train.parallel import DraftModule

LAYERS, BLOCK = 2, 4


@dataclass(frozen=True, slots=True)
class DFlash(TappingMethod):
    """`vocabulary`, `taps`, `shared`: as `Eagle3`. `block`: rows of a draft, the text's last token included."""

    vocabulary: int | None = None
    taps: tuple[int, ...] | None = None
    layers: int = LAYERS
    block: int = BLOCK
    shared: bool = False

    undrafted: ClassVar[int] = 1  # rows of a block before those that draft
    name: ClassVar[str] = KIND
    title: ClassVar[str] = "DFlash"
    card_text: ClassVar[CardText] = CardText(
        "DFlash drafter", "speculative-decoding, dflash",
        "It has the layout of `speculators`, which vLLM reads: compared with their source, not loaded there.",
    )  # fmt: skip

    @classmethod
    def of(cls, given: Mapping[str, Any], draft_tokens: int | None) -> Self:
        more = {"layers": given["layers"]} if "layers" in given else {}
        if draft_tokens is not None:
            more["block"] = max(draft_tokens + cls.undrafted, 2)
        return cls(
            given.get("draft_vocabulary"), given_taps(given), shared=given.get("shared_head", False), **more
        )

    @staticmethod
    def reads(raw: Mapping[str, Any]) -> bool:
        return raw.get("speculators_model_type") == KIND

    def __post_init__(self) -> None:
        check_vocabulary(self.vocabulary)
        if not 2 <= self.block <= MAX_DRAFT_TOKENS + 1 or self.layers < 1:
            raise UsageError(
                f"a block of {self.block} rows in {self.layers} layers is not possible: give --draft-tokens from 1 to "
                f"{MAX_DRAFT_TOKENS} and --layers from 1"
            )

    def check_options(self) -> None:
        if replace(self, block=BLOCK) != type(self)():
            raise UsageError("draft vocabulary, taps, layers and head are those of --init: leave them out")

    def check_init(self, raw: Mapping[str, Any], folder: Path) -> None:
        if any(windows_of(raw)):
            raise PairError(
                f"{folder} has layers with a sliding window, which are not trained: use --init scratch"
            )

    def config(self, target: GraphTarget, size: int) -> dict[str, Any]:
        """The mask is a token that never is a text's last one: the one that ends it."""
        return {
            "architectures": ["DFlashSpeculator"], "speculators_model_type": KIND, "speculators_version": "0.9.0",
            "block_size": self.block, "mask_token_id": min(target.eos_token_ids, default=0),
            TAPS: list(self.taps or default_taps(target.layer_count)), "draft_vocab_size": size,
            "target_hidden_size": target.hidden_size, "tie_word_embeddings": False,
            "transformer_layer_config": layer_config(target) | {"num_hidden_layers": self.layers},
            "speculators_config": speculators_config(target, KIND),
        }  # fmt: skip

    def module(self, described: Described, shared: Mapping[str, torch.Tensor]) -> BlockModule:
        return BlockModule(described, shared)

    def describe(self, module: DraftModule) -> str:
        assert isinstance(module, BlockModule), "it trains these only"
        return f"blocks of {module.net.block}, {len(module.net.layout.layers)} layers, {reading(module)}"


METHOD = DFlash

__all__ = ["METHOD", "DFlash"]
