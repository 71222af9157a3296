"""Config and tensors of a GGUF file against the transformers model it was written from, and against SmolLM2's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from checkpoints import finish
from gguf_files import gguf_name, interleaved, state_of, write_gguf
from paceline.checkpoints.gguf.metadata import read_config
from paceline.checkpoints.gguf.names import NAMES, half_split_rows
from paceline.checkpoints.gguf.reader import Gguf
from paceline.checkpoints.gguf.rotary import llama3_scaling, rotating_share
from paceline.checkpoints.gguf.source import GgufCheckpoint
from paceline.errors import ConfigError, WeightsError
from paceline.kv.cache import KVCache
from paceline.models.registry import load_target
from paceline.ops import native
from paceline.ops.base import Runner
from paceline.ops.reference import EagerRunner
from real_models import smollm2_file

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip


def fields_of(config: Any) -> dict[str, object]:
    out: dict[str, object] = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim, "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }  # fmt: skip
    if getattr(config, "num_experts", 0):
        out |= {
            "expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }  # fmt: skip
    return out


def llama3_factors(config: Any) -> np.ndarray:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    d, theta = config.head_dim, config.rope_parameters["rope_theta"]
    return (1.0 / theta ** (np.arange(0, d, 2) / d) / scaled.numpy()).astype(np.float32)


def written(folder: Path, architecture: str, model: Any) -> Path:
    config, tensors = model.config, {}
    for name, value in state_of(model).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if ".experts." in name:
            at = f"blk.{name.split('.')[1]}"
            if name.endswith("gate_up_proj"):
                tensors[f"{at}.ffn_gate_exps.weight"], tensors[f"{at}.ffn_up_exps.weight"] = np.split(
                    value, 2, axis=1
                )
            else:
                tensors[f"{at}.ffn_down_exps.weight"] = value
            continue
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            value = interleaved(value, heads)
        tensors[gguf_name(name)] = np.ascontiguousarray(value)
    if config.rope_parameters["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(config)
    return write_gguf(folder / "m.gguf", architecture, fields_of(config), tensors)


MODELS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=False, rope_parameters=LLAMA3),
    "llama biased": lambda: transformers.LlamaConfig(
        **SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),
    "qwen3moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_config_and_tensors_are_those_it_was_written_from(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[kind]())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    found = GgufCheckpoint(written(tmp_path, kind.split()[0], model))
    again = type(model.config)(**found.config)
    optional = (
        "tie_word_embeddings", "attention_bias", "mlp_bias", "num_experts", "num_experts_per_tok",
        "moe_intermediate_size", "norm_topk_prob", "model_type", "mlp_only_layers", "decoder_sparse_step",
    )  # fmt: skip
    for name in (*SIZES, *optional):
        assert getattr(again, name, None) == getattr(model.config, name, None), name
    assert found.config["rms_norm_eps"] == 1e-5  # as written in a config, not the float32 beside it
    assert again.rope_parameters == {**model.config.rope_parameters}
    assert found.config["eos_token_id"] == [0, 3]
    expected = state_of(model)
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert set(found.pieces) == set(expected)
    for name, value in expected.items():
        assert found.pieces[name].shape == value.shape
        assert np.array_equal(found.floats(name), value), name


def test_quantized_rows_are_put_back_as_blocks(tmp_path: Path) -> None:
    """q of a llama in Q4_1: the moved blocks are those of the rows before the converter moved them."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((128, 64), np.float32), rng.standard_normal((64, 64), np.float32)
    kind = gguf.GGMLQuantizationType.Q4_1
    tensors = {
        "token_embd.weight": np.zeros((96, 64), np.float32),
        "blk.0.attn_q.weight": interleaved(q, 4), "blk.0.attn_k.weight": interleaved(k, 2),
    }  # fmt: skip
    fields = {"block_count": 1, "context_length": 9, "embedding_length": 64, "feed_forward_length": 96,
              "attention.head_count": 4, "attention.head_count_kv": 2}  # fmt: skip
    found = GgufCheckpoint(write_gguf(tmp_path / "m.gguf", "llama", fields, tensors, lambda *_: kind))
    for name, rows in (("q", q), ("k", k)):
        name = f"layers.0.self_attn.{name}_proj.weight"
        assert found.kind(name) == "Q4_1"
        assert np.array_equal(found.blocks(name), gguf.quants.quantize(rows, kind))
        assert np.array_equal(
            found.floats(name), gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind)
        )


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("high", "context"), [(4.0, 8192), (8.0, 4096)])
def test_the_scaling_of_llama_3_is_found_from_its_factors(
    factor: float, head_dim: int, high: float, context: int
) -> None:
    rope = LLAMA3 | {"factor": factor, "high_freq_factor": high, "original_max_position_embeddings": context}
    sizes = SIZES | {"head_dim": head_dim, "max_position_embeddings": 131072}
    factors = llama3_factors(transformers.LlamaConfig(**sizes, rope_parameters=rope))
    assert llama3_scaling(factors, head_dim, 500000.0) | {"rope_theta": 500000.0} == rope


