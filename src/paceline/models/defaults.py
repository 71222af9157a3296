"""How a model's makers sample from it: what generation_config.json says beside its end tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.files import read_json


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """None: generation_config.json does not say. Under `do_sample: false` the temperature is 0, as in transformers."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    def given(self) -> dict[str, float | int]:
        """What is suggested, by the name of its sampling parameter."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def read_defaults(folder: Path) -> ModelDefaults:
    """What the folder suggests. Raises ConfigError for values that cannot be used, LoadError for a damaged file."""
    if folder.is_file():  # GGUF: it says nothing of sampling
        return ModelDefaults()
    raw = read_json(folder / "generation_config.json") or {}
    temperature = _number(raw, "temperature", 0, 100)
    if raw.get("do_sample") is False:
        temperature = 0.0
    top_k = _number(raw, "top_k", 0, 2**31 - 1)
    return ModelDefaults(temperature, None if top_k is None else int(top_k), _number(raw, "top_p", 0, 1))


def _number(raw: dict[str, Any], name: str, least: float, most: float) -> float | None:
    value = raw.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ConfigError(
            f"generation_config.json: {name} is {str(value)[:40]}, not a number from {least} to {most}: correct it"
        )
    return float(value)
