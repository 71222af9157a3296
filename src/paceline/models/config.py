"""config.json of a model folder, or what a GGUF file has instead, and the target that it describes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoints.foreign import explain_folder, foreign_drafter
from paceline.checkpoints.gguf.metadata import config_of
from paceline.checkpoints.gguf.reader import is_gguf
from paceline.drafter_kinds import ASSISTANT_TYPES
from paceline.errors import ConfigError, LoadError
from paceline.files import read_json
from paceline.models.families import FAMILIES, model_type_of, spec_of
from paceline.models.families.gemma4.config import parse_assistant
from paceline.models.fields import said_of
from paceline.models.spec import ModelConfig

_PLACEHOLDERS = ("image_token_id", "audio_token_id", "video_token_id")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder, or what a GGUF file has instead. Raises LoadError.

    The eos ids of generation_config.json win, as in transformers; its suppressed tokens stand beside them.
    """
    if is_gguf(folder):
        config = config_of(folder)
        if foreign_drafter(config) is not None:  # which is checked where it is paired
            return config
        with said_of(folder):
            (parse_assistant if config["model_type"] in ASSISTANT_TYPES else parse_target)(config)
        return config
    try:
        raw = read_json(folder / "config.json")
        generation = read_json(folder / "generation_config.json") or {}
    except LoadError as error:
        raise ConfigError(str(error)) from error
    if raw is None:
        raise ConfigError(explain_folder(folder))
    for name in ("eos_token_id", "suppress_tokens"):
        if generation.get(name) is not None:
            raw[name] = generation[name]
    return raw


def suppressed_ids(raw: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Tokens that are never written: those that the model's makers name, and placeholders of media."""
    listed = raw.get("suppress_tokens")
    ids = [*(listed if isinstance(listed, list) else ()), *(raw.get(name) for name in _PLACEHOLDERS)]
    numbers = {i for i in ids if isinstance(i, int) and not isinstance(i, bool)}
    return tuple(sorted(i for i in numbers if 0 <= i < vocab_size))


def parse_target(raw: Mapping[str, Any]) -> ModelConfig:
    """The target described by a config.json, of whichever family. Raises ConfigError."""
    return spec_of(model_type_of(raw, tuple(FAMILIES), "target")).parse(raw)
