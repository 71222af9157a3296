"""Gemma 4's assistant: Q-only layers over the target's K/V, so it reads K and V of each kind of layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from paceline.config import EngineConfig
from paceline.drafter_kinds import ASSISTANT_TYPES, usual_training
from paceline.drafters.assistant import MTPDrafter
from paceline.drafters.base import Drafter
from paceline.errors import PairError
from paceline.models.config import parse_target, read_config
from paceline.models.families.gemma4.config import GemmaConfig, parse_assistant
from paceline.models.families.gemma4.target import GemmaTarget
from paceline.models.registry import load_assistant
from paceline.models.target import GraphTarget
from paceline.train.capture import TargetTeacher, load_frozen
from paceline.train.methods.base import CardText, Exported, Init, Start
from paceline.train.methods.gemma_assistant.files import config_of, generation_config, scratch_config
from paceline.train.methods.gemma_assistant.heads import HeadOptions
from paceline.train.methods.gemma_assistant.learning import (
    AssistantModule,
    check_pair,
    load_module,
    new_module,
)
from paceline.train.parallel import DraftModule
from paceline.train.windows import Windows

if TYPE_CHECKING:
    from paceline.train.loop import Hooks, Run


@dataclass(frozen=True, slots=True)
class GemmaAssistant:
    head: HeadOptions = field(default_factory=HeadOptions)

    name: ClassVar[str] = "gemma-assistant"
    card_text: ClassVar[CardText] = CardText(
        "MTP drafter", "speculative-decoding, mtp, gemma4",
        "transformers 5.22 and other Gemma 4 engines load it as a `gemma4_assistant`.",
    )  # fmt: skip
    copies: ClassVar[tuple[str, ...]] = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"anchors": 128})

    @classmethod
    def of(cls, given: Mapping[str, Any], draft_tokens: int | None) -> GemmaAssistant:
        return cls(
            HeadOptions(given.get("head", "keep"), given.get("clusters", 0), given.get("recall", 0.99))
        )

    @staticmethod
    def reads(raw: Mapping[str, Any]) -> bool:
        return raw.get("model_type") in ASSISTANT_TYPES

    def check(self, target: Path) -> None:
        config = parse_target(read_config(target))
        if not isinstance(config, GemmaConfig):
            raise PairError(
                f"{target} is a {config.model_type}, and MTP drafters are trained for Gemma 4 only: use "
                f"--method {usual_training('')}"
            )
        owners = {layer.kind for layer in config.layers if not layer.shared}
        if owners != {"sliding_attention", "full_attention"}:
            raise PairError(
                f"{target} has K/V of {', '.join(sorted(owners))} only, and an MTP drafter reads sliding and "
                f"full attention: this target has no such drafter, use --method {usual_training('')}"
            )

    def teacher(self, target: Path, device: str = "cpu") -> TargetTeacher:
        self.check(target)
        return TargetTeacher(load_frozen(target, device), kv=True)

    def start(self, teacher: TargetTeacher, train: Windows, init: Init, seed: int) -> Start:
        target = teacher.target
        if isinstance(init, Mapping) or init == "scratch":
            config = dict(init) if isinstance(init, Mapping) else scratch_config(read_config(target.path))
            table = target.embedding.data
            known = table.dtype.is_floating_point
            module = new_module(parse_assistant(config), seed, table.float() if known else None)
            start = Start(module, config, table.dtype if known else torch.bfloat16, True)
        else:
            start = Start(*load_module(Path(init)), False)
        assert isinstance(start.module, AssistantModule)
        assert isinstance(target, GemmaTarget), "check refuses others"
        check_pair(start.module.config, target.config)
        start.module.to(teacher.device)
        return start

    def describe(self, module: DraftModule) -> str:
        assert isinstance(module, AssistantModule)
        clusters = self.head.wanted(module.config)
        return f"head {f'of {clusters} clusters' if clusters else 'dense'}"

    def last_batches(self, module: DraftModule) -> int:
        assert isinstance(module, AssistantModule)
        return self.head.batches if self.head.wanted(module.config) else 0

    def finish(self, run: Run, hooks: Hooks) -> tuple[DraftModule, str]:
        from paceline.train.methods.gemma_assistant.fitting import rebuild_head

        module, head = rebuild_head(run, self.head, hooks.phase)
        if head is None:
            return module, ""
        clusters = head.centroids.shape[0]
        return module, f"head: {clusters} clusters, {head.top_clusters} looked at, recall {head.recall:.4f}"

    def files(
        self, module: DraftModule, exported: Exported
    ) -> tuple[dict[str, torch.Tensor], dict[str, Mapping[str, Any]]]:
        assert isinstance(module, AssistantModule)
        configs: dict[str, Mapping[str, Any]] = {
            "config.json": config_of(exported.config, module.config, exported.dtype),
            "generation_config.json": generation_config(exported),
        }
        return dict(module.state_dict()), configs

    def drafter(self, name: str, folder: Path, target: GraphTarget) -> Callable[[EngineConfig], Drafter]:
        net = load_assistant(folder, target)
        return lambda config: MTPDrafter(net)


METHOD = GemmaAssistant

__all__ = ["METHOD", "GemmaAssistant", "HeadOptions"]
