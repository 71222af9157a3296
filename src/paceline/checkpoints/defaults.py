"""How a model's makers sample from it: what generation_config.json, or the metadata of a GGUF file, says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoints.gguf.keys import round_trip
from paceline.checkpoints.gguf.reader import Gguf
from paceline.errors import ConfigError
from paceline.files import read_json

GGUF_KEYS = {
    "temperature": "general.sampling.temp", "top_k": "general.sampling.top_k", "top_p": "general.sampling.top_p",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """None: the model does not say. Under `do_sample: false` the temperature is 0, as in transformers."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    def given(self) -> dict[str, float | int]:
        """What is suggested, by the name of its sampling parameter."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def read_defaults(path: Path) -> ModelDefaults:
    """What a folder or a GGUF file suggests. Raises ConfigError for values that cannot be used, LoadError for a damaged
    file.
    """
    if path.is_file():
        model = Gguf(path)
        found = {name: model[key] for name, key in GGUF_KEYS.items() if key in model}
        where = f"{path}: general.sampling"
    else:
        found, where = read_json(path / "generation_config.json") or {}, "generation_config.json"
    temperature = _number(found, "temperature", 0, 100, where)
    if found.get("do_sample") is False:
        temperature = 0.0
    top_k = _number(found, "top_k", 0, 2**31 - 1, where)
    return ModelDefaults(
        temperature, None if top_k is None else int(top_k), _number(found, "top_p", 0, 1, where)
    )


def _number(found: Mapping[str, Any], name: str, least: float, most: float, where: str) -> float | None:
    value = found.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ConfigError(
            f"{where}: {name} is {str(value)[:40]}, not a number from {least} to {most}: correct it"
        )
    return round_trip(value)
