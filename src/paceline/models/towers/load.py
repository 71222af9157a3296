"""The towers of a model folder, from the same files as its language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.checkpoints.loading import Shapes, Tensors, canonical, read_entries
from paceline.models.config import parse_target
from paceline.models.families.gemma4_config import GemmaConfig
from paceline.models.towers.base import AudioTower, VisionTower
from paceline.models.towers.gemma4_audio import GemmaAudio, audio_shapes, parse_audio
from paceline.models.towers.gemma4_unified import (
    UnifiedAudio,
    UnifiedVision,
    parse_unified,
    parse_unified_audio,
    published_name,
    unified_shapes,
)
from paceline.models.towers.gemma4_vision import GemmaVision, parse_vision, vision_shapes

_VISION = ("vision_tower.", "embed_vision.", "vision_embedder.")
_AUDIO = ("audio_tower.", "embed_audio.")


class Host(Protocol):
    """What of a language model its towers have to fit."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...


def plan_vision(folder: Path, raw: Mapping[str, Any], target: Host) -> Callable[[], VisionTower] | str:
    """What loads the tower of the model whose config.json says `raw`, or why it sees nothing.

    Names and shapes are compared now, values are read later. Raises LoadError.
    """
    said, config = raw.get("vision_config"), parse_target(raw)
    if not isinstance(said, Mapping) or not isinstance(config, GemmaConfig):
        return "this model reads text only"
    if not any(_named(_VISION, name) for name in read_entries(folder)):
        return "the files of this model hold no vision tower: get them from the original repository"
    if config.model_type == "gemma4_unified":
        unified = parse_unified(said, target.hidden_size, config.bidirectional)
        return partial(UnifiedVision, unified, _taker(folder, unified_shapes(unified), target.device))
    vision = parse_vision(said, target.hidden_size, config.bidirectional)
    return partial(GemmaVision, vision, _taker(folder, vision_shapes(vision), target.device))


def plan_audio(folder: Path, raw: Mapping[str, Any], target: Host) -> Callable[[], AudioTower] | str:
    """As `plan_vision`, of what hears."""
    said, config = raw.get("audio_config"), parse_target(raw)
    if not isinstance(said, Mapping) or not isinstance(config, GemmaConfig):
        return "this model does not hear: use Gemma 4 E2B, E4B or 12B for sound"
    if not any(_named(_AUDIO, name) for name in read_entries(folder)):
        return "the files of this model hold no audio tower: get them from the original repository"
    if config.model_type == "gemma4_unified":
        unified = parse_unified_audio(said, target.hidden_size)
        name: Shapes = {"embed_audio.embedding_projection.weight": (unified.out, unified.samples)}
        return partial(UnifiedAudio, unified, _taker(folder, name, target.device, _AUDIO))
    audio = parse_audio(said, target.hidden_size)
    return partial(GemmaAudio, audio, _taker(folder, audio_shapes(audio), target.device, _AUDIO))


def _taker(
    folder: Path, shapes: Shapes, device: torch.device, begins: tuple[str, ...] = _VISION
) -> Callable[[str], Tensor]:
    tensors = Tensors(folder, shapes, rename=partial(_named, begins))
    return lambda name: tensors.take(name).to(device)


def _named(begins: tuple[str, ...], name: str) -> str | None:
    """A tensor's published name, if it begins in one of these ways."""
    name = published_name(canonical(name))
    return name if name.startswith(begins) else None
