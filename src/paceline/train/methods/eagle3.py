"""EAGLE-3 and 3.1: one layer with K/V of its own, beside hidden states of some layers of any target.

Source of truth for fields and names of the format: speculators 0.9.0, models/eagle3, and vLLM's models/llama_eagle3.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from paceline.checkpoints.foreign import drafter_kind
from paceline.errors import UsageError
from paceline.models.drafters.eagle3 import FLAGS, KIND, TAPS
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
from paceline.train.networks import Described, NetworkModule, SteppingModule
from paceline.train.parallel import DraftModule


@dataclass(frozen=True, slots=True)
class Eagle3(TappingMethod):
    """`vocabulary` None: VOCABULARY tokens, or all if there are fewer. `taps` None: as EAGLE-3 chooses. `shared`: the
    head is the target's own rows, which the file then lacks; else it is learnt, from those on.
    """

    vocabulary: int | None = None
    taps: tuple[int, ...] | None = None
    flags: tuple[str, ...] = ("norm_before_residual", "fc_norm")
    shared: bool = False

    name: ClassVar[str] = KIND
    title: ClassVar[str] = "EAGLE-3"
    card_text: ClassVar[CardText] = CardText(
        "EAGLE-3 drafter", "speculative-decoding, eagle3",
        "It has the layout of `speculators`, which vLLM reads: compared with their source, not loaded there.",
    )  # fmt: skip

    @classmethod
    def of(cls, given: Mapping[str, Any], draft_tokens: int | None) -> Eagle3:
        listed = given.get("flags")
        flags = {} if listed is None else {"flags": tuple(x.strip() for x in listed.split(",") if x.strip())}
        return cls(
            given.get("draft_vocabulary"), given_taps(given), shared=given.get("shared_head", False), **flags
        )

    @staticmethod
    def reads(raw: Mapping[str, Any]) -> bool:
        return drafter_kind(raw) == KIND

    def __post_init__(self) -> None:
        check_vocabulary(self.vocabulary)
        if unknown := [flag for flag in self.flags if flag not in FLAGS]:
            raise UsageError(f"flag {unknown[0]!r} is unknown: use some of {', '.join(FLAGS)}")
        if {"norm_before_fc", "fc_norm"} <= {*self.flags}:
            raise UsageError("the flags norm_before_fc and fc_norm exclude each other: give one of them")

    def check_options(self) -> None:
        if self != Eagle3():
            raise UsageError("draft vocabulary, taps, flags and head are those of --init: leave them out")

    def config(self, target: GraphTarget, size: int) -> dict[str, Any]:
        return {
            "architectures": ["Eagle3Speculator"], "speculators_model_type": KIND, "speculators_version": "0.9.0",
            "draft_vocab_size": size, "target_hidden_size": target.hidden_size,
            TAPS: list(self.taps or default_taps(target.layer_count)), **{flag: flag in self.flags for flag in FLAGS},
            "embed_requires_grad": False, "tie_word_embeddings": False, "transformer_layer_config": layer_config(target),
            "speculators_config": speculators_config(target, KIND),
        }  # fmt: skip

    def module(self, described: Described, shared: Mapping[str, torch.Tensor]) -> NetworkModule:
        return SteppingModule(described, shared)

    def describe(self, module: DraftModule) -> str:
        assert isinstance(module, NetworkModule), "it trains these only"
        return reading(module)


METHOD = Eagle3

__all__ = ["METHOD", "Eagle3"]
