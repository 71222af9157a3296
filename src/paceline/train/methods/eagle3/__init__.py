"""EAGLE-3 and 3.1: one layer with K/V of its own, beside hidden states of some layers of any target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from paceline.checkpoints.foreign import drafter_kind
from paceline.errors import PairError, UsageError
from paceline.models.drafters.eagle3 import FLAGS
from paceline.train.capture import TargetTeacher
from paceline.train.methods.base import CardText, Exported, Init, Start
from paceline.train.methods.eagle3.files import (
    fresh_config,
    load_module,
    parse,
    tensors_of,
)
from paceline.train.methods.eagle3.module import Eagle3Module
from paceline.train.methods.eagle3.vocabulary import choose
from paceline.train.methods.speculators import TappingMethod, finished_config, fresh_parameters
from paceline.train.parallel import DraftModule
from paceline.train.windows import Windows

VOCABULARY = 8192


@dataclass(frozen=True, slots=True)
class Eagle3(TappingMethod):
    """`vocabulary` None: VOCABULARY tokens, or all if there are fewer. `taps` None: as EAGLE-3 chooses. `shared`: the
    head is the target's own rows, which the file then lacks; else it is learnt, from those on.
    """

    vocabulary: int | None = None
    taps: tuple[int, ...] | None = None
    flags: tuple[str, ...] = ("norm_before_residual", "fc_norm")
    shared: bool = False

    name: ClassVar[str] = "eagle3"
    card_text: ClassVar[CardText] = CardText(
        "EAGLE-3 drafter", "speculative-decoding, eagle3",
        "It has the layout of `speculators`, which vLLM reads: compared with their source, not loaded there.",
    )  # fmt: skip

    @staticmethod
    def reads(raw: Mapping[str, Any]) -> bool:
        return drafter_kind(raw) == "eagle3"

    def __post_init__(self) -> None:
        if self.vocabulary is not None and self.vocabulary < 2:
            raise UsageError(f"--draft-vocabulary {self.vocabulary} is not possible: give at least 2 tokens")
        if unknown := [flag for flag in self.flags if flag not in FLAGS]:
            raise UsageError(f"flag {unknown[0]!r} is unknown: use some of {', '.join(FLAGS)}")
        if {"norm_before_fc", "fc_norm"} <= {*self.flags}:
            raise UsageError("the flags norm_before_fc and fc_norm exclude each other: give one of them")

    def start(self, teacher: TargetTeacher, train: Windows, init: Init, seed: int) -> Start:
        target = teacher.target
        if isinstance(init, Mapping) or init == "scratch":
            start = self._fresh(teacher, train, init if isinstance(init, Mapping) else None, seed)
        else:
            if self != Eagle3():
                raise UsageError("draft vocabulary, taps, flags and head are those of --init: leave them out")
            start = load_module(Path(init), teacher)
        module = start.module
        assert isinstance(module, Eagle3Module)
        target.tap(module.taps)
        module.to(teacher.device)
        return start

    def _fresh(
        self, teacher: TargetTeacher, train: Windows, given: Mapping[str, Any] | None, seed: int
    ) -> Start:
        target = teacher.target
        size = min(self.vocabulary or VOCABULARY, target.vocab_size)
        raw = dict(given) if given else fresh_config(target, size, self.taps, self.flags)
        config = parse(raw, target)
        ids = None
        if config.draft_vocab < target.vocab_size:
            ids = choose(train, config.draft_vocab, target.vocab_size, target.eos_token_ids)
        if config.layer.hidden_size != target.hidden_size:
            raise PairError(
                f"a new drafter as wide as {config.layer.hidden_size} would need a head and an embedding of its own: "
                f"make it as wide as the target, {target.hidden_size}"
            )
        head = teacher.narrow(ids)
        module = Eagle3Module(config, ids, head if self.shared else None, own=False)
        fresh_parameters(module, seed)
        with torch.no_grad():
            module.norm.weight.copy_(target.norm.float())  # the target's head reads what this norm gives
            if not self.shared:
                module.lm_head.weight.copy_(head)
        stored = target.embedding.data.dtype
        return Start(module, raw, stored if stored.is_floating_point else torch.bfloat16, True)

    def describe(self, module: DraftModule) -> str:
        assert isinstance(module, Eagle3Module)
        return (
            f"reads after layers {', '.join(map(str, module.taps))}, drafts {len(module.head):,} of {module.vocab:,} "
            f"tokens, head {'of its own' if module.shared_head is None else 'of the target'}"
        )

    def files(
        self, module: DraftModule, exported: Exported
    ) -> tuple[dict[str, torch.Tensor], dict[str, Mapping[str, Any]]]:
        assert isinstance(module, Eagle3Module)
        return tensors_of(module), {"config.json": finished_config(exported)}


__all__ = ["Eagle3"]
