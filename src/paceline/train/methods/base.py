"""What a method of training is: all that differs between kinds of drafters. The loop knows nothing else of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from paceline.config import EngineConfig
from paceline.drafters.base import Drafter
from paceline.models.target import GraphTarget
from paceline.train.capture import TargetTeacher
from paceline.train.parallel import DraftModule
from paceline.train.windows import Windows

if TYPE_CHECKING:
    from paceline.train.loop import Hooks, Run

TORCH_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
Init = str | Path | Mapping[str, Any]  # "scratch", a drafter's folder, or its config.json


@dataclass(slots=True)
class Start:
    """A module to train, with what is needed to write it down again."""

    module: DraftModule
    config: dict[str, Any]
    dtype: torch.dtype
    scratch: bool


@dataclass(frozen=True, slots=True)
class CardText:
    """What a model card says of a kind of drafter."""

    title: str
    tags: str
    loads: str  # who can load it


@dataclass(slots=True)
class Exported:
    """What goes into the folder beside the weights."""

    config: Mapping[str, Any]  # the drafter's config.json, as it began
    draft_tokens: int
    dtype: torch.dtype
    target: Path | None = None  # where the method's `copies` come from
    calibration: Mapping[str, Any] | None = None
    texts: dict[str, str] = field(default_factory=dict)  # more files, e.g. the model card


class Method(Protocol):
    """Its own options are fields."""

    name: ClassVar[str]
    card_text: ClassVar[CardText]
    copies: ClassVar[tuple[str, ...]]  # files of the target's folder that belong into the drafter's
    defaults: ClassVar[Mapping[str, Any]]  # of TrainOptions, where they are others

    @classmethod
    def of(cls, given: Mapping[str, Any], draft_tokens: int | None) -> Method:
        """With the options of the command that were given, those of its `Training`. Raises UsageError."""
        ...

    @staticmethod
    def reads(raw: Mapping[str, Any]) -> bool:
        """Whether a config.json is that of such a drafter."""
        ...

    def check(self, target: Path) -> None:
        """Raise PairError if a target cannot have such a drafter, by its config alone."""
        ...

    def teacher(self, target: Path, device: str) -> TargetTeacher:
        """The target, set up to give what the module reads. Raises as `check`, and LoadError."""
        ...

    def start(self, teacher: TargetTeacher, train: Windows, init: Init, seed: int) -> Start:
        """The module to begin with, fresh or from a folder, in float32. Raises UsageError and LoadError."""
        ...

    def describe(self, module: DraftModule) -> str:
        """What it will be, in a few words. Raises UsageError for what cannot be, before the work and not after it."""
        ...

    def last_batches(self, module: DraftModule) -> int:
        """How many batches `finish` runs over."""
        ...

    def finish(self, run: Run, hooks: Hooks) -> tuple[DraftModule, str]:
        """(the trained module as it will run, what to say of that in the card)"""
        ...

    def files(
        self, module: DraftModule, exported: Exported
    ) -> tuple[dict[str, torch.Tensor], dict[str, Mapping[str, Any]]]:
        """(tensors by name, JSON files by name) of the finished drafter."""
        ...

    def drafter(self, name: str, folder: Path, target: GraphTarget) -> Callable[[EngineConfig], Drafter]:
        """Load an exported drafter beside a target that has run nothing yet; it is made once the target has its cache."""
        ...