def test_other_factors_are_not_taken_for_llama_3() -> None:
    assert llama3_scaling(np.linspace(1, 8, 64, dtype=np.float32), 128, 500000.0) is None
    assert llama3_scaling(np.ones(32, np.float32), 128, 500000.0) is None
    assert llama3_scaling(np.ones(64, np.float32), 128, 500000.0) == {"rope_type": "default"}


def test_the_share_of_pairs_that_rotates() -> None:
    assert rotating_share(np.array([1, 1, 1e30, 1e30, 1e30, 1e30, 1e30, 1e30], np.float32)) == 0.25
    assert rotating_share(np.array([1, 1e30, 1], np.float32)) is None
    assert rotating_share(np.array([1, 2, 1e30], np.float32)) is None


def broken(folder: Path, architecture: str = "llama", **changes: object) -> Path:
    fields: dict[str, object] = {
        "block_count": 1, "context_length": 9, "embedding_length": 64, "feed_forward_length": 96,
        "attention.head_count": 4,
    }  # fmt: skip
    fields |= {name.replace("__", "."): value for name, value in changes.items()}
    fields = {name: value for name, value in fields.items() if value is not None}
    return write_gguf(
        folder / "m.gguf", architecture, fields, {"token_embd.weight": np.zeros((96, 64), np.float32)}
    )


def test_an_unknown_architecture_is_named_with_those_that_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="architecture 'mamba'") as error:
        read_config(Gguf(broken(tmp_path, "mamba")))
    assert all(name in str(error.value) for name in NAMES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__type": "adapter"}, "is an adapter"),
        ({"block_count": None}, "lacks llama.block_count"),
        ({"context_length": "long"}, "no whole number"),
        ({"attention__head_count": 0}, "head_count is 0"),
        ({"expert_count": 8}, "lacks llama.expert_used_count"),
    ],
)
def test_metadata_that_cannot_be_used_is_one_line(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        read_config(Gguf(broken(tmp_path, **changes)))
    assert "\n" not in str(error.value)


def test_vision_parts_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vision part"):
        read_config(Gguf(broken(tmp_path, "clip")))


def test_a_tensor_of_another_name_is_said(tmp_path: Path) -> None:
    fields = {"block_count": 1, "context_length": 9, "embedding_length": 64, "feed_forward_length": 9,
              "attention.head_count": 4}  # fmt: skip
    tensors = {"token_embd.weight": np.zeros((9, 64), np.float32), "blk.0.ssm_a": np.zeros(4, np.float32)}
    with pytest.raises(WeightsError, match="ssm_a"):
        _ = GgufCheckpoint(write_gguf(tmp_path / "m.gguf", "llama", fields, tensors)).pieces


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({"rope.scale_linear": 4.0}, 4.0),  # of 2023
        ({"rope.scaling.factor": 2.0, "rope.scale_linear": 4.0}, 2.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, 8.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 8.0}, None),
        ({"rope.scale_linear": 1.0}, None),
        ({"rope.scale_linear": 0.0}, None),
        ({}, None),
    ],
)
def test_rotary_embeddings_are_scaled_as_llama_cpp_scales_them(
    keys: dict[str, object], factor: float | None, tmp_path: Path
) -> None:
    fields = {"block_count": 1, "context_length": 9, "embedding_length": 64, "feed_forward_length": 9,
              "attention.head_count": 4}  # fmt: skip
    path = write_gguf(
        tmp_path / "m.gguf", "llama", fields | keys, {"token_embd.weight": np.zeros((9, 64), np.float32)}
    )
    want = None if factor is None else {"rope_type": "linear", "factor": factor}
    assert GgufCheckpoint(path).config["rope_scaling"] == want


