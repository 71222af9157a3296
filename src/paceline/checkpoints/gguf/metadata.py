"""The metadata of a GGUF file -> the config.json that the same model has as a Hugging Face checkpoint.

Sizes are taken from the metadata, the vocabulary and what is tied from the tensors themselves. Keys: llama.cpp's
`gguf-py/gguf/constants.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from paceline.checkpoints.gguf.names import NAMES
from paceline.checkpoints.gguf.reader import Gguf, State, states
from paceline.checkpoints.gguf.rotary import llama3_scaling, rotating_share
from paceline.checkpoints.gguf.tokenizer import end_ids
from paceline.errors import ConfigError

Config = dict[str, Any]
SLIDING, FULL = "sliding_attention", "full_attention"
_YARN = {"attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
# File types that are no model of text, by what they are
OTHERS = {
    "clip": "the vision part of a model",
    "mmproj": "the vision part of a model",
    "whisper": "a speech model",
}


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
    return READERS[architecture](_Keys(model, architecture)) | ({"suppress_tokens": silent} if silent else {})


def check_architecture(path: Path, model: Mapping[str, Any]) -> str:
    """`general.architecture` of the metadata, if it is supported. ConfigError names those that are."""
    architecture = model.get("general.architecture")
    kind = model.get("general.type", "model")
    if kind == "adapter":
        raise ConfigError(f"{path} is an adapter, not a whole model: give the GGUF file of the model itself")
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


@dataclass(frozen=True, slots=True)
class _Keys:
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


def _common(keys: _Keys) -> Config:
    """What all architectures have."""
    heads = keys.size("attention.head_count")
    hidden = keys.size("embedding_length")
    config: Config = {
        "vocab_size": keys.shape("token_embd.weight")[0],
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


def _decoder(keys: _Keys, model_type: str, name: str, sparse: bool = False) -> Config:
    """Llama and its relatives; `sparse`: the width of an MLP may be missing, since all layers have experts."""
    config = _common(keys)
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
        "rope_scaling": _scaling(keys, head_dim, theta),
    }


def _scaling(keys: _Keys, head_dim: int, theta: float) -> Config | None:
    if keys.has("rope_freqs.weight"):
        factors = keys.model.floats("rope_freqs.weight").ravel()
        scaling = llama3_scaling(factors, head_dim, theta)
        if scaling is None:
            raise ConfigError(
                f"{keys.model.path}: its rope_freqs.weight is not the scaling of Llama 3: use the safetensors checkpoint "
                "of this model"
            )
        return scaling
    kind = keys.get("rope.scaling.type", "none")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    scaling = {"rope_type": str(kind), "factor": factor}
    if keys.get("rope.scaling.original_context_length") is not None:
        scaling["original_max_position_embeddings"] = keys.size("rope.scaling.original_context_length")
    for name, key in _YARN.items():
        if kind == "yarn" and keys.get(f"rope.scaling.{key}") is not None:
            scaling[name] = keys.number(f"rope.scaling.{key}", 1.0)
    return scaling


def _llama(keys: _Keys) -> Config:
    if keys.size("expert_count", 0):
        raise ConfigError(
            f"{keys.model.path} is a Mixtral (llama with experts), which paceline does not run: use a dense model"
        )
    return _decoder(keys, "llama", "LlamaForCausalLM") | {
        "attention_bias": keys.has("blk.0.attn_q.bias"),
        "mlp_bias": keys.has("blk.0.ffn_gate.bias"),
    }


def _qwen2(keys: _Keys) -> Config:
    return _decoder(keys, "qwen2", "Qwen2ForCausalLM") | {"use_sliding_window": False}


def _qwen3(keys: _Keys) -> Config:
    return _decoder(keys, "qwen3", "Qwen3ForCausalLM") | {
        "attention_bias": False,
        "use_sliding_window": False,
    }


def _qwen3moe(keys: _Keys) -> Config:
    return _decoder(keys, "qwen3_moe", "Qwen3MoeForCausalLM") | {
        "attention_bias": False,
        "use_sliding_window": False,
        "num_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp's graph of qwen3moe always normalises
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen35moe(keys: _Keys) -> Config:
    return _qwen35(keys, "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM") | {
        "num_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length"),
    }


def _qwen35(keys: _Keys, model_type: str = "qwen3_5_text", name: str = "Qwen3_5ForCausalLM") -> Config:
    config = _decoder(keys, model_type, name, sparse="moe" in model_type)
    values, modules = keys.size("ssm.time_step_rank"), keys.size("nextn_predict_layers", 0)
    count = config["num_hidden_layers"] - modules
    recurrent = keys.get("attention.recurrent_layers")
    kinds = None
    if isinstance(recurrent, np.ndarray) and len(recurrent) >= count:
        kinds = ["linear_attention" if one else FULL for one in recurrent[:count].tolist()]
    return config | {
        "num_hidden_layers": count,
        "mtp_num_hidden_layers": modules,
        "layer_types": kinds,
        "full_attention_interval": keys.size("full_attention_interval", 4),
        "partial_rotary_factor": keys.size("rope.dimension_count") / max(config["head_dim"], 1),
        "linear_conv_kernel_dim": keys.size("ssm.conv_kernel"),
        "linear_key_head_dim": keys.size("ssm.state_size"),
        "linear_num_key_heads": keys.size("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": keys.size("ssm.inner_size") // max(values, 1),
        "gguf_layout": True,  # see parse_qwen3_5
    }


def _gemma4(keys: _Keys) -> Config:
    """A target's config, of type gemma4_text."""
    return {"model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"]} | _gemma4_text(keys)


def _gemma4_text(keys: _Keys) -> Config:
    config = _common(keys)
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


def _gemma4_rope(keys: _Keys) -> Config:
    share = 1.0
    if keys.has("rope_freqs.weight"):
        found = rotating_share(keys.model.floats("rope_freqs.weight").ravel())
        if found is None:
            raise ConfigError(
                f"{keys.model.path}: its rope_freqs.weight is not that of a Gemma 4: use the safetensors checkpoint"
            )
        share = found
    return {
        SLIDING: {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10_000.0)},
        FULL: {
            "rope_type": "proportional",
            "rope_theta": keys.number("rope.freq_base", 1_000_000.0),
            "partial_rotary_factor": share,
        },
    }


def _gemma4_assistant(keys: _Keys) -> Config:
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


READERS: Mapping[str, Callable[[_Keys], Config]] = {
    "llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3, "qwen3moe": _qwen3moe, "qwen35": _qwen35, "qwen35moe": _qwen35moe,
    "gemma4": _gemma4,
    "gemma4-assistant": _gemma4_assistant,
}  # fmt: skip
