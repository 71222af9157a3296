"""What a model's card (README.md), config and files say: where it came from, and which drafter was made for its base."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from paceline.checkpoints.gguf.mixtures import NAMES
from paceline.checkpoints.gguf.reader import Gguf, is_gguf
from paceline.errors import LoadError
from paceline.files import read_json, read_text

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
    match = _BASE.search(head)
    return None if match is None else match["id"]


def unquantized(folder: Path) -> str:
    """Which checkpoint to take in the place of a quantized one; of Gemma 4's QAT models Google publishes it by itself."""
    base = base_model(folder)
    for name in (folder.name, base or ""):
        match = _GEMMA.search(name)
        if match is not None and "-qat" in name.lower():
            return f"google/gemma-4-{match['size'].upper()}-it-qat-q4_0-unquantized"
    if base is None:
        return "the bfloat16 checkpoint it was made from (its model card names it as base_model)"
    return base if base != folder.name else "the bfloat16 checkpoint"


def fitting_assistant(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The hub id of the assistant that Google made for the model's base: by its card, its name or its shapes."""
    for name in (base_model(folder), str(config.get("_name_or_path") or ""), folder.name):
        match = _GEMMA.search(name or "")
        if match is not None:
            return f"google/gemma-4-{match['size'].upper()}-it-assistant"
    nested = config.get("text_config")
    text = nested if isinstance(nested, Mapping) else config
    hidden, layers = text.get("hidden_size"), text.get("num_hidden_layers")
    size = _SIZES.get((hidden, layers)) if isinstance(hidden, int) and isinstance(layers, int) else None
    return None if size is None else f"google/gemma-4-{size}-it-assistant"


def quantized_by(path: Path, kinds: Mapping[str, int], parameters: int) -> str | None:
    """One line on how a model's weights are stored, and by whom; None for plain floats. `kinds`: how many matrices of a
    folder are stored how, `parameters` those of a GGUF file."""
    if not is_gguf(path):
        by_count = Counter(kinds).most_common()
        more = (
            f" ({by_count[0][1]} matrices; {sum(n for _, n in by_count[1:])} in other ways)"
            if len(by_count) > 1
            else ""
        )
        return by_count[0][0] + more if by_count else None
    model = Gguf(path)
    size = sum(tensor.nbytes for tensor in model.tensors.values())
    name = NAMES.get(model.get("general.file_type", -1)) or _of_gguf(model)["dtype"]
    maker = model.get("general.quantized_by")
    by = f", by {' '.join(maker.split())[:60]}" if isinstance(maker, str) and maker.strip() else ""
    return f"GGUF {name}, {8 * size / max(1, parameters):.2f} bits a weight{by}"


def describe_files(path: Path, dtype: str) -> dict[str, Any]:
    """What is said of a model's files, as far as the files tell."""
    if path.is_file():
        return _of_gguf(Gguf(path))
    family = (read_json(path / "config.json") or {}).get("model_type") if path.is_dir() else None
    size = sum(file.stat().st_size for file in path.glob("*.safetensors")) if path.is_dir() else 0
    return {"format": "safetensors", "family": family, "bytes": size, "dtype": dtype}


def _of_gguf(model: Gguf) -> dict[str, Any]:
    """Its architecture, its parameters as `134.5M`, and the type that most of its bytes have."""
    kinds = Counter[str]()
    for tensor in model.tensors.values():
        kinds[tensor.kind] += tensor.nbytes
    count = sum(prod(tensor.shape) for tensor in model.tensors.values())
    size, unit = next(((n, u) for n, u in ((1e9, "B"), (1e6, "M"), (1e3, "K")) if count >= n), (1.0, ""))
    return {
        "format": "gguf", "family": model.get("general.architecture"),
        "bytes": sum(file.path.stat().st_size for file in model.files),
        "dtype": kinds.most_common(1)[0][0] if kinds else "", "parameters": f"{count / size:.1f}{unit}",
    }  # fmt: skip
