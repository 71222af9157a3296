"""What a model's card (README.md) and config say of where it came from, and which drafter was made for its base."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import LoadError
from paceline.files import read_text

_BASE = re.compile(r"^base_model:[ \t]*(?:\n[ \t]*-[ \t]*)?[\"']?(?P<id>[\w.-]+/[\w.-]+)", re.MULTILINE)
_GEMMA = re.compile(r"gemma-4-(?P<size>E2B|E4B|12B|26B-A4B|31B)", re.IGNORECASE)
_SIZES = {(1536, 35): "E2B"}  # (hidden_size, layers) of google/gemma-4-E2B-it's config.json


def base_model(folder: Path) -> str | None:
    """The hub id that the card names as `base_model`, None where it names none or cannot be read."""
    try:
        text = read_text(folder / "README.md") or ""
    except LoadError:
        return None
    head = text.split("\n---", 1)[0] if text.startswith("---") else ""
    found = _BASE.search(head)
    return None if found is None else found["id"]


def unquantized(folder: Path) -> str:
    """Which checkpoint to take in the place of a quantized one; of Gemma 4's QAT models Google publishes it by itself."""
    base = base_model(folder)
    for name in (folder.name, base or ""):
        found = _GEMMA.search(name)
        if found is not None and "-qat" in name.lower():
            return f"google/gemma-4-{found['size'].upper()}-it-qat-q4_0-unquantized"
    if base is None:
        return "the bfloat16 checkpoint it was made from (its model card names it as base_model)"
    return base if base != folder.name else "the bfloat16 checkpoint"


def fitting_assistant(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The hub id of the assistant that Google made for the model's base: by its card, its name or its shapes."""
    for name in (base_model(folder), str(config.get("_name_or_path") or ""), folder.name):
        found = _GEMMA.search(name or "")
        if found is not None:
            return f"google/gemma-4-{found['size'].upper()}-it-assistant"
    nested = config.get("text_config")
    text = nested if isinstance(nested, Mapping) else config
    hidden, layers = text.get("hidden_size"), text.get("num_hidden_layers")
    size = _SIZES.get((hidden, layers)) if isinstance(hidden, int) and isinstance(layers, int) else None
    return None if size is None else f"google/gemma-4-{size}-it-assistant"
