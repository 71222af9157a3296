"""What config.json of a drafter network says of its decoder layers: nested, in the format of `speculators`, or flat, as
the originals have it. What is not known and set is refused by name: a drafter that runs without it only drafts worse.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from paceline.checkpoints.quantized.config import KEYS as QUANTIZED
from paceline.errors import ConfigError
from paceline.models.families import spec_of
from paceline.models.fields import Fields, shown
from paceline.models.layers.decoder_config import DecoderConfig, sliding_kinds
from paceline.models.spec import FULL, SLIDING

LAYERS = ("llama", "qwen3")  # model types that a layer may be of
# keys that say nothing of the arithmetic, or what is checked elsewhere
KNOWN = {
    "speculators_model_type", "speculators_config", "speculators_version", "architectures", "model_type",
    "transformer_layer_config", "embed_requires_grad", "tie_word_embeddings", "dtype", "torch_dtype",
    "transformers_version", "auto_map", "_name_or_path", "name_or_path", "id2label", "label2id", "return_dict",
    "chunk_size_feed_forward", "paceline_quantization", *QUANTIZED,
}  # fmt: skip
LAYER_KEYS = {
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers",
    "vocab_size", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings",
    "hidden_act", "attention_bias", "mlp_bias", "initializer_range", "use_cache", "attention_dropout",
    "pretraining_tp", "bos_token_id", "eos_token_id", "pad_token_id", "layer_types", "max_window_layers",
}  # fmt: skip
ELSEWHERE = ("sliding_window", "use_sliding_window", "layer_types", "eos_token_id")  # of its keys
# transformers leaves out of a nested config what has these values
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "qwen3": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_attention_heads": 32,
        "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768,
    },
}  # fmt: skip


def parse_layers(
    raw: Mapping[str, Any], kind: str, own: Collection[str], slides: bool = False
) -> DecoderConfig:
    """The decoder layers of a drafter `kind`, whose `own` keys are known, too. Raises ConfigError.

    `slides`: they may have windows. They keep all keys all the same: `kinds` are those of their K/V.
    """
    nested = raw.get("transformer_layer_config")
    if "speculators_model_type" in raw and not isinstance(nested, Mapping):
        raise ConfigError(f"{kind}: config.json has no transformer_layer_config: download it again")
    inner: Mapping[str, Any] = nested if isinstance(nested, Mapping) else raw
    known = KNOWN.union(own) if inner is nested else KNOWN.union(own, LAYER_KEYS, ELSEWHERE if slides else ())
    if unknown := [key for key, value in raw.items() if key not in known and value not in (None, False, "")]:
        raise ConfigError(
            f"{kind}: {unknown[0]}={shown(raw[unknown[0]])} is not known to this version, which would draft without it: "
            "update paceline, or use the drafter ngram"
        )
    family = inner.get("model_type", "qwen3" if inner is nested else "llama")
    if family not in LAYERS:
        raise ConfigError(
            f"{kind}: a layer of model_type {shown(family)} is not supported, only {', '.join(LAYERS)}"
        )
    listed = SLIDING in (inner.get("layer_types") or ())
    if listed and not slides:
        raise ConfigError(f"{kind}: a layer with a sliding window is not supported: use the drafter ngram")
    plain = {key: value for key, value in inner.items() if key not in ELSEWHERE and value is not None}
    defaults = DEFAULTS[family] if inner is nested else {}
    layers = spec_of(family).parse(
        {**defaults, **plain} | {"model_type": family, "tie_word_embeddings": True}
    )
    assert isinstance(layers, DecoderConfig)
    return replace(layers, kinds=(FULL,) * len(layers.kinds))


def windows_of(raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The window of each decoder layer that `parse_layers` has read, None: it sees all. Raises ConfigError."""
    nested = raw.get("transformer_layer_config")
    inner = nested if isinstance(nested, Mapping) else raw
    used = SLIDING in (inner.get("layer_types") or ()) and inner.get("sliding_window") is not None
    kinds = sliding_kinds({"model_type": "layers", "use_sliding_window": used, **inner})
    if SLIDING not in kinds:
        return (None,) * len(kinds)
    window = Fields(inner, "layers").size("sliding_window", least=1)
    return tuple(window if kind == SLIDING else None for kind in kinds)
