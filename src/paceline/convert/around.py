"""A language model of a GGUF file with the towers of its mmproj file around it, as one model of Hugging Face's layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.checkpoints.gguf.projector import MEDIA_TEXTS, Projector
from paceline.text.tokenizer import Tokenizer

_BOTH = ("dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")


def config_around(text: Mapping[str, Any], towers: Projector, tokenizer: Tokenizer) -> dict[str, Any]:
    """The config.json of both, of that of the language model."""
    kind, name = ("gemma4_unified", "Gemma4Unified") if towers.unified else ("gemma4", "Gemma4")
    inner = dict(text) | {"model_type": f"{kind}_text"}
    if not text.get("hidden_size_per_layer_input"):  # no file says it: rows of a picture see each other
        inner["use_bidirectional_attention"] = "vision"
    ids = {field: tokenizer.token_id(shown) for field, shown in MEDIA_TEXTS.items()}
    return {
        "model_type": kind, "architectures": [f"{name}ForConditionalGeneration"], "text_config": inner,
        "vision_config": towers.vision | {"model_type": f"{kind}_vision"} if towers.vision else None,
        "audio_config": towers.audio | {"model_type": f"{kind}_audio"} if towers.audio else None,
        **{field: found for field, found in ids.items() if found is not None},
        **{field: text[field] for field in _BOTH if field in text},
    }  # fmt: skip


def name_inside(key: str) -> str:
    """What a tensor of a language model is called with towers around it."""
    return key.replace("model.", "model.language_model.", 1) if key.startswith("model.") else key
