"""The metadata of a GGUF file, checked as it is read, and what the architectures of it have in common.

Keys: llama.cpp's `gguf-py/gguf/constants.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.checkpoints.gguf.reader import Gguf
from paceline.checkpoints.gguf.rotary import llama3_scaling
from paceline.checkpoints.gguf.tokenizer import end_ids
from paceline.drafter_kinds import KINDS
from paceline.errors import ConfigError

Config = dict[str, Any]
SLIDING, FULL = "sliding_attention", "full_attention"
DRAFTERS = tuple(kind.gguf for kind in KINDS.values() if kind.gguf)
TABLES = ("token_embd.weight", "markov_w1.weight", "selector_predecessor.weight")
_YARN = {"attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}


@dataclass(frozen=True, slots=True)
class Keys:
    model: Gguf
    architecture: str

    def get(self, name: str, default: Any = None) -> Any:
        return self.model.get(f"{self.architecture}.{name}", default)

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ConfigError(
                f"{self.model.path} lacks {self.architecture}.{name} in its metadata: get a file of a newer converter"
            )
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number; where layers differ the one of the first layer."""
        value = self.need(name) if default is None else self.get(name, default)
        if isinstance(value, np.ndarray) and len(value):
            value = value[0].item()
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(
                f"{self.model.path}: {self.architecture}.{name} is no whole number: get another GGUF file"
            )
        return value

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(
                f"{self.model.path}: {self.architecture}.{name} is no number: get another GGUF file"
            )
        return round_trip(value)

    def per_layer(self, name: str, count: int) -> list[int]:
        """A value for each layer, whether the file gives one or a list. ConfigError for a list of another length."""
        value = self.need(name)
        listed = value.tolist() if isinstance(value, np.ndarray) else [value] * count
        if len(listed) < count:
            raise ConfigError(
                f"{self.model.path}: {self.architecture}.{name} has {len(listed)} values for {count} layers: get another "
                "GGUF file"
            )
        return [int(x) for x in listed[:count]]

    def has(self, tensor: str) -> bool:
        return tensor in self.model.tensors

    def shape(self, tensor: str) -> tuple[int, ...]:
        if tensor not in self.model.tensors:
            raise ConfigError(
                f"{self.model.path} has no tensor {tensor}, so it is no whole model: download it again, all parts of it"
            )
        return self.model.tensors[tensor].shape


def round_trip(value: float) -> float:
    """The short decimal number that a float32 stands for: 1e-05 instead of 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else float(value)


def common(keys: Keys, whole: bool = True) -> Config:
    """What all architectures have; not `whole`: a drafter, which may read the embeddings of its target."""
    heads = keys.size("attention.head_count")
    hidden = keys.size("embedding_length")
    config: Config = {
        "vocab_size": keys.shape("token_embd.weight")[0] if whole else _vocabulary(keys),
        "hidden_size": hidden,
        "num_hidden_layers": keys.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.size("attention.head_count_kv", heads),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", 1e-6),
        "max_position_embeddings": keys.size("context_length"),
        "tie_word_embeddings": not keys.has("output.weight"),
    }
    ends = list(end_ids(keys.model))
    if ends:
        config["eos_token_id"] = ends
    return config


def _vocabulary(keys: Keys) -> int:
    """The tokens of a drafter's target: rows of what is read by token, else what the file says."""
    table = next((name for name in TABLES if keys.has(name)), None)
    if table is not None:
        return keys.shape(table)[0]
    listed = keys.model.get("tokenizer.ggml.tokens")
    return keys.size("vocab_size", None if listed is None else len(listed))


def decoder(keys: Keys, model_type: str, name: str, sparse: bool = False) -> Config:
    """Llama and its relatives; `sparse`: the width of an MLP may be missing, since all layers have experts."""
    config = common(keys, whole=keys.architecture not in DRAFTERS)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if heads < 1:
        raise ConfigError(
            f"{keys.model.path}: {keys.architecture}.attention.head_count is {heads}: get another GGUF file"
        )
    theta = keys.number("rope.freq_base", 10_000.0)
    head_dim = keys.size("attention.key_length", hidden // heads)
    return config | {
        "model_type": model_type,
        "architectures": [name],
        "head_dim": head_dim,
        "intermediate_size": keys.size("feed_forward_length", 0 if sparse else None) or None,
        "hidden_act": "silu",
        "rope_theta": theta,
        "rope_scaling": scaling(keys, head_dim, theta),
    }


def scaling(keys: Keys, head_dim: int, theta: float) -> Config | None:
    if keys.has("rope_freqs.weight"):
        factors = keys.model.floats("rope_freqs.weight").ravel()
        scaling = llama3_scaling(factors, head_dim, theta)
        if scaling is None:
            raise ConfigError(
                f"{keys.model.path}: its rope_freqs.weight is not the scaling of Llama 3: use the safetensors checkpoint "
                "of this model"
            )
        return scaling
    # as llama.cpp reads them: what is scaled without a word of how is scaled linearly, by the key of 2023 too
    kind = keys.get("rope.scaling.type", "linear")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    scaling = {"rope_type": str(kind), "factor": factor}
    if keys.get("rope.scaling.original_context_length") is not None:
        scaling["original_max_position_embeddings"] = keys.size("rope.scaling.original_context_length")
    for name, key in _YARN.items():
        if kind == "yarn" and keys.get(f"rope.scaling.{key}") is not None:
            scaling[name] = keys.number(f"rope.scaling.{key}", 1.0)
    return scaling
