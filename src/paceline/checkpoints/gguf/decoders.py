"""The metadata of plain decoders -> their config.json: Llama and its relatives, Qwen, Gemma 3, OLMo, Granite."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from paceline.checkpoints.gguf.keys import FULL, SLIDING, Config, Keys, decoder, round_trip
from paceline.drafter_kinds import DFLASH, EAGLE3
from paceline.errors import ConfigError


def _llama(keys: Keys) -> Config:
    if keys.size("expert_count", 0):
        return decoder(keys, "mixtral", "MixtralForCausalLM") | {
            "num_local_experts": keys.size("expert_count"),
            "num_experts_per_tok": keys.size("expert_used_count"),
            "sliding_window": None,
        }
    return decoder(keys, "llama", "LlamaForCausalLM") | {
        "attention_bias": keys.has("blk.0.attn_q.bias"),
        "mlp_bias": keys.has("blk.0.ffn_gate.bias"),
    }


def _qwen2(keys: Keys) -> Config:
    return decoder(keys, "qwen2", "Qwen2ForCausalLM") | {"use_sliding_window": False}


def _qwen3(keys: Keys) -> Config:
    return decoder(keys, "qwen3", "Qwen3ForCausalLM") | {
        "attention_bias": False,
        "use_sliding_window": False,
    }


def _qwen3moe(keys: Keys) -> Config:
    return decoder(keys, "qwen3_moe", "Qwen3MoeForCausalLM") | {
        "attention_bias": False,
        "use_sliding_window": False,
        "num_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp's graph of qwen3moe always normalises
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2moe(keys: Keys) -> Config:
    return decoder(keys, "qwen2_moe", "Qwen2MoeForCausalLM", sparse=True) | {
        "qkv_bias": keys.has("blk.0.attn_q.bias"),
        "use_sliding_window": False,
        "num_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,  # llama.cpp's graph of qwen2moe never normalises
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen35moe(keys: Keys) -> Config:
    return _qwen35(keys, "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM") | {
        "num_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length"),
    }


def _qwen35(keys: Keys, model_type: str = "qwen3_5_text", name: str = "Qwen3_5ForCausalLM") -> Config:
    config = decoder(keys, model_type, name, sparse="moe" in model_type)
    values, modules = keys.size("ssm.time_step_rank"), keys.size("nextn_predict_layers", 0)
    count = config["num_hidden_layers"] - modules
    recurrent = keys.get("attention.recurrent_layers")
    kinds = None
    if isinstance(recurrent, np.ndarray) and len(recurrent) >= count:
        kinds = ["linear_attention" if is_recurrent else FULL for is_recurrent in recurrent[:count].tolist()]
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


def _windows(keys: Keys, count: int, every: int) -> Config:
    """`layer_types` and `sliding_window`; `every`: a layer without a window, where the file does not say which."""
    window = keys.size("attention.sliding_window", 0)
    pattern = keys.get("attention.sliding_window_pattern", every)
    if isinstance(pattern, np.ndarray):
        slides = [
            bool(is_sliding) for is_sliding in keys.per_layer("attention.sliding_window_pattern", count)
        ]
    else:
        every = keys.size("attention.sliding_window_pattern", every)
        slides = [every < 1 or i % every < every - 1 for i in range(count)]
    kinds = [SLIDING if is_sliding and window else FULL for is_sliding in slides]
    return {"layer_types": kinds, "sliding_window": window or None}


def _two_rotaries(keys: Keys, config: Config, local: float) -> Config:
    """The same with rotary embeddings for each kind of layer; those with a window are never scaled."""
    theta, scaling = config.pop("rope_theta"), config.pop("rope_scaling")
    plain = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", local)}
    return config | {
        "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": theta} | (scaling or {}),
            SLIDING: plain,
        }
    }


def _gemma3(keys: Keys) -> Config:
    config = _two_rotaries(keys, decoder(keys, "gemma3_text", "Gemma3ForCausalLM"), 10_000.0)
    del config["hidden_act"]
    count, heads = config["num_hidden_layers"], config["num_attention_heads"]
    softcap = keys.get("final_logit_softcapping")
    return config | _windows(keys, count, 6) | {
        "hidden_activation": "gelu_pytorch_tanh",
        # as llama.cpp has it: the file does not say it, and 62 layers are those of the 27B
        "query_pre_attn_scalar": config["hidden_size"] // heads if count == 62 else config["head_dim"],
        "final_logit_softcapping": None if softcap is None else round_trip(softcap),
    }  # fmt: skip


def _gemma2(keys: Keys) -> Config:
    config = decoder(keys, "gemma2", "Gemma2ForCausalLM")
    del config["hidden_act"]
    count, heads = config["num_hidden_layers"], config["num_attention_heads"]
    return config | _windows(keys, count, 2) | {
        "hidden_activation": "gelu_pytorch_tanh",
        # as llama.cpp has it: the file does not say it, and 46 layers are those of the 27B
        "query_pre_attn_scalar": config["hidden_size"] // heads if count == 46 else config["head_dim"],
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }  # fmt: skip


def _cohere2(keys: Keys) -> Config:
    config = decoder(keys, "cohere2", "Cohere2ForCausalLM")
    del config["rms_norm_eps"]
    return config | _windows(keys, config["num_hidden_layers"], 4) | {
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon", 1e-5),
        "logit_scale": keys.number("logit_scale", 1.0),
        "attention_bias": False,
        "rotary_pct": _share(keys, config),
    }  # fmt: skip


def _smollm3(keys: Keys) -> Config:
    config = decoder(keys, "smollm3", "SmolLM3ForCausalLM")
    turned = [int((i + 1) % 4 != 0) for i in range(config["num_hidden_layers"])]  # llama.cpp knows no other
    return config | {"no_rope_layers": turned, "use_sliding_window": False}


def _olmo2(keys: Keys) -> Config:
    """OLMo 3 is an OLMo 2 with windows."""
    config = decoder(keys, "olmo2", "Olmo2ForCausalLM") | {"attention_bias": False}
    if not keys.size("attention.sliding_window", 0):
        return config
    config = _two_rotaries(keys, config, config["rope_theta"])
    named = {"model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"]}
    return config | _windows(keys, config["num_hidden_layers"], 4) | named


def _granite(keys: Keys) -> Config:
    if keys.get("rope.scaling.finetuned", True) is False:
        raise ConfigError(
            f"{keys.model.path} is a Granite without rotary embeddings, which paceline does not run: use another file"
        )
    config = decoder(keys, "granite", "GraniteForCausalLM")
    return (
        config
        | {
            "attention_bias": keys.has("blk.0.attn_q.bias"),
            "mlp_bias": keys.has("blk.0.ffn_gate.bias"),
        }
        | _multipliers(keys, int(config["head_dim"]))
    )


def _multipliers(keys: Keys, head_dim: int) -> Config:
    return {
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "attention_multiplier": keys.number("attention.scale", head_dim**-0.5),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }


def _granitehybrid(keys: Keys) -> Config:
    """Granite 4 with layers of Mamba: those that have no K/V heads."""
    config = decoder(keys, "granitemoehybrid", "GraniteMoeHybridForCausalLM", sparse=True)
    count, experts = config["num_hidden_layers"], keys.size("expert_count", 0)
    kv_heads = keys.per_layer("attention.head_count_kv", count)
    mlp = "blk.0.ffn_gate_shexp.weight" if experts else "blk.0.ffn_gate.weight"
    return (
        config
        | {
            "num_key_value_heads": max(kv_heads, default=0),
            "layer_types": ["attention" if heads else "mamba" for heads in kv_heads],
            "position_embedding_type": "rope" if keys.get("rope.scaling.finetuned", False) else "nope",
            "shared_intermediate_size": keys.shape(mlp)[0],
            "num_local_experts": experts,
            "num_experts_per_tok": keys.size("expert_used_count", 0),
            "mamba_n_heads": keys.size("ssm.time_step_rank"),
            "mamba_n_groups": keys.size("ssm.group_count"),
            "mamba_d_state": keys.size("ssm.state_size"),
            "mamba_d_conv": keys.size("ssm.conv_kernel"),
            "mamba_expand": keys.size("ssm.inner_size") // max(int(config["hidden_size"]), 1),
            "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in keys.model.tensors),
            "gguf_layout": True,  # see parse_granite
        }
        | _multipliers(keys, int(config["head_dim"]))
    )


def _nemotron_h(keys: Keys) -> Config:
    """Layers are attention where they have K/V heads, MLPs or experts where they have an inner width, else Mamba."""
    config = decoder(keys, "nemotron_h", "NemotronHForCausalLM", sparse=True)
    if keys.size("nextn_predict_layers", 0):
        raise ConfigError(
            f"{keys.model.path} has a block for multi-token prediction behind its layers, which is not read of a "
            "nemotron_h_moe: get a file of it that was converted without that block"
        )
    count = config["num_hidden_layers"]
    kv_heads, widths = (
        keys.per_layer(name, count) for name in ("attention.head_count_kv", "feed_forward_length")
    )
    heads = keys.size("ssm.time_step_rank")
    return config | {
        "num_key_value_heads": max(kv_heads, default=0),
        "intermediate_size": max(widths, default=0),
        "layers_block_type": [
            "attention" if own else "mamba" if not width else
            "moe" if keys.has(f"blk.{i}.ffn_gate_inp.weight") else "mlp"
            for i, (own, width) in enumerate(zip(kv_heads, widths, strict=True))
        ],
        "layer_norm_epsilon": config.pop("rms_norm_eps"),
        "hidden_act": None,
        "mlp_bias": any(name.endswith("ffn_up.bias") for name in keys.model.tensors),
        "mamba_num_heads": heads,
        "mamba_head_dim": keys.size("ssm.inner_size") // max(heads, 1),
        "n_groups": keys.size("ssm.group_count"),
        "ssm_state_size": keys.size("ssm.state_size"),
        "conv_kernel": keys.size("ssm.conv_kernel"),
        "use_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in keys.model.tensors),
        "gguf_layout": True,  # see parse_granite
    } | (_experts_of_nemotron(keys) if keys.size("expert_count", 0) else {})  # fmt: skip


def _experts_of_nemotron(keys: Keys) -> Config:
    return _routed(keys) | {
        "moe_shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length"),
        "moe_latent_size": keys.size("moe_latent_size", 0) or None,
    }


def _mistral3(keys: Keys) -> Config:
    config = decoder(keys, "mistral", "MistralForCausalLM") | {"sliding_window": None}
    beta = keys.number("attention.temperature_scale", 0.0)
    scaling = config.pop("rope_scaling")
    if scaling and keys.get("rope.scaling.yarn_log_multiplier") is not None:
        scaling |= {"mscale": 1.0, "mscale_all_dim": keys.number("rope.scaling.yarn_log_multiplier", 1.0)}
    if not beta:
        return config | {"rope_scaling": scaling}
    rope = {"rope_theta": config.pop("rope_theta"), **(scaling or {}), "llama_4_scaling_beta": beta}
    return config | {
        "model_type": "ministral3",
        "architectures": ["Ministral3ForCausalLM"],
        "rope_parameters": rope,
    }


def _share(keys: Keys, config: Config) -> float:
    """The share of a head that is rotated."""
    return keys.size("rope.dimension_count", config["head_dim"]) / max(int(config["head_dim"]), 1)


def _glm4(keys: Keys) -> Config:
    if keys.get("rope.dimension_sections") is not None:
        raise ConfigError(
            f"{keys.model.path} is the text side of a GLM that sees, which paceline does not run: use a GLM-4 for text"
        )
    config = decoder(keys, "glm4", "Glm4ForCausalLM")
    rope = {"rope_type": "default", "rope_theta": config.pop("rope_theta")} | (
        config.pop("rope_scaling") or {}
    )
    return config | {
        "attention_bias": keys.has("blk.0.attn_q.bias"),
        "rope_parameters": rope | {"partial_rotary_factor": _share(keys, config)},
    }


def _phi3(keys: Keys) -> Config:
    config = decoder(keys, "phi3", "Phi3ForCausalLM")
    original = keys.size("rope.scaling.original_context_length", config["max_position_embeddings"])
    rope: Config = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    del config["rope_scaling"]
    if keys.has("rope_factors_short.weight"):
        rope["rope_type"] = "longrope"
        for which in ("short", "long"):
            keys.shape(name := f"rope_factors_{which}.weight")
            rope[f"{which}_factor"] = [round_trip(float(x)) for x in keys.model.floats(name).ravel()]
        if keys.get("rope.scaling.attn_factor") is not None:
            rope["attention_factor"] = keys.number("rope.scaling.attn_factor", 1.0)
    return config | {
        "rope_parameters": rope | {"partial_rotary_factor": _share(keys, config)},
        "original_max_position_embeddings": original,
        "sliding_window": keys.size("attention.sliding_window", 0) or None,
    }


def _qwen3next(keys: Keys) -> Config:
    config = _qwen35moe(keys) | {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}
    return config | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _routed(keys: Keys) -> Config:
    """Experts by sigmoids and a bias, as DeepSeek-V3 and GLM-4-MoE have them."""
    if keys.size("expert_gating_func", 2) != 2:
        raise ConfigError(
            f"{keys.model.path} chooses experts by another function than sigmoids (DeepSeek-V2, Kimi-VL and others), "
            "which paceline does not run: use DeepSeek-V3"
        )
    return {
        "n_routed_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "n_shared_experts": keys.size("expert_shared_count", 0),
        "first_k_dense_replace": keys.size("leading_dense_block_count", 0),
        "norm_topk_prob": bool(keys.get("expert_weights_norm", False)),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "n_group": keys.size("expert_group_count", 1),
        "topk_group": keys.size("expert_group_used_count", 1),
    }


def _deepseek2(keys: Keys) -> Config:
    config = decoder(keys, "deepseek_v3", "DeepseekV3ForCausalLM") | _routed(keys)
    rotated = keys.size("rope.dimension_count")
    scaling = config["rope_scaling"]
    if scaling and keys.get("rope.scaling.yarn_log_multiplier") is not None:
        grows = round(
            keys.number("rope.scaling.yarn_log_multiplier", 0.1) / 0.1, 6
        )  # the converter writes a tenth
        config["rope_scaling"] = scaling | {"mscale": grows, "mscale_all_dim": grows}
    return config | {
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rotated,
        "q_lora_rank": keys.size("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": keys.size("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys.size("attention.key_length_mla") - rotated,
        "v_head_dim": keys.size("attention.value_length_mla"),
        "rope_interleave": True,
        "attention_bias": False,
    }


def _glm4moe(keys: Keys) -> Config:
    modules = keys.size("nextn_predict_layers", 0)
    config = decoder(keys, "glm4_moe", "Glm4MoeForCausalLM") | _routed(keys)
    return config | {
        "num_hidden_layers": config["num_hidden_layers"] - modules,
        "num_nextn_predict_layers": modules,
        "attention_bias": keys.has("blk.0.attn_q.bias"),
        "use_qk_norm": keys.has("blk.0.attn_q_norm.weight"),
        "partial_rotary_factor": _share(keys, config),
    }


def _gpt_oss(keys: Keys) -> Config:
    config = decoder(keys, "gpt_oss", "GptOssForCausalLM", sparse=True)
    scaling = config.pop("rope_scaling")
    rope = (
        {"rope_type": "default"} if scaling is None else scaling | {"truncate": False}
    )  # files do not say it
    return config | _windows(keys, config["num_hidden_layers"], 2) | {
        "attention_bias": keys.has("blk.0.attn_q.bias"),
        "intermediate_size": keys.size("expert_feed_forward_length"),
        "num_local_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "rope_parameters": {"rope_theta": config.pop("rope_theta"), **rope},
    }  # fmt: skip


def _lfm2(keys: Keys) -> Config:
    config = decoder(keys, "lfm2", "Lfm2ForCausalLM")
    heads = keys.per_layer("attention.head_count_kv", config["num_hidden_layers"])  # 0 of convolutions
    return config | {
        "norm_eps": config["rms_norm_eps"],
        "num_key_value_heads": max(heads, default=0),
        "layer_types": [FULL if count else "conv" for count in heads],
        "conv_L_cache": keys.size("shortconv.l_cache"),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2moe(keys: Keys) -> Config:
    if keys.size("expert_gating_func", 2) != 2:
        raise ConfigError(
            f"{keys.model.path} chooses experts by another function than sigmoids: get another GGUF file"
        )
    return _lfm2(keys) | {
        "model_type": "lfm2_moe",
        "architectures": ["Lfm2MoeForCausalLM"],
        "num_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "num_dense_layers": keys.size("leading_dense_block_count"),
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
    }


def _seed_oss(keys: Keys) -> Config:
    return decoder(keys, "seed_oss", "SeedOssForCausalLM") | {
        "attention_bias": keys.has("blk.0.attn_q.bias"),
        "attention_out_bias": keys.has("blk.0.attn_output.bias"),
        "mlp_bias": False,
    }


def _exaone4(keys: Keys) -> Config:
    config = decoder(keys, "exaone4", "Exaone4ForCausalLM")
    return config | _windows(keys, config["num_hidden_layers"], 4)


def _ernie4_5(keys: Keys) -> Config:
    return decoder(keys, "ernie4_5", "Ernie4_5ForCausalLM") | {"use_bias": False}


def _ernie4_5_moe(keys: Keys) -> Config:
    return decoder(keys, "ernie4_5_moe", "Ernie4_5_MoeForCausalLM") | {
        "use_bias": False,
        "moe_num_experts": keys.size("expert_count"),
        "moe_k": keys.size("expert_used_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "moe_num_shared_experts": keys.size("expert_shared_count", 0),
        "moe_layer_start_index": keys.size("leading_dense_block_count", 0),
        "moe_layer_interval": keys.size("interleave_moe_layer_step", 1),
    }


def _eagle3(keys: Keys) -> Config:
    """An EAGLE-3 drafter, as its original config.json has it."""
    taps, rows = keys.get("target_layers"), "output.weight"
    config = decoder(keys, "llama", "LlamaForCausalLMEagle3")
    config |= {
        "target_hidden_size": keys.size("target_hidden_size"),
        "norm_before_residual": bool(keys.get("norm_before_residual", False)),
        "norm_before_fc": bool(keys.get("norm_before_fc", False)),
        "draft_vocab_size": keys.shape(rows)[0] if keys.has(rows) else config["vocab_size"],
    }
    layers = taps.tolist() if isinstance(taps, np.ndarray) else taps
    return config | ({} if layers is None else {"eagle_aux_hidden_state_layer_ids": layers})


def _dflash(keys: Keys) -> Config:
    """DFlash, DFlash 2 or DSpark, as the original config.json of it. Which one, its tensors say."""
    config = decoder(keys, "qwen3", "DFlashDraftModel")
    count, rows = config["num_hidden_layers"], "output.weight"
    taps, mask = keys.need("target_layers"), keys.model.get("tokenizer.ggml.mask_token_id")
    layers = taps.tolist() if isinstance(taps, np.ndarray) else list(taps)
    anchored = keys.get("sample_from_anchor")
    width = keys.shape("fc.weight")[1] // max(len(layers), 1)
    ranked = keys.has("markov_w1.weight")
    config |= {
        "tie_word_embeddings": True, "block_size": keys.size("block_size", 16),
        "is_causal": bool(keys.get("attention.causal")),
        "target_hidden_size": width, "sample_from_anchor": ranked if anchored is None else bool(anchored),
        "draft_vocab_size": next(
            (keys.shape(name)[0] for name in (rows, "d2t", "markov_w2.weight") if keys.has(name)), config["vocab_size"]
        ),
        "dflash_config": {
            "mask_token_id": None if mask is None else int(mask),
            "target_layer_ids": [int(layer) - 1 for layer in layers],
        },
    }  # fmt: skip
    window = keys.get("attention.sliding_window")
    if window:
        kinds = keys.per_layer("attention.sliding_window_pattern", count)
        config |= {
            "sliding_window": int(window), "use_sliding_window": True,
            "layer_types": [SLIDING if slides else FULL for slides in kinds],
        }  # fmt: skip
    if ranked:
        return config | {"architectures": ["Qwen3DSparkModel"]} | _markov(keys, config["hidden_size"])
    return config | (_path_selector(keys, config) if keys.has("selector_hidden.weight") else {})


def _markov(keys: Keys, hidden: int) -> Config:
    confident = keys.has("conf_proj.weight")
    return {
        "markov_rank": keys.shape("markov_w1.weight")[1],
        "markov_head_type": "vanilla",
        "enable_confidence_head": confident,
        "confidence_head_with_markov": confident and keys.shape("conf_proj.weight")[-1] > hidden,
    }


def _path_selector(keys: Keys, config: Config) -> Config:
    scale, cap = keys.get("logit_scale"), keys.get("final_logit_softcapping")
    inner: Config = {
        name: keys.size(name)
        for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    }
    inner |= {} if not scale else {"output_multiplier": round_trip(scale)}
    inner |= {} if not cap else {"final_logit_softcapping": round_trip(cap)}
    return {
        "architectures": ["DFlash2DraftModel"],
        "sample_from_anchor": config["sample_from_anchor"] or None,
        "dflash_config": config["dflash_config"] | inner,
    }


DECODERS: Mapping[str, Callable[[Keys], Config]] = {
    "llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3, "qwen3moe": _qwen3moe, "qwen35": _qwen35, "qwen35moe": _qwen35moe,
    "gemma3": _gemma3, "smollm3": _smollm3, "olmo2": _olmo2, "granite": _granite, "granitehybrid": _granitehybrid,
    "nemotron_h": _nemotron_h, "nemotron_h_moe": _nemotron_h,
    "mistral3": _mistral3, "glm4": _glm4, "phi3": _phi3,
    "qwen2moe": _qwen2moe, "lfm2": _lfm2, "lfm2moe": _lfm2moe, "seed_oss": _seed_oss, "exaone4": _exaone4,
    "ernie4_5": _ernie4_5, "ernie4_5-moe": _ernie4_5_moe, "gemma2": _gemma2, "cohere2": _cohere2,
    "gpt-oss": _gpt_oss, "qwen3next": _qwen3next, "deepseek2": _deepseek2, "glm4moe": _glm4moe,
    EAGLE3.gguf: _eagle3, DFLASH.gguf: _dflash,
}  # fmt: skip
