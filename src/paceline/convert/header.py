"""A parsed config -> the metadata of a GGUF file: `checkpoints/gguf/metadata.py` the other way round.

Keys are those that llama.cpp's converter writes (`conversion/base.py`, `conversion/gemma.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.checkpoints.gguf.names import WINDOWED
from paceline.checkpoints.gguf.rotary import EXACT
from paceline.models.families.gemma4.config import AssistantConfig, GemmaConfig
from paceline.models.layers.decoder_config import DecoderConfig, Rotary
from paceline.models.layers.rotary import inverse_frequencies
from paceline.models.spec import FULL, SLIDING

ARCHITECTURES: Mapping[str, str] = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe",
    "gemma3": "gemma3", "gemma3_text": "gemma3", "smollm3": "smollm3", "olmo2": "olmo2", "olmo3": "olmo2",
    "granite": "granite", "ministral": "llama", "ministral3": "mistral3", "mistral3": "mistral3", "glm4": "glm4",
    "phi3": "phi3", "gpt_oss": "gpt-oss", "lfm2": "lfm2", "lfm2_moe": "lfm2moe", "mixtral": "llama",
    "qwen2_moe": "qwen2moe", "seed_oss": "seed_oss", "exaone4": "exaone4", "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5-moe", "granitemoehybrid": "granite", "gemma2": "gemma2", "cohere2": "cohere2",
}  # fmt: skip
NO_ROTATION = 1e30
Config = DecoderConfig | GemmaConfig | AssistantConfig
Values = dict[str, Any]


def architecture_of(config: Config) -> str:
    """GGUF's name for the family."""
    if isinstance(config, AssistantConfig):
        return "gemma4-assistant"
    return "gemma4" if isinstance(config, GemmaConfig) else ARCHITECTURES[config.model_type]


def metadata(config: Config) -> Values:
    """The values under the architecture's prefix."""
    if isinstance(config, AssistantConfig):
        return _gemma4(config.text) | {
            "embedding_length_out": config.backbone_hidden_size,
            "nextn_predict_layers": len(config.text.layers),
        }
    return _gemma4(config) if isinstance(config, GemmaConfig) else _decoder(config)


def context_of(config: DecoderConfig) -> int:
    """The longest text that is computed alike: most architectures know no window."""
    most = config.reach or config.max_len
    cut = config.window is not None and architecture_of(config) not in WINDOWED
    return min(most, config.window or most) if cut else most


def rotary_factors(config: Config) -> dict[str, NDArray[np.float32]]:
    """Tensors that say by what the frequency of each pair is divided; none where there is nothing to say."""
    if isinstance(config, DecoderConfig):
        rotary = config.rotary
        if rotary.kind == "longrope":
            both = {"long": rotary.long_divisors or rotary.divisors, "short": rotary.divisors}
            return {f"rope_factors_{name}.weight": np.array(x, np.float32) for name, x in both.items()}
        if rotary.kind != "llama3":
            return {}
        plain, scaled = (
            inverse_frequencies(r, config.head_dim) for r in (Rotary(config.rotary.theta), config.rotary)
        )
        return {"rope_freqs.weight": (plain.double() / scaled.double()).float().numpy()}
    text = config.text if isinstance(config, AssistantConfig) else config
    pairs = next(layer.head_dim for layer in text.layers if layer.kind == FULL) // 2
    factors = np.full(pairs, NO_ROTATION, np.float32)
    factors[: int(pairs * text.rope[FULL].partial)] = 1
    return {"rope_freqs.weight": factors}


def not_said(config: Config, read_back: Config) -> list[str]:
    """What of `config` is not in `found`, which was read from the GGUF file, although the arithmetic depends on it."""
    if isinstance(config, AssistantConfig) and isinstance(
        read_back, AssistantConfig
    ):  # its clusters only save time
        return not_said(config.text, read_back.text)
    skipped = {"model_type", "eos_token_ids", "modalities", "bidirectional"}  # the last two are of pictures
    skipped.add("fused")  # how matrices are stored
    if isinstance(config, DecoderConfig) and isinstance(read_back, DecoderConfig):
        skipped |= (
            {"max_len"} if architecture_of(config) in WINDOWED else {"max_len", "kinds", "window"}
        )  # see `context_of`
        turns, again = (
            inverse_frequencies(c.rotary, config.rotated or config.head_dim) for c in (config, read_back)
        )
        attention = math.isclose(config.rotary.attention, read_back.rotary.attention, rel_tol=EXACT)
        if attention and torch.allclose(turns, again, rtol=EXACT, atol=0):
            skipped.add("rotary")
    values = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in skipped}
    return [
        f"{name}={str(value)[:60]}"
        for name, value in values.items()
        if value != getattr(read_back, name, None)
    ]


def _decoder(config: DecoderConfig) -> Values:
    out = _common(config) | {
        "context_length": context_of(config),
        "block_count": len(config.kinds),
        "feed_forward_length": config.intermediate_size,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.rotated or config.head_dim,
        "rope.freq_base": config.rotary.theta,
    }
    out |= _scaling(config.rotary) | _particular(config)
    if config.centered:  # another norm has another key
        out["attention.layer_norm_epsilon"] = out.pop("attention.layer_norm_rms_epsilon")
    if config.query_growth:  # the multiplier says it, see conversion/mistral3.py of llama.cpp
        out.pop("rope.scaling.yarn_attn_factor", None)
    if config.moe is not None:
        out |= _experts(config.moe.experts, config.moe.top_k, config.moe.intermediate_size)
    return out