def test_smollm2_has_the_config_of_its_repository() -> None:
    """Values of HuggingFaceTB/SmolLM2-135M-Instruct's config.json."""
    config = GgufCheckpoint(smollm2_file()).config
    expected = {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "rope_theta": 100000.0,
        "rope_scaling": None, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "tie_word_embeddings": True,
        "attention_bias": False, "eos_token_id": [2],
    }  # fmt: skip
    assert {name: config[name] for name in expected} == expected


@torch.no_grad()
def logits_of(path: Path, tokens: list[int], runner: Runner) -> torch.Tensor:
    target = load_target(path, runner=runner)
    cache = KVCache(
        target.layout,
        dict.fromkeys(target.layout.kinds, 8),
        max_sequences=1,
        max_tokens=64,
        dtype=target.kv_dtype,
    )
    cache.open(0, tokens, share=False)
    with cache.tail([(0, tokens)]) as tail:
        logits = target.logits(target.forward(tail.rows(), cache)).clone()
        tail.commit([len(tokens)])
    return logits


@pytest.mark.parametrize("kind", MODELS)
def test_a_file_computes_what_its_folder_computes(kind: str, tmp_path: Path) -> None:
    """Written in float32, so the bits are those of the safetensors folder, and transformers' within rounding."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[kind](), attn_implementation="eager")
    finish(model, tmp_path / "folder")
    file = written(tmp_path, kind.split()[0], model)
    tokens = torch.randint(3, 96, (40,)).tolist()
    runner = native.NativeRunner(2) if native.available() else EagerRunner()
    got = logits_of(file, tokens, runner)
    if "rope_freqs.weight" not in {
        tensor.name for tensor in Gguf(file).tensors.values()
    }:  # factors are rounded there
        assert torch.equal(got, logits_of(tmp_path / "folder", tokens, runner))
    expected = model(torch.tensor([tokens])).logits[0]
    assert (got - expected).abs().max() < 1e-4


def test_scales_beside_nvfp4_are_multiplied_with(tmp_path: Path) -> None:
    """As llama.cpp writes ModelOpt's checkpoints: a number for each matrix, one for inputs, and none for others."""
    fields = {"block_count": 1, "context_length": 9, "embedding_length": 64, "feed_forward_length": 64,
              "attention.head_count": 4, "attention.head_count_kv": 4}  # fmt: skip
    rng, names = np.random.default_rng(2), ("attn_q", "attn_v", "ffn_up")
    tensors = {"token_embd.weight": rng.normal(size=(9, 64)).astype("f4")}
    tensors |= {f"blk.0.{name}.weight": rng.integers(0, 126, (64, 36), dtype=np.uint8) for name in names}
    tensors |= {"blk.0.attn_q.scale": np.array([0.37], "f4"), "blk.0.ffn_up.scale": np.array([3.0], "f4"),
                "blk.0.ffn_up.input_scale": np.array([7.0], "f4")}  # fmt: skip
    kinds = gguf.GGMLQuantizationType

    path = write_gguf(tmp_path / "m.gguf", "llama", fields, tensors,
                      lambda name, data: kinds.NVFP4 if data.dtype == np.uint8 else kinds.F32)  # fmt: skip
    checkpoint = GgufCheckpoint(path)
    assert not any("scale" in name for name in checkpoint.pieces)
    wanted = (("self_attn.q_proj", 0.37), ("self_attn.v_proj", None), ("mlp.up_proj", 3.0))
    for source, (name, factor) in zip(names, wanted):
        plain = checkpoint.model.floats(f"blk.0.{source}.weight")
        if source == "attn_q":  # its rows are turned back into halves
            plain = plain[half_split_rows(64, 4)]
        got, beside = (read(f"layers.0.{name}.weight") for read in (checkpoint.floats, checkpoint.beside))
        assert np.allclose(got, plain * np.float32(factor or 1), rtol=2e-7, atol=0), name
        assert (beside is None) == (factor is None)
        assert beside is None or (beside == np.float32(factor)).all()
