"""The reader of a loaded model: what its config, its files and this installation allow it to see."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config import EngineConfig
from paceline.files import read_json
from paceline.media.reader import MediaReader, MediaTokens
from paceline.models.config import read_config
from paceline.models.target import GraphTarget
from paceline.models.towers.base import BUDGETS
from paceline.models.towers.load import plan_audio, plan_vision
from paceline.soft_tokens import Kind
from paceline.text.tokenizer import Tokenizer

_IDS: Mapping[Kind, tuple[tuple[str, ...], ...]] = {  # placeholder, begin, end, as configs name them
    "image": (("image_token_id",), ("boi_token_id",), ("eoi_token_id",)),
    "audio": (("audio_token_id",), ("boa_token_id",), ("eoa_token_id", "eoa_token_index")),
}
_FILES = ("processor_config.json", "preprocessor_config.json")


def media_tokens(raw: Mapping[str, Any], vocab_size: int) -> dict[Kind, MediaTokens]:
    """By kind the ids that a config.json names, of kinds whose ids are all in the vocabulary."""
    found: dict[Kind, MediaTokens] = {}
    for kind, names in _IDS.items():
        ids = [next((raw[name] for name in some if isinstance(raw.get(name), int)), -1) for some in names]
        if all(0 <= i < vocab_size for i in ids) and len(set(ids)) == len(ids):
            found[kind] = MediaTokens(*ids)
    return found


def reader_of(
    config: EngineConfig, folder: Path, target: GraphTarget, tokenizer: Tokenizer
) -> MediaReader | None:
    """None for a model without special tokens for media. Raises LoadError for a tower that does not fit its config."""
    raw, refused = read_config(folder), None
    if not config.media:
        refused = "pictures and sound are switched off (media=False)"
    elif config.tensor_parallel > 1:
        refused = "pictures are read by one process only: leave tensor_parallel out"
    tokens = media_tokens(raw, min(target.vocab_size, tokenizer.vocab_size))
    if not tokens:
        return None
    vision = refused or _without("PIL", "pictures need Pillow") or plan_vision(folder, raw, target)
    audio = refused or plan_audio(folder, raw, target)
    return MediaReader(tokenizer, tokens, vision, audio, config.image_tokens or _budget(folder))


def _without(module: str, why: str) -> str | None:
    """What to install if a module is not there. It is not imported."""
    return None if importlib.util.find_spec(module) else f"{why}: pip install 'paceline[media]'"


def _budget(folder: Path) -> int:
    """Soft tokens of a picture where nobody says it."""
    for name in _FILES if folder.is_dir() else ():
        said = read_json(folder / name) or {}
        inner = said.get("image_processor", said)
        most = inner.get("max_soft_tokens") if isinstance(inner, Mapping) else None
        if most in BUDGETS:
            return int(most)
    return 280