def _particular(config: DecoderConfig) -> Values:
    """What only some architectures have."""
    out: Values = {}
    if architecture_of(config) in WINDOWED and config.window is not None:
        out |= {
            "attention.sliding_window": config.window,
            "attention.sliding_window_pattern": [kind == SLIDING for kind in config.kinds],
        }
    if config.local_rotary is not None:
        out["rope.freq_base_swa"] = config.local_rotary.theta
    out |= _capped(config) | _centered(config)
    if architecture_of(config) == "phi3":
        out = {"attention.sliding_window": config.window or 0}  # of all layers
        out["rope.scaling.original_context_length"] = int(
            config.rotary.original if config.rotary.divisors else config.max_len
        )
        if config.rotary.divisors:
            out |= {"rope.scaling.type": "longrope", "rope.scaling.attn_factor": config.rotary.attention}
    if config.conv is not None:
        out |= {
            "attention.head_count_kv": [config.kv_heads if kind == FULL else 0 for kind in config.kinds],
            "shortconv.l_cache": config.conv.taps,
        }
    if architecture_of(config) == "lfm2moe" and config.routing is not None:
        dense = len(config.kinds) - len(config.sparse)
        out |= {"leading_dense_block_count": dense, "expert_gating_func": 2}
        if config.routing.factor != 1.0:
            out["expert_weights_scale"] = config.routing.factor
    if architecture_of(config) == "qwen2moe":
        out["expert_shared_feed_forward_length"] = config.shared_expert
    if config.query_growth:
        out |= {"attention.temperature_scale": config.query_growth, "rope.scaling.yarn_log_multiplier": 1.0}
    if architecture_of(config) == "ernie4_5-moe":
        out |= _ernie(config)
    if architecture_of(config) == "granite":
        out |= {
            "embedding_scale": config.embedding_scale,
            "attention.scale": config.attention_scale,
            "residual_scale": config.residual_scale,
            "logit_scale": 1.0 / config.logit_scale,
        }
    return out


def _capped(config: DecoderConfig) -> Values:
    """Where only one of both is capped, the file says neither, and it is refused."""
    if config.attention_softcap is None or config.softcap is None:
        return {}
    return {"attn_logit_softcapping": config.attention_softcap, "final_logit_softcapping": config.softcap}


def _centered(config: DecoderConfig) -> Values:
    return {"logit_scale": config.logit_scale, "rope.scaling.type": "none"} if config.centered else {}


def _ernie(config: DecoderConfig) -> Values:
    assert config.moe is not None
    sparse = sorted(config.sparse)
    return {
        "leading_dense_block_count": sparse[0] if sparse else len(config.kinds),
        "interleave_moe_layer_step": sparse[1] - sparse[0] if len(sparse) > 1 else 1,
        "expert_shared_count": config.shared_expert // config.moe.intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert,
    }


def _scaling(rotary: Rotary) -> Values:
    """Of rotary embeddings; what is usual for YaRN is left out, as llama.cpp's converter does."""
    if rotary.kind not in ("linear", "yarn"):
        return {}
    out: Values = {"rope.scaling.type": rotary.kind, "rope.scaling.factor": rotary.factor}
    if rotary.kind == "linear":
        return out
    out["rope.scaling.original_context_length"] = int(rotary.original)
    usual = 0.1 * math.log(max(rotary.factor, 1.0)) + 1.0
    values = {
        "yarn_attn_factor": (rotary.attention, usual),
        "yarn_beta_fast": (rotary.high, 32.0),
        "yarn_beta_slow": (rotary.low, 1.0),
    }
    return out | {f"rope.scaling.{name}": value for name, (value, known) in values.items() if value != known}


def _common(config: DecoderConfig | GemmaConfig) -> Values:
    return {
        "vocab_size": config.vocab_size,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.heads,
        "attention.layer_norm_rms_epsilon": config.eps,
    }


def _experts(count: int, used: int, width: int) -> Values:
    return {"expert_count": count, "expert_used_count": used, "expert_feed_forward_length": width}


def _gemma4(config: GemmaConfig) -> Values:
    full = next(layer for layer in config.layers if layer.kind == FULL)
    narrow = next((layer for layer in config.layers if layer.kind == SLIDING), full)
    out = _common(config) | {
        "context_length": config.max_len,
        "block_count": len(config.layers),
        "feed_forward_length": [layer.intermediate_size for layer in config.layers],
        "attention.head_count_kv": [layer.kv_heads for layer in config.layers],
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.key_length_swa": narrow.head_dim,
        "attention.value_length_swa": narrow.head_dim,
        "attention.sliding_window": config.window,
        "attention.sliding_window_pattern": [layer.kind == SLIDING for layer in config.layers],
        "attention.shared_kv_layers": len(config.shared_layers),
        "rope.freq_base": config.rope[FULL].theta,
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": narrow.head_dim,
        "embedding_length_per_layer_input": config.ple_size,
    }
    if SLIDING in config.rope:
        out["rope.freq_base_swa"] = config.rope[SLIDING].theta
    if config.softcap is not None:
        out["final_logit_softcapping"] = config.softcap
    if config.moe is not None:
        out |= _experts(config.moe.experts, config.moe.top_k, config.moe.intermediate_size)
    return out
