"""The towers of a model folder, from the same files as its language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from paceline.checkpoints.gguf.projector import Projector
from paceline.checkpoints.loading import Shapes, Tensors, canonical, read_entries
from paceline.models.config import parse_target
from paceline.models.families.gemma4.config import GemmaConfig
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
from paceline.models.towers.parts import Take

_VISION = ("vision_tower.", "embed_vision.", "vision_embedder.")
_AUDIO = ("audio_tower.", "embed_audio.")
_SOUND = "embed_audio.embedding_projection.weight"


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
    section, config = raw.get("vision_config"), parse_target(raw)
    if not isinstance(section, Mapping) or not isinstance(config, GemmaConfig):
        return "this model reads text only"
    if not any(_named(_VISION, name) for name in read_entries(folder)):
        return "the files of this model hold no vision tower: get them from the original repository"
    unified = config.model_type == "gemma4_unified"
    take = partial(_taker, folder, begins=_VISION, device=target.device)
    return _vision(section, target.hidden_size, config.bidirectional, unified, take)


def _vision(
    section: Mapping[str, Any],
    hidden_size: int,
    together: bool,
    unified: bool,
    taker: Callable[[Shapes], Take],
) -> Callable[[], VisionTower]:
    if unified:
        config = parse_unified(section, hidden_size, together)
        return partial(UnifiedVision, config, taker(unified_shapes(config)))
    vision = parse_vision(section, hidden_size, together)
    return partial(GemmaVision, vision, taker(vision_shapes(vision)))


def _audio(
    section: Mapping[str, Any], hidden_size: int, unified: bool, taker: Callable[[Shapes], Take]
) -> Callable[[], AudioTower]:
    if unified:
        config = parse_unified_audio(section, hidden_size)
        return partial(UnifiedAudio, config, taker({_SOUND: (config.out, config.samples)}))
    audio = parse_audio(section, hidden_size)
    return partial(GemmaAudio, audio, taker(audio_shapes(audio)))


def stored_towers(folder: Path, raw: Mapping[str, Any]) -> dict[str, tuple[Shapes, Take]]:
    """Names, shapes and values of the towers in a model folder, by part. Raises LoadError."""
    config, towers = parse_target(raw), dict[str, tuple[Shapes, Take]]()
    names = read_entries(folder)
    if not isinstance(config, GemmaConfig):
        return towers

    def keep(part: str, begins: tuple[str, ...], shapes: Shapes) -> Take:
        take = _taker(folder, shapes, device=torch.device("cpu"), begins=begins)
        towers[part] = shapes, take
        return take

    unified = config.model_type == "gemma4_unified"
    sections = {part: raw.get(f"{part}_config") for part in ("vision", "audio")}
    if isinstance(sections["vision"], Mapping) and any(_named(_VISION, name) for name in names):
        taker = partial(keep, "vision", _VISION)
        _vision(sections["vision"], config.hidden_size, config.bidirectional, unified, taker)
    if isinstance(sections["audio"], Mapping) and any(_named(_AUDIO, name) for name in names):
        _audio(sections["audio"], config.hidden_size, unified, partial(keep, "audio", _AUDIO))
    return towers


def plan_projector(
    file: Projector, raw: Mapping[str, Any], target: Host
) -> tuple[Callable[[], VisionTower] | str, Callable[[], AudioTower] | str]:
    """As `plan_vision` and `plan_audio`, of a GGUF model whose towers are in a file of their own."""
    config = parse_target(raw)
    if not isinstance(config, GemmaConfig):
        return "this model reads text only", "this model reads text only"
    together = (
        not config.ple_size
    )  # the file does not say it: models without per-layer embeddings see both ways
    take = partial(_projected, file, target.device)
    hidden, unified = target.hidden_size, file.unified
    vision = (
        _vision(file.vision, hidden, together, unified, take) if file.vision else _without(file, "vision")
    )
    audio = _audio(file.audio, hidden, unified, take) if file.audio else _without(file, "audio")
    return vision, audio


def projected_shapes(file: Projector, raw: Mapping[str, Any]) -> Shapes:
    """Names and shapes of all tensors of an mmproj file, as a checkpoint has them. Raises LoadError."""
    config, all_shapes = parse_target(raw), Shapes()

    def keep(shapes: Shapes) -> Take:
        all_shapes.update(shapes)
        return lambda name: file.tensor(name, shapes[name])

    if file.vision:
        _vision(file.vision, config.hidden_size, False, file.unified, keep)
    if file.audio:
        _audio(file.audio, config.hidden_size, file.unified, keep)
    return all_shapes


def _without(file: Projector, part: str) -> str:
    return f"{file.path.name} holds no {part} tower: give one that does with --mmproj"


def _projected(file: Projector, device: torch.device, shapes: Shapes) -> Take:
    """Raises WeightsError for a tensor that is missing or of another shape; values are read later."""
    for name, shape in shapes.items():
        file.check(name, shape)
    return lambda name: file.tensor(name, shapes[name]).to(device)


def plan_audio(folder: Path, raw: Mapping[str, Any], target: Host) -> Callable[[], AudioTower] | str:
    """As `plan_vision`, of what hears."""
    section, config = raw.get("audio_config"), parse_target(raw)
    if not isinstance(section, Mapping) or not isinstance(config, GemmaConfig):
        return "this model does not hear: use Gemma 4 E2B, E4B or 12B for sound"
    if not any(_named(_AUDIO, name) for name in read_entries(folder)):
        return "the files of this model hold no audio tower: get them from the original repository"
    take = partial(_taker, folder, begins=_AUDIO, device=target.device)
    return _audio(section, target.hidden_size, config.model_type == "gemma4_unified", take)


def _taker(folder: Path, shapes: Shapes, *, device: torch.device, begins: tuple[str, ...]) -> Take:
    tensors = Tensors(folder, shapes, rename=partial(_named, begins))
    return lambda name: tensors.take(name).to(device)


def _named(begins: tuple[str, ...], name: str) -> str | None:
    """A tensor's published name, if it begins in one of these ways."""
    name = published_name(canonical(name))
    return name if name.startswith(begins) else None
