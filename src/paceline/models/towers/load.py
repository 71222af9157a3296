"""The towers of a model folder, from the same files as its language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoints.loading import Shapes, Tensors, canonical, read_entries
from paceline.models.config import parse_target
from paceline.models.families.gemma4_config import GemmaConfig
from paceline.models.target import GraphTarget
from paceline.models.towers.base import VisionTower
from paceline.models.towers.gemma4_unified import UnifiedVision, parse_unified, published_name, unified_shapes
from paceline.models.towers.gemma4_vision import GemmaVision, parse_vision, vision_shapes

_VISION = ("vision_tower.", "embed_vision.", "vision_embedder.")


def plan_vision(folder: Path, raw: Mapping[str, Any], target: GraphTarget) -> Callable[[], VisionTower] | str:
    """What loads the tower of the model whose config.json says `raw`, or why it sees nothing.

    Names and shapes are compared now, values are read later. Raises LoadError.
    """
    said, config = raw.get("vision_config"), parse_target(raw)
    if not isinstance(said, Mapping) or not isinstance(config, GemmaConfig):
        return "this model reads text only"
    if not any(_tower_name(name) for name in read_entries(folder)):
        return "the files of this model hold no vision tower: get them from the original repository"
    if config.model_type == "gemma4_unified":
        unified = parse_unified(said, target.hidden_size, config.bidirectional)
        return partial(UnifiedVision, unified, _taker(folder, unified_shapes(unified), target.device))
    vision = parse_vision(said, target.hidden_size, config.bidirectional)
    return partial(GemmaVision, vision, _taker(folder, vision_shapes(vision), target.device))


def _taker(folder: Path, shapes: Shapes, device: torch.device) -> Callable[[str], Tensor]:
    tensors = Tensors(folder, shapes, rename=_tower_name)
    return lambda name: tensors.take(name).to(device)


def _tower_name(name: str) -> str | None:
    name = published_name(canonical(name))
    return name if name.startswith(_VISION) else None
