"""The reader of a loaded model: what its config, its files and this installation allow it to see."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoints.gguf.projector import MEDIA_TEXTS, Projector
from paceline.checkpoints.gguf.reader import is_gguf
from paceline.config import EngineConfig
from paceline.errors import LoadError
from paceline.files import read_json
from paceline.media.beside import projector_of
from paceline.media.reader import MediaReader, MediaTokens
from paceline.models.config import parse_target, read_config, suppressed_ids
from paceline.models.target import GraphTarget
from paceline.models.towers.base import BUDGETS, AudioTower, VisionTower
from paceline.models.towers.gemma4_vision import VisionConfig, picture_operations
from paceline.models.towers.load import Host, plan_audio, plan_projector, plan_vision
from paceline.soft_tokens import Kind
from paceline.text.tokenizer import Tokenizer

_IDS: Mapping[Kind, tuple[tuple[str, ...], ...]] = {  # placeholder, begin, end, as configs name them
    "image": (("image_token_id",), ("boi_token_id",), ("eoi_token_id",)),
    "audio": (("audio_token_id",), ("boa_token_id",), ("eoa_token_id", "eoa_token_index")),
}
_FILES = ("processor_config.json", "preprocessor_config.json")


def media_tokens(raw: Mapping[str, Any], vocab_size: int) -> dict[Kind, MediaTokens]:
    """By kind the ids that a config.json names, of kinds whose ids are all in the vocabulary."""
    tokens: dict[Kind, MediaTokens] = {}
    for kind, names in _IDS.items():
        ids = [next((raw[name] for name in some if isinstance(raw.get(name), int)), -1) for some in names]
        if all(0 <= i < vocab_size for i in ids) and len(set(ids)) == len(ids):
            tokens[kind] = MediaTokens(*ids)
    return tokens


def reader_of(
    config: EngineConfig, folder: Path, target: GraphTarget, tokenizer: Tokenizer, max_len: int | None = None
) -> MediaReader | None:
    """None for a model without special tokens for media. Raises LoadError for a tower that does not fit its config.

    `max_len`: tokens of a text at most.
    """
    raw, refused = read_config(folder), None
    if not config.media:
        refused = "pictures and sound are switched off (media=False)"
    elif config.tensor_parallel > 1:
        refused = "pictures are read by one process only: leave tensor_parallel out"
    if is_gguf(folder) or config.mmproj is not None:
        raw |= _ids_by_text(tokenizer)
        target.suppress(suppressed_ids(raw, target.vocab_size))
    tokens = media_tokens(raw, min(target.vocab_size, tokenizer.vocab_size))
    if not tokens:
        return None
    try:
        vision, audio = (refused, refused) if refused else plan_towers(folder, raw, target, config.mmproj)
    except LoadError as error:
        raise type(error)(f"{error}; or read text alone: --no-media, media=False") from error
    reader = MediaReader(tokenizer, tokens, vision, audio, config.image_tokens or _budget(folder), max_len)
    if config.preload_media:
        reader.load()
    return reader


def plan_towers(
    folder: Path, raw: Mapping[str, Any], target: Host, mmproj: str | None
) -> tuple[Callable[[], VisionTower] | str, Callable[[], AudioTower] | str]:
    """What loads a model's towers, or why there are none. Raises LoadError."""
    pillow = _without("PIL", "pictures need Pillow")
    file = projector_of(folder, mmproj, target.hidden_size)
    if isinstance(file, Projector):
        vision, audio = plan_projector(file, raw, target)
        return pillow or vision, audio
    if is_gguf(folder):
        why = file or "a GGUF model sees and hears by an mmproj file, and none that fits is beside it: add it"
        return why, why
    return pillow or plan_vision(folder, raw, target), plan_audio(folder, raw, target)


def _ids_by_text(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids that a GGUF file does not name, by what Gemma 4 calls them."""
    return {
        name: token for name, text in MEDIA_TEXTS.items() if (token := tokenizer.token_id(text)) is not None
    }


@dataclass(frozen=True, slots=True)
class _Planned:
    hidden_size: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


def describe_media(
    folder: Path, mmproj: str | None = None, rate: Callable[[int, int], float] | None = None
) -> tuple[dict[str, str], list[str]]:
    """({"pictures": what is read of them, or why not, "sound": ...}, what is wrong) of a model that is not loaded.

    Nothing for one without special tokens for media. `rate`: operations a second of a matrix of so many inputs and
    outputs on this machine, for what a picture takes.
    """
    raw, rows = read_config(folder), dict[str, str]()
    config = parse_target(raw)
    try:
        if is_gguf(folder):
            raw |= _ids_by_text(Tokenizer.load(folder))
        tokens, host = media_tokens(raw, config.vocab_size), _Planned(config.hidden_size)
        vision, audio = plan_towers(folder, raw, host, mmproj) if tokens else ("", "")
    except LoadError as error:
        return {}, [str(error)]
    if "image" in tokens:
        least, most = BUDGETS[0], BUDGETS[-1]
        read = f"read, as {_budget(folder)} tokens at most ({least} to {most}: --image-tokens)"
        rows["pictures"] = f"not read: {vision}" if isinstance(vision, str) else read
        tower = vision.args[0] if isinstance(vision, partial) else None
        if rate is not None and isinstance(tower, VisionConfig):
            rows["a picture"] = _seconds(tower, rate(tower.hidden_size, tower.intermediate_size))
    if "audio" in tokens:
        rows["sound"] = (
            f"not read: {audio}" if isinstance(audio, str) else "read, 25 tokens a second, 30 s a clip"
        )
    return rows, []


def _seconds(config: VisionConfig, rate: float) -> str:
    """How long the tower takes for a picture of each budget, at so many operations a second."""
    seconds = {budget: picture_operations(config, budget) / rate for budget in BUDGETS}
    each = [
        f"{slow:.1f} s at {budget}" if slow < 10 else f"{slow:.0f} s at {budget}"
        for budget, slow in seconds.items()
    ]
    return f"about {', '.join(each)} tokens in the tower, by the speed of its largest matrix here"


def _without(module: str, why: str) -> str | None:
    """What to install if a module is not there. It is not imported."""
    return None if importlib.util.find_spec(module) else f"{why}: pip install 'paceline[media]'"


def _budget(folder: Path) -> int:
    """Soft tokens of a picture where nobody says it."""
    for name in _FILES if folder.is_dir() else ():
        settings = read_json(folder / name) or {}
        inner = settings.get("image_processor", settings)
        most = inner.get("max_soft_tokens") if isinstance(inner, Mapping) else None
        if most in BUDGETS:
            return int(most)
    return 280
