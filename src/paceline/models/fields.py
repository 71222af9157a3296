"""Typed and bounded access to the fields of a config, for every architecture."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError

# Most that a size may be, far above any model: a damaged config must not fill the memory before weights are looked at.
MOST = {
    "num_hidden_layers": 1024, "vocab_size": 2**24, "vocab_size_per_layer_input": 2**24, "sliding_window": 2**30,
    "max_position_embeddings": 2**30, "num_experts": 4096, "num_attention_heads": 4096, "head_dim": 2**14,
    "global_head_dim": 2**14, "n_routed_experts": 4096, "qk_rope_head_dim": 1024, "block_size": 256,
}  # fmt: skip
MOST_SIZE = 2**20  # of any other
MOST_NUMBER = 1e30  # float32 computes with it


class Fields:
    """Typed access to a JSON object; every failure names the object and the field."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where

    def size(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.raw.get(name)
        if value is None:
            if default is None:
                raise ConfigError(f"{self.where} lacks {name}: download config.json again, or add it")
            return default
        most = MOST.get(name, MOST_SIZE)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ConfigError(
                f"{self.where}: {name} is {shown(value)}, not a whole number from {least} to {most}: download "
                "config.json again"
            )
        return value

    def number(self, name: str, default: float) -> float:
        value = self.raw.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MOST_NUMBER:
            raise ConfigError(
                f"{self.where}: {name} is {shown(value)}, not a number above 0 and up to {MOST_NUMBER:g}: "
                "download config.json again"
            )
        return float(value)

    def refuse(self, name: str, supported: tuple[Any, ...], why: str) -> None:
        if self.raw.get(name) not in supported:
            raise ConfigError(f"{self.where}: {name}={shown(self.raw[name])} is not supported: {why}")


@contextmanager
def said_of(file: Path, instead: str = "get another GGUF file") -> Iterator[None]:
    """Say of a file what is said of the config.json that it stands for."""
    try:
        yield
    except ConfigError as error:
        message = re.sub(r"download config\.json again(, or add it)?", instead, str(error))
        raise ConfigError(f"{file}: {message}") from error


def shown(value: object) -> str:
    """A value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def token_ids(value: object, vocab: int, where: str) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab for i in ids):
        raise ConfigError(f"{where}: eos_token_id={shown(value)} is not a token of a vocabulary of {vocab}")
    return tuple(ids)
