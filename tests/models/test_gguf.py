"""A GGUF file as target: config, weights and text are those of the folder it was written from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import paceline
from checkpoints import FAMILIES, build_target
from gguf_files import gguf_name, write_gguf
from paceline.checkpoints.gguf.source import GgufCheckpoint
from paceline.checkpoints.loading import SKIPPED, Tensors, Weights, canonical
from paceline.errors import UsageError, WeightsError
from paceline.hub.resolve import bundled, resolve
from paceline.models.config import parse_target, read_config
from paceline.models.families.gemma4.config import GemmaConfig
from paceline.models.families.gemma4.target import target_shapes
from paceline.ops import native
from paceline.ops.base import Weight
from paceline.ops.quantize import quantize, quantizer

FULL = "full_attention"


def tensors_of(folder: Path, config: GemmaConfig) -> dict[str, np.ndarray]:
    """As the converter writes them: without what is not of the language model, with the factors of partial rotation."""
    out = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, value in load_file(file).items():
            if not SKIPPED.match(canonical(name)) and not (config.tied and name.startswith("lm_head")):
                out[gguf_name(canonical(name), gemma=True)] = value.float().numpy()
    full = next(layer for layer in config.layers if layer.kind == FULL)
    factors = np.full(full.head_dim // 2, 1e30, np.float32)
    factors[: round(config.rope[FULL].partial * len(factors))] = 1
    return out | {"rope_freqs.weight": factors}


def fields_of(config: GemmaConfig) -> dict[str, object]:
    full = next(layer for layer in config.layers if layer.kind == FULL)
    narrow = next((layer for layer in config.layers if layer.kind != FULL), full)
    moe: dict[str, object] = {} if config.moe is None else {
        "expert_count": config.moe.experts, "expert_used_count": config.moe.top_k,
        "expert_feed_forward_length": config.moe.intermediate_size,
    }  # fmt: skip
    return moe | ({} if config.softcap is None else {"final_logit_softcapping": config.softcap}) | {
        "block_count": len(config.layers), "context_length": config.max_len, "embedding_length": config.hidden_size,
        "feed_forward_length": [layer.intermediate_size for layer in config.layers],
        "attention.head_count": config.heads, "attention.head_count_kv": [layer.kv_heads for layer in config.layers],
        "attention.key_length": full.head_dim, "attention.key_length_swa": narrow.head_dim,
        "attention.layer_norm_rms_epsilon": config.eps, "attention.sliding_window": config.window,
        "attention.sliding_window_pattern": [layer.kind != FULL for layer in config.layers],
        "attention.shared_kv_layers": sum(layer.shared for layer in config.layers),
        "rope.freq_base": config.rope[FULL].theta,
        "rope.freq_base_swa": config.rope["sliding_attention"].theta,
        "embedding_length_per_layer_input": config.ple_size,
    }  # fmt: skip


def written(folder: Path, file: Path, kind_of: Any = None) -> Path:
    config = parse_target(read_config(folder))
    return write_gguf(file, "gemma4", fields_of(config), tensors_of(folder, config), kind_of)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_gemma_from_gguf_is_the_gemma_of_the_folder(family: str, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    build_target(family, folder)
    file = written(folder, tmp_path / "m.gguf")
    expected, found = parse_target(read_config(folder)), parse_target(read_config(file))
    # a GGUF file says these in its own way, or in a file of pictures
    same = {"model_type": "", "modalities": (), "eos_token_ids": (), "bidirectional": False}
    assert replace(found, **same) == replace(expected, **same)
    shared = [i for i, layer in enumerate(expected.layers) if layer.shared]
    one, other = (Tensors(path, target_shapes(expected), shared, expected.tied) for path in (folder, file))
    for name in list(one.entries):
        assert torch.equal(one.take(name).float(), other.take(name)), name


def test_the_text_is_that_of_the_folder(tmp_path: Path) -> None:
    file = written(bundled("target"), tmp_path / "demo.gguf")
    options: dict[str, Any] = {"drafter": "none", "max_model_len": 256}
    ids = [2, 700, 701, 702, 1200]
    params = paceline.SamplingParams(max_tokens=24, temperature=0)
    from_folder = paceline.LLM("demo", dtype="float32", **options).generate(ids, params)[0]
    from_file = paceline.LLM(str(file), **options).generate(ids, params)[0]
    assert len(from_file.token_ids) > 4
    assert from_file.token_ids == from_folder.token_ids


Q = gguf.GGMLQuantizationType


def in_blocks(name: str, data: np.ndarray) -> gguf.GGMLQuantizationType:
    """The mix of a Q4_1 file: its table is Q8_0."""
    if data.ndim != 2 or data.shape[-1] % 32:
        return Q.F32
    return Q.Q8_0 if "embd" in name else Q.Q5_0 if "attn_v" in name else Q.Q4_1


def test_a_file_in_blocks_writes_the_text_of_the_values_they_stand_for(tmp_path: Path) -> None:
    file = written(bundled("target"), tmp_path / "demo.gguf", in_blocks)
    options: dict[str, Any] = {"drafter": "ngram", "max_model_len": 256}
    ids = [2, 700, 701, 702, 1200]
    params = paceline.SamplingParams(max_tokens=24, temperature=0, logprobs=2)
    found = {}
    for activations in ("auto", "float32"):
        for dtype in ("auto", "float32"):  # float32: the weights are widened when they are loaded
            llm = paceline.LLM(str(file), activations=activations, dtype=dtype, **options)
            (found[activations, dtype],) = llm.generate(ids, params)
            table = llm.engine.state.target.embedding
            assert table.kind == ("q8_0" if dtype == "auto" and native.available() else "float32")
    exact = found["float32", "auto"]
    for widened in (found["auto", "float32"], found["float32", "float32"]):
        assert exact.token_ids == widened.token_ids
        assert [p.raw for p in exact.logprobs or ()] == [p.raw for p in widened.logprobs or ()]
    rounded = found["auto", "auto"]
    assert len(rounded.token_ids) > 4
    (first, wanted) = (c.logprobs[0].raw for c in (rounded, exact) if c.logprobs)
    assert abs(first - wanted) < 0.1
    if native.available():
        assert first != wanted


def test_blocks_stay_unless_something_is_done_to_them(tmp_path: Path) -> None:
    file = written(bundled("target"), tmp_path / "m.gguf", in_blocks)
    config = parse_target(read_config(file))
    shared = [i for i, layer in enumerate(config.layers) if layer.shared]
    name, raw = "layers.0.mlp.up_proj", GgufCheckpoint(file).model.raw("blk.0.ffn_up.weight")
    cpu = torch.device("cpu")

    def load(**options: Any) -> Weight:
        tensors = Tensors(file, target_shapes(config), shared, config.tied)
        weight: Weight = Weights(tensors, cpu, **options).matrix(name)
        assert f"{name}.weight" not in tensors.entries
        return weight

    kept = load(blocks=True)
    assert kept.kind == "q4_1"
    assert np.array_equal(kept.data.numpy(), raw)
    assert load(blocks=True, dtype=torch.bfloat16).kind == "bfloat16"
    assert load(blocks=True, transform=quantizer("int8")).kind == "int8"
    assert load().kind == "float32"


def test_blocks_are_loaded_as_the_values_they_stand_for(tmp_path: Path) -> None:
    q8 = gguf.GGMLQuantizationType.Q8_0
    file = written(
        bundled("target"),
        tmp_path / "m.gguf",
        lambda name, data: q8 if data.ndim == 2 else gguf.GGMLQuantizationType.F32,
    )
    config = parse_target(read_config(file))
    shared = [i for i, layer in enumerate(config.layers) if layer.shared]
    tensors = Tensors(file, target_shapes(config), shared, config.tied)
    assert tensors.entries["layers.0.mlp.up_proj.weight"].dtype == "Q8_0"
    raw = GgufCheckpoint(file).model.raw("blk.0.ffn_up.weight")
    weight = Weights(tensors, torch.device("cpu")).matrix("layers.0.mlp.up_proj")
    assert weight.kind == "float32"
    assert np.array_equal(weight.data.numpy(), gguf.quants.dequantize(raw, q8))
    # floats of another model's matrix become what the own ones do; blocks stay as they are
    other = Weights(tensors, weight.data.device, None, quantizer("int8"))
    made = other.remade("up_proj", weight)
    assert made.kind == "int8"
    assert torch.equal(made.data, quantize(weight.data, "int8").data)
    blocks = Weight(torch.from_numpy(raw), "q8_0")
    assert other.remade("up_proj", blocks) is blocks
    assert Weights(tensors, weight.data.device).remade("up_proj", weight) is weight


def test_a_file_and_its_folder_are_the_same_name(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    assert resolve(file, "target") == resolve(tmp_path, "target") == file
    (tmp_path / "mmproj-m.gguf").write_bytes(b"GGUF")
    assert resolve(tmp_path, "target") == file
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(UsageError, match="holds 2 GGUF models"):
        resolve(tmp_path, "target")
    assert resolve(file, "adapter") == file


def test_a_split_model_in_a_folder_is_one(tmp_path: Path) -> None:
    for part in (1, 2):
        (tmp_path / f"m-{part:05d}-of-00002.gguf").write_bytes(b"GGUF")
    assert resolve(tmp_path, "target").name == "m-00001-of-00002.gguf"


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(9))
    with pytest.raises(WeightsError, match="only 13 bytes"):
        paceline.LLM(str(tmp_path / "m.gguf"))
