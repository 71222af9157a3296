"""What a folder or a config is when it is not what paceline runs: named, with what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from paceline.drafter_kinds import (
    ASSISTANT_TYPES,
    DSPARK,
    KINDS,
    PARALLEL_KEYS,
    DrafterKind,
    kind_of_config,
)
from paceline.errors import LoadError
from paceline.files import read_json

OLDER = {
    "gemma": "Gemma 1", "gemma3n": "Gemma 3n",
    "gemma3n_text": "Gemma 3n", "paligemma": "PaliGemma", "t5gemma": "T5Gemma", "recurrent_gemma": "RecurrentGemma",
}  # fmt: skip
NEWER = {
    "qwen4_exp": "Qwen3.8-Flash-Next",
    "deepseek_v4": "DeepSeek V4, with the DSpark modules in its own weights",
}  # fmt: skip


class Sign(NamedTuple):
    """How the config of a drafter that is not run is recognised."""

    word: str  # in what it names itself by
    what: str


OTHERS = (
    Sign("eagle3deepseekv2", "an EAGLE-3 head with a layer of latent attention (MLA)"),
    Sign("eagle", "an EAGLE head"),
    Sign("medusa", "a set of Medusa heads"),
    Sign("mlp_speculator", "an MLP speculator"),
    Sign("mlpspeculator", "an MLP speculator"),
)


def _precedence(sign: Sign | DrafterKind) -> tuple[int, bool]:
    """The longest word first; of equal ones a relative before the kind that its configs may name, too."""
    return -len(sign.word or ""), not (isinstance(sign, DrafterKind) and sign.relative_of)


_KNOWN: tuple[Sign | DrafterKind, ...] = (*OTHERS, *KINDS.values())
# the first whose word is there counts
SIGNS = sorted((sign for sign in _KNOWN if sign.word), key=_precedence)
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
OTHER_FILES = (
    ("*.onnx", "ONNX files"), ("*.litertlm", "LiteRT-LM files"), ("*.task", "MediaPipe files"),
    ("*.mlmodelc", "Core ML files"), ("*.npz", "NumPy weights (old MLX)"), ("*.h5", "Keras weights"),
)  # fmt: skip
NAMED_AT_MOST = 3


def foreign_config(raw: Mapping[str, Any]) -> str | None:
    """One line that names a config of another kind, None for one that has to be looked at further."""
    kind = raw.get("model_type")
    drafter = foreign_drafter(raw)
    if drafter_kind(raw) is not None and kind not in ASSISTANT_TYPES:
        return f"this is {drafter}, which drafts for a larger model: give that one as the target, and this with --drafter"
    if drafter is not None:
        return (
            f"this is {drafter}, which paceline does not load: give --drafter auto, ngram, the target's own "
            "assistant, or a smaller model with the same tokenizer"
        )
    if isinstance(kind, str) and kind in OLDER:
        return f"model_type {kind!r} is {OLDER[kind]}, which paceline does not run: use a Gemma 4 model"
    if isinstance(kind, str) and kind in NEWER:
        return f"model_type {kind!r} is {NEWER[kind]}, which paceline does not run: use another model"
    return None


def foreign_drafter(raw: Mapping[str, Any]) -> str | None:
    """Which kind of drafter, made for other engines, a config describes; None if it is none of them."""
    sign = _sign(raw)
    return None if sign is None else sign.what


def drafter_kind(raw: Mapping[str, Any]) -> str | None:
    """Which of `KINDS`, made for one target, a config.json describes; None for a model of its own."""
    kind = kind_of_config(raw) or _sign(raw)
    if not isinstance(kind, DrafterKind) or (kind.named and kind is not kind_of_config(raw)):
        return None
    return kind.name


def _sign(raw: Mapping[str, Any]) -> Sign | DrafterKind | None:
    kind, names = raw.get("model_type"), raw.get("architectures")
    inner = raw.get("dflash_config")
    inner = inner if isinstance(inner, Mapping) else {}
    words = [x for x in (names if isinstance(names, list) else [names]) if isinstance(x, str)]
    words += [
        x for x in (raw.get("speculators_model_type"), inner.get("projector_type")) if isinstance(x, str)
    ]
    if isinstance(kind, str):
        if kind.startswith("gemma4") and not any(
            "draft" in x.lower() or DSPARK.name in x.lower() for x in words
        ):
            return None
        words.append(kind)
    words += [key for key in ("eagle_config", "dflash_config", "dspark_config") if key in raw]
    text = " ".join(words).lower()
    sign = next((sign for sign in SIGNS if sign.word and sign.word in text), None)
    for drafter in KINDS.values():
        if sign is not None and drafter.implied is not None and drafter.implied[0] == sign.word:
            sign = drafter if drafter.implied[1] in raw else sign
    parallel = any(fields.get(key) not in (None, False) for fields in (raw, inner) for key in PARALLEL_KEYS)
    if isinstance(sign, DrafterKind) and sign.side_by_side is not None and parallel:
        return KINDS[sign.side_by_side]
    return sign


def explain_folder(folder: Path) -> str:
    """One line on a folder without config.json: what it is instead, and what to do."""
    try:
        adapter = read_json(folder / "adapter_config.json")
    except LoadError as error:
        return str(error)
    if adapter is not None:
        base = adapter.get("base_model_name_or_path")
        named = " ".join(base.split())[:200] if isinstance(base, str) else ""
        named = named or "the model it was trained on"
        return f"{folder} is an adapter for {named}, not a whole model: give {named} as the target"
    if incomplete(folder):
        return f"{folder}: the download is not complete: run `hf download` again, it goes on where it stopped"
    for pattern, what in OTHER_FILES:
        names = _names(folder, pattern)
        if names:
            return f"{folder} holds {what} ({names}) and has no config.json: use the safetensors checkpoint of this model"
    names = _names(folder, "*.safetensors")
    if names:
        return f"{folder} has weights ({names}) but has no config.json: copy it there from the model's repository"
    if (folder / "params.json").is_file():
        return f"{folder} is in Meta's layout: `paceline convert {folder} -o OUT` makes a folder that runs"
    for pattern in PICKLES:
        names = _names(folder, pattern)
        if names:
            return f"{folder} has pickled weights ({names}) and has no config.json: use the safetensors checkpoint"
    inside = _models_inside(folder)
    if inside:
        return f"{folder} has no config.json, but its folder {inside[0].name} has: give {inside[0]}"
    return f"{folder} has no config.json: give a model folder in Hugging Face layout"


def incomplete(folder: Path) -> bool:
    """Whether an interrupted `hf download` or hub cache left its mark."""
    places = [folder, folder / ".cache" / "huggingface" / "download"]
    if folder.parent.name == "snapshots":
        places.append(folder.parents[1] / "blobs")
    if (folder / "blobs").is_dir():
        places.append(folder / "blobs")
    return any(next(_glob(place, "*.incomplete"), None) is not None for place in places)


def _models_inside(folder: Path) -> list[Path]:
    return sorted(path.parent for path in _glob(folder, "*/config.json"))


def _names(folder: Path, pattern: str) -> str:
    names = sorted(path.name for path in _glob(folder, pattern))
    return ", ".join(names[:NAMED_AT_MOST]) + (", ..." if len(names) > NAMED_AT_MOST else "")


def _glob(folder: Path, pattern: str) -> Any:
    try:
        return iter(list(folder.glob(pattern)))
    except OSError:
        return iter(())
