"""How a model's makers sample from it: what generation_config.json, or the metadata of a GGUF file, says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoints.gguf.keys import round_trip
from paceline.checkpoints.gguf.reader import Gguf
from paceline.core import SamplingParams
from paceline.errors import ConfigError
from paceline.files import read_json
from paceline.options import Option, Whole, rows_of

GGUF_KEYS = {
    "temperature": "general.sampling.temp", "top_k": "general.sampling.top_k", "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p", "repetition_penalty": "general.sampling.penalty_repeat",
}  # fmt: skip
_ROWS = {row.name: row for row in rows_of(SamplingParams) if row.name in GGUF_KEYS}


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """None: the model does not say. Under `do_sample: false` the temperature is 0, as in transformers."""

    temperature: float | None = None
    top_k: int | None = None  # 0: off
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def given(self) -> dict[str, float | int]:
        """What is suggested, by the name of its sampling parameter."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def read_defaults(path: Path) -> ModelDefaults:
    """What a folder or a GGUF file suggests. Raises ConfigError for values that cannot be used, LoadError for a damaged
    file.
    """
    if path.is_file():
        model = Gguf(path)
        stored = {name: model[key] for name, key in GGUF_KEYS.items() if key in model}
        where = f"{path}: general.sampling"
    else:
        stored, where = read_json(path / "generation_config.json") or {}, "generation_config.json"
    values = {name: _number(stored, row, where) for name, row in _ROWS.items()}
    if stored.get("do_sample") is False:
        values["temperature"] = 0.0
    return ModelDefaults(**values)


_POOLING = {1: "mean", 3: "last"}  # of GGUF files, as llama.cpp numbers them


def pooling_of(path: Path) -> str:
    """What embeddings of a folder or a GGUF file are made of, by sentence-transformers' file or llama.cpp's key; where
    they say nothing that a decoder has, the last token's state. Raises LoadError for a damaged file.
    """
    if path.is_file():
        model = Gguf(path)
        kind = model.get(f"{model.get('general.architecture')}.pooling_type")
        return _POOLING.get(kind, "last") if isinstance(kind, int) else "last"
    pooling = read_json(path / "1_Pooling" / "config.json") or {}
    return "mean" if pooling.get("pooling_mode_mean_tokens") is True else "last"


def _number(stored: Mapping[str, Any], row: Option, where: str) -> Any:
    """The value of a row. A whole number may be written as 64.0, and -1 is off where 0 is."""
    value = stored.get(row.name)
    if value is None:
        return None
    if isinstance(row.kind, Whole) and isinstance(value, float) and value.is_integer():
        value = int(value)
    if not row.kind.accepts(value):
        wanted = row.kind.wanted().removeprefix("give ")
        raise ConfigError(f"{where}: {row.name} is {str(value)[:40]}, not {wanted}: correct it")
    return max(0, value) if isinstance(row.kind, Whole) else round_trip(value)
