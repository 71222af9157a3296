"""Multi-token prediction with K/V of its own: one block beside any target, over the target's whole vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from paceline.errors import PairError
from paceline.models.config import parse_target, read_config
from paceline.models.drafters.mtp import KIND, speculators_name
from paceline.models.target import GraphTarget
from paceline.train.capture import TargetTeacher, load_frozen
from paceline.train.methods.base import CardText
from paceline.train.methods.speculators import SpeculatorsMethod, layer_config, speculators_config
from paceline.train.networks import HEAD, Described, NetworkModule, SteppingModule
from paceline.train.parallel import DraftModule


@dataclass(frozen=True, slots=True)
class Mtp(SpeculatorsMethod):
    name: ClassVar[str] = KIND
    title: ClassVar[str] = "MTP"
    norm: ClassVar[str] = "layers.0.norm.weight"
    head: ClassVar[str] = f"layers.0.{HEAD}"
    card_text: ClassVar[CardText] = CardText(
        "MTP drafter", "speculative-decoding, mtp",
        "It has the layout of `speculators`' own MTP format: compared with its source, not loaded there.",
    )  # fmt: skip

    @classmethod
    def of(cls, given: Mapping[str, Any], draft_tokens: int | None) -> Mtp:
        return cls()

    @staticmethod
    def reads(raw: Mapping[str, Any]) -> bool:
        return raw.get("speculators_model_type") == KIND

    def check(self, target: Path) -> None:
        parse_target(read_config(target))

    def teacher(self, target: Path, device: str = "cpu") -> TargetTeacher:
        return TargetTeacher(load_frozen(target, device))

    def config(self, target: GraphTarget, size: int) -> dict[str, Any]:
        """A block of the target's own widths."""
        layers = {"num_hidden_layers": target.layer_count}  # this format says the target's
        return {
            "architectures": ["MTPDraftModel"], "speculators_model_type": KIND, "speculators_version": "0.9.0",
            "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
            "transformer_layer_config": layer_config(target) | layers,
            "speculators_config": speculators_config(target, KIND),
        }  # fmt: skip

    def module(self, described: Described, shared: Mapping[str, torch.Tensor]) -> NetworkModule:
        if not shared:
            raise PairError(
                f"{described.folder} has tables of its own, which are not trained: use --init scratch"
            )
        return SteppingModule(described, shared)

    def stored_name(self, name: str) -> str:
        return speculators_name(name)

    def describe(self, module: DraftModule) -> str:
        return f"one block over {module.vocab:,} tokens, head of the target"


METHOD = Mtp

__all__ = ["METHOD", "Mtp"]
