"""Multi-token prediction with K/V of its own: one block beside any target, over the target's whole vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from paceline.checkpoints.loading import read_entries
from paceline.errors import PairError
from paceline.models.config import parse_target, read_config
from paceline.models.drafters.mtp import parse_mtp
from paceline.models.registry import load_network
from paceline.models.target import GraphTarget
from paceline.train.capture import TargetTeacher, load_frozen
from paceline.train.methods.base import CardText, Exported, Init, Start
from paceline.train.methods.mtp.module import MtpModule
from paceline.train.methods.speculators import (
    SpeculatorsMethod,
    finished_config,
    fresh_parameters,
    layer_config,
    speculators_config,
    tensors_in,
)
from paceline.train.parallel import DraftModule
from paceline.train.windows import Windows


@dataclass(frozen=True, slots=True)
class Mtp(SpeculatorsMethod):
    name: ClassVar[str] = "mtp"
    card_text: ClassVar[CardText] = CardText(
        "MTP drafter", "speculative-decoding, mtp",
        "It has the layout of `speculators`' own MTP format: compared with its source, not loaded there.",
    )  # fmt: skip

    @staticmethod
    def reads(raw: Mapping[str, Any]) -> bool:
        return raw.get("speculators_model_type") == "mtp"

    def check(self, target: Path) -> None:
        parse_target(read_config(target))

    def teacher(self, target: Path, device: str = "cpu") -> TargetTeacher:
        return TargetTeacher(load_frozen(target, device))

    def start(self, teacher: TargetTeacher, train: Windows, init: Init, seed: int) -> Start:
        target, given = teacher.target, init if isinstance(init, Mapping) else None
        scratch = init == "scratch" or given is not None
        if not scratch and not self.reads(read_config(Path(str(init)))):
            raise PairError(f"{init} is no MTP drafter in speculators format: give one, or --init scratch")
        raw = dict(given or (_fresh(target) if scratch else read_config(Path(str(init)))))
        stored = target.embedding.data.dtype
        dtype = stored if stored.is_floating_point else torch.bfloat16
        module = MtpModule(parse_mtp(raw), teacher.narrow(None))
        if scratch:
            fresh_parameters(module, seed)
            module.block.final_layernorm.weight.data.copy_(target.norm.float())
        else:
            folder = Path(str(init))
            load_network(folder, target)  # which checks that it fits
            tensors = tensors_in(folder, [entry.name for entry in read_entries(folder).values()])
            if set(tensors) != set(module.state_dict()):
                raise PairError(f"{folder} has tables of its own, which are not trained: use --init scratch")
            module.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
            dtype = tensors["mtp_layers.0.input_proj.weight"].dtype
        module.to(teacher.device)
        return Start(module, raw, dtype, scratch)

    def describe(self, module: DraftModule) -> str:
        return f"one block over {module.vocab:,} tokens, head of the target"

    def files(
        self, module: DraftModule, exported: Exported
    ) -> tuple[dict[str, torch.Tensor], dict[str, Mapping[str, Any]]]:
        return dict(module.state_dict()), {"config.json": finished_config(exported)}


def _fresh(target: GraphTarget) -> dict[str, Any]:
    """config.json of a new drafter: a block of the target's own widths."""
    layers = {"num_hidden_layers": target.layer_count}  # this format says the target's
    return {
        "architectures": ["MTPDraftModel"], "speculators_model_type": "mtp", "speculators_version": "0.9.0",
        "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
        "transformer_layer_config": layer_config(target) | layers,
        "speculators_config": speculators_config(target, "mtp"),
    }  # fmt: skip


__all__ = ["Mtp"]
