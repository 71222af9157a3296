"""EAGLE-3 checkpoints in `speculators` format: what a fresh one is, reading one to go on from, and the finished one.

Source of truth for names and fields: speculators 0.9.0, models/eagle3, and vLLM 0.33's models/llama_eagle3.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoints.foreign import drafter_kind
from paceline.checkpoints.loading import Tensors
from paceline.errors import ConfigError, PairError
from paceline.models.config import read_config
from paceline.models.drafters.eagle3 import (
    FLAGS,
    TAPS,
    Eagle3Config,
    check_eagle3,
    eagle3_shapes,
    parse_eagle3,
)
from paceline.models.registry import load_network
from paceline.models.target import GraphTarget
from paceline.train.capture import TargetTeacher
from paceline.train.methods.base import Start
from paceline.train.methods.eagle3.module import Eagle3Module
from paceline.train.methods.speculators import default_taps, layer_config, speculators_config


def fresh_config(
    target: GraphTarget, size: int, taps: tuple[int, ...] | None, flags: tuple[str, ...]
) -> dict[str, Any]:
    """config.json of a new drafter of `size` tokens: one layer of the target's own widths."""
    return {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
        "draft_vocab_size": size, "target_hidden_size": target.hidden_size,
        TAPS: list(taps or default_taps(target.layer_count)), **{flag: flag in flags for flag in FLAGS},
        "embed_requires_grad": False, "tie_word_embeddings": False, "transformer_layer_config": layer_config(target),
        "speculators_config": speculators_config(target, "eagle3"),
    }  # fmt: skip


def parse(raw: Mapping[str, Any], target: GraphTarget, where: str = "the new drafter") -> Eagle3Config:
    """A drafter's config, checked against the target, its taps named. Raises ConfigError and PairError."""
    config = parse_eagle3(raw)
    check_eagle3(config, target, target.layer_count, (where, str(target.path)))
    if config.layer.biases:
        raise ConfigError(f"{where}: a layer with biases is not trained: use --init scratch")
    return replace(config, taps=config.taps_of(target.layer_count))


def load_module(folder: Path, teacher: TargetTeacher) -> Start:
    """A drafter's folder as a module in float32. Raises LoadError."""
    raw, target = read_config(folder), teacher.target
    if drafter_kind(raw) != "eagle3" or "transformer_layer_config" not in raw:
        raise PairError(f"{folder} is no EAGLE-3 drafter in speculators format: give one, or --init scratch")
    config = parse(raw, target, str(folder))
    assert config.taps is not None
    ids = load_network(folder, target).ids  # which checks the rest
    found = Tensors(folder, eagle3_shapes(config, len(config.taps), folder))
    if found.scales:
        raise PairError(
            f"{folder} is quantized, which cannot be trained: give the drafter that it was made of"
        )
    tensors = {name: found.take(name) for name in [*found.entries] if name not in ("d2t", "t2d")}
    head = teacher.narrow(ids)
    module = Eagle3Module(
        config, ids, None if "lm_head.weight" in tensors else head, "embed_tokens.weight" in tensors
    )
    module.load_state_dict({n: t.float() for n, t in tensors.items()} | _mapping(module))
    return Start(module, raw, tensors["fc.weight"].dtype, False)


def _mapping(module: Eagle3Module) -> dict[str, torch.Tensor]:
    return {n: t for n, t in module.state_dict().items() if n == "d2t"}


def tensors_of(module: Eagle3Module) -> dict[str, torch.Tensor]:
    """Tensors by their names in the format: `d2t` holds what is added to a row's number, `t2d` marks what is drafted."""
    tensors = dict(module.state_dict())
    if module.ids is not None:
        mask = torch.zeros(module.vocab, dtype=torch.bool, device=module.ids.device)
        tensors["t2d"] = mask.index_fill_(0, module.ids, True)
    return tensors
