"""The metadata of a GGUF file -> the config.json that the same model has as a Hugging Face checkpoint.

Sizes are taken from the metadata, the vocabulary and what is tied from the tensors themselves. Keys: llama.cpp's
`gguf-py/gguf/constants.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

from paceline.checkpoints.gguf.decoders import DECODERS
from paceline.checkpoints.gguf.keys import FULL, SLIDING, Config, Keys, common, round_trip
from paceline.checkpoints.gguf.names import NAMES
from paceline.checkpoints.gguf.reader import Gguf, State, states
from paceline.checkpoints.gguf.rotary import rotating_share
from paceline.drafter_kinds import DFLASH, DSPARK
from paceline.errors import ConfigError, shown

# File types that are no model of text, by what they are
OTHERS = {
    "clip": "the vision part of a model",
    "mmproj": "the vision part of a model",
    "whisper": "a speech model",
}

FORKS = (DSPARK.name, f"{DFLASH.gguf}-draft")


def config_of(path: Path) -> Config:
    """The config of a GGUF file, read again only when the file has changed. Raises LoadError."""
    if not path.exists():
        return read_config(Gguf(path))  # says what is wrong
    return deepcopy(_config_of(path, states(path)))


@lru_cache(maxsize=4)
def _config_of(path: Path, states: tuple[State, ...]) -> Config:
    return read_config(Gguf(path))


def read_config(model: Gguf) -> Config:
    """The config of a GGUF model. ConfigError for an unknown architecture and for metadata that is missing."""
    architecture = check_architecture(model.path, model)
    silent = model.get("tokenizer.ggml.suppress_tokens")
    config = READERS[architecture](Keys(model, architecture))
    return config if silent is None else config | {"suppress_tokens": [int(i) for i in silent]}


def check_architecture(path: Path, model: Mapping[str, Any]) -> str:
    """`general.architecture` of the metadata, if it is supported. ConfigError names those that are."""
    architecture = model.get("general.architecture")
    kind = model.get("general.type", "model")
    if kind == "adapter":
        raise ConfigError(f"{path} is an adapter, not a whole model: give the GGUF file of the model itself")
    if architecture in FORKS or any(str(key).startswith(f"{DFLASH.gguf}.{DSPARK.name}.") for key in model):
        raise ConfigError(
            f"{path} is a drafter in a layout of llama.cpp's forks ({shown(architecture)}), which paceline does not "
            f"read: give one of llama.cpp's own converter ({DFLASH.gguf}), or the folder of safetensors"
        )
    if architecture in NAMES:
        return str(architecture)
    if architecture is None:
        raise ConfigError(
            f"{path} does not say its architecture (general.architecture): get another GGUF file"
        )
    what = OTHERS.get(str(architecture))
    if what is not None:
        raise ConfigError(
            f"{path} is {what}, which paceline does not run: give the GGUF file of the language model beside it"
        )
    raise ConfigError(
        f"{path} has the architecture {str(architecture)[:40]!r}, which paceline does not run: give a GGUF file of "
        f"{', '.join(NAMES)}"
    )


def _gemma4(keys: Keys) -> Config:
    """A target's config, of type gemma4_text."""
    return {"model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"]} | _gemma4_text(keys)


def _gemma4_text(keys: Keys) -> Config:
    config = common(keys)
    count = config["num_hidden_layers"]
    kinds = [SLIDING if x else FULL for x in keys.per_layer("attention.sliding_window_pattern", count)]
    kv_heads = keys.per_layer("attention.head_count_kv", count)
    head_dim, wide = keys.size("attention.key_length_swa"), keys.size("attention.key_length")
    shared = keys.size("attention.shared_kv_layers", 0)
    widths = keys.per_layer("feed_forward_length", count)
    experts = keys.size("expert_count", 0)
    own_full = [i for i, kind in enumerate(kinds) if kind == FULL and i < count - shared]
    softcap = keys.get("final_logit_softcapping")
    config |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": head_dim,
        "num_key_value_heads": next((n for n, kind in zip(kv_heads, kinds) if kind == SLIDING), kv_heads[0]),
        "per_layer_config": {
            str(i): {"head_dim": wide, "num_key_value_heads": kv_heads[i]}
            for i, k in enumerate(kinds)
            if k == FULL
        },
        "layer_types": kinds,
        "sliding_window": keys.size("attention.sliding_window"),
        "num_kv_shared_layers": shared,
        "attention_k_eq_v": bool(own_full) and not keys.has(f"blk.{own_full[0]}.attn_v.weight"),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "final_logit_softcapping": None if softcap is None else round_trip(softcap),
        "hidden_size_per_layer_input": keys.size("embedding_length_per_layer_input", 0),
        "enable_moe_block": experts > 0,
        "rope_parameters": _gemma4_rope(keys),
    }
    if config["hidden_size_per_layer_input"]:
        config["vocab_size_per_layer_input"] = keys.shape("per_layer_token_embd.weight")[0]
    if experts:
        config |= {
            "num_experts": experts,
            "top_k_experts": keys.size("expert_used_count"),
            "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        }
    return config


def _gemma4_rope(keys: Keys) -> Config:
    share = 1.0
    if keys.has("rope_freqs.weight"):
        rotating = rotating_share(keys.model.floats("rope_freqs.weight").ravel())
        if rotating is None:
            raise ConfigError(
                f"{keys.model.path}: its rope_freqs.weight is not that of a Gemma 4: use the safetensors checkpoint"
            )
        share = rotating
    return {
        SLIDING: {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10_000.0)},
        FULL: {
            "rope_type": "proportional",
            "rope_theta": keys.number("rope.freq_base", 1_000_000.0),
            "partial_rotary_factor": share,
        },
    }


def _gemma4_assistant(keys: Keys) -> Config:
    text = _gemma4_text(keys) | {"num_kv_shared_layers": keys.size("block_count"), "attention_k_eq_v": False}
    centroids = "masked_embd_centroids.weight"
    return {
        "model_type": "gemma4_assistant",
        "architectures": ["Gemma4AssistantForCausalLM"],
        "backbone_hidden_size": keys.size("embedding_length_out"),
        "use_ordered_embeddings": keys.has(centroids),
        "num_centroids": keys.shape(centroids)[0] if keys.has(centroids) else None,
        "tie_word_embeddings": True,
        "eos_token_id": text.get("eos_token_id"),
        "text_config": text | {"model_type": "gemma4_text"},
    }


READERS: Mapping[str, Callable[[Keys], Config]] = {
    **DECODERS,
    "gemma4": _gemma4,
    "gemma4-assistant": _gemma4_assistant,
}  # fmt: skip
