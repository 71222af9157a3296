"""Qwen3.5 and its relatives beside transformers: long texts, files as they are published, configs that cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from checkpoints import VOCAB
from decoders import HYBRID, build_decoder
from layouts import edit
from mtp_files import build_mtp
from paceline import LLM, SamplingParams
from paceline.convert.quantized import save_quantized
from paceline.convert.to_gguf import write_gguf
from paceline.errors import ConfigError, UsageError, WeightsError
from paceline.kv.cache import KVCache
from paceline.models.inspection import inspect
from paceline.models.registry import load_target
from paceline.models.target import GraphTarget
from paceline.ops import native
from paceline.ops.base import Runner
from paceline.ops.quantize import quantizer
from paceline.ops.reference import EagerRunner

NAMES = ["qwen3_5", "qwen3_5-moe", "qwen3_next"]
LENGTH = 150
TEXT = torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(7)).tolist()


def runner() -> Runner:
    return native.NativeRunner(2) if native.available() else EagerRunner()


def logits_of(target: GraphTarget, text: list[int], chunk: int) -> torch.Tensor:
    pages = dict.fromkeys(target.layout.kinds, 12)
    cache = KVCache(target.layout, pages, max_sequences=1, max_tokens=192, dtype=target.kv_dtype)
    cache.open(0, text, share=False)
    parts = []
    for start in range(0, len(text), chunk):
        with cache.tail([(0, text[start : start + chunk])]) as tail:
            parts.append(target.logits(target.forward(tail.rows(), cache)).clone())
            tail.commit([len(text[start : start + chunk])])
    return torch.cat(parts)


@torch.no_grad()
def worst(theirs: Any, target: GraphTarget, chunk: int) -> float:
    expected = theirs(torch.tensor([TEXT])).logits[0]
    assert expected.std() > 0.5
    return float((logits_of(target, TEXT, chunk) - expected).abs().max())


@pytest.mark.parametrize("name", NAMES)
def test_a_long_text_has_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = build_decoder(name, tmp_path)
    target = load_target(tmp_path, runner=runner())
    for chunk in (1, 7, LENGTH):
        assert worst(theirs, target, chunk) < 1e-4


def nested(folder: Path) -> None:
    """The files as Qwen publishes them: text beside vision, the language model under its prefix."""
    config, file = json.loads((folder / "config.json").read_text()), folder / "model.safetensors"
    text = config | {"model_type": "qwen3_5_text"}
    top = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 1}, "eos_token_id": 7,
           "architectures": ["Qwen3_5ForConditionalGeneration"], "tie_word_embeddings": False}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(top))
    (folder / "generation_config.json").unlink()
    tensors = {name.replace("model.", "model.language_model.", 1): t for name, t in load_file(file).items()}
    save_file(tensors | {"model.visual.blocks.0.attn.qkv.weight": torch.ones(4, 4)}, file)


def test_a_multimodal_folder_is_read_as_its_language_model(tmp_path: Path) -> None:
    theirs = build_decoder("qwen3_5", tmp_path)
    nested(tmp_path)
    target = load_target(tmp_path, runner=runner())
    assert worst(theirs, target, 64) < 1e-4
    assert target.eos_token_ids == (7,)
    found = inspect(tmp_path)
    assert (found.unsupported, found.skipped) == ([], {"visual": 64})
    assert found.layers == "5 (3 linear, 2 full)"
    assert found.state_bytes == target.layout.bytes_per_state() > 0


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_folders(kind: Any, tmp_path: Path) -> None:
    build_decoder("qwen3_5", tmp_path / "whole", hidden_size=64, linear_value_head_dim=16)
    save_quantized(tmp_path / "whole", tmp_path / kind, kind)
    want = logits_of(load_target(tmp_path / "whole", transform=quantizer(kind)), TEXT[:40], 40)
    assert torch.equal(logits_of(load_target(tmp_path / kind), TEXT[:40], 40), want)
    assert (
        inspect(tmp_path / kind).dtypes.keys() == {"int8": {"F32", "I8"}, "int4": {"F32", "I8", "U8"}}[kind]
    )


def test_bfloat16_weights_and_packed_keys(tmp_path: Path) -> None:
    build_decoder("qwen3_5", tmp_path, head_dim=32).to(torch.bfloat16).save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    if not native.available():
        pytest.skip("not built")
    exact = load_target(tmp_path, runner=native.NativeRunner(2, exact=True))
    assert worst(theirs, exact, 7) < 1e-4
    fast = load_target(tmp_path, runner=native.NativeRunner(2))
    assert fast.kv_dtype == ("packed" if native.bf16_dot() else torch.float32)
    assert torch.equal(logits_of(fast, TEXT, 7), logits_of(fast, TEXT, 64))


def test_the_front_door(tmp_path: Path) -> None:
    build_decoder("qwen3_5", tmp_path)
    llm = LLM(str(tmp_path), drafter="ngram", max_model_len=256, profile_dir="none")
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    prompt = TEXT[:9] * 3
    got = llm.generate([prompt], params)[0].token_ids
    plain = llm.generate([prompt], SamplingParams(max_tokens=40, ignore_eos=True, drafter="none"))[
        0
    ].token_ids
    assert got == plain


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5-moe", "qwen3_next"])
def test_its_mtp_module_drafts_whatever_the_config_says(name: str, tmp_path: Path) -> None:
    """Found by its tensors; its block sees everything, with keys of its own, and experts where the target has them."""
    build_decoder(name, tmp_path / "target")
    folder = build_mtp(tmp_path / "target", tmp_path / "made", "qwen")
    if name == "qwen3_5":
        nested(folder)
    llm = LLM(str(folder), max_model_len=256, max_batch=2, profile_dir="none")
    assert llm.info["drafter"] == "mtp+ngram"
    mine = SamplingParams(
        max_tokens=40, ignore_eos=True, temperature=0.7, seed=3, drafter="mtp", draft_tokens=4
    )
    texts = [TEXT[:50], TEXT[20:41], TEXT[:77]]
    drafted = llm.generate(texts, mine)
    plain = llm.generate(texts, replace(mine, drafter="none"))
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert all(one.stats.drafted > 0 for one in drafted)


def test_a_promised_module_that_is_not_there(tmp_path: Path) -> None:
    build_decoder("qwen3_5", tmp_path)
    edit(tmp_path / "config.json", mtp_num_hidden_layers=1)
    nested(tmp_path)
    llm = LLM(str(tmp_path), max_model_len=64, profile_dir="none")
    assert "promises multi-token prediction (mtp_num_hidden_layers=1)" in llm.info["drafter_reason"]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "kinds": ({"layer_types": HYBRID["layer_types"][:3]}, "layer_types must name 5 layers, each linear_attention or"),
    "unknown kind": ({"layer_types": ["sliding_attention"] * 5}, "each linear_attention or full_attention"),
    "nothing sees all": ({"layer_types": ["linear_attention"] * 5}, "linear attention alone are not run"),
    "heads": ({"linear_num_value_heads": 3}, "3 value heads over 2 key heads"),
    "kernel": ({"linear_conv_kernel_dim": 9}, "a convolution over 9 rows is not possible"),
    "no kernel": ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1, not a whole number from 2"),
    "missing": ({"linear_key_head_dim": None}, "lacks linear_key_head_dim"),
    "rotary": ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.1}}, "=0.1 of a head of 16 is not"),
    "more": ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 2.0}}, "=2 of a head of 16 is not"),
    "biases": ({"attention_bias": True}, "no published model of this family has biases"),
    "expert": ({"model_type": "qwen3_next", "num_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 8},
               "num_experts_per_tok=3 of only 2 experts"),
    "nested": ({"model_type": "qwen3_5", "text_config": 3}, "has no text_config"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_configs_that_cannot_be(case: str, tmp_path: Path) -> None:
    changes, said = BAD[case]
    build_decoder("qwen3_5", tmp_path)
    edit(tmp_path / "config.json", **changes)
    with pytest.raises(ConfigError, match=said) as caught:
        load_target(tmp_path)
    assert inspect(tmp_path).unsupported == [str(caught.value)]


def test_layers_and_tensors_that_disagree(tmp_path: Path) -> None:
    build_decoder("qwen3_5", tmp_path)
    kinds = HYBRID["layer_types"]
    edit(tmp_path / "config.json", layer_types=[kinds[2], *kinds[1:]])
    with pytest.raises(
        WeightsError, match=r"missing \(layers.0.self_attn.*does not describe \(layers.0.linear_attn"
    ):
        load_target(tmp_path)
    edit(tmp_path / "config.json", layer_types=kinds, linear_value_head_dim=8)
    with pytest.raises(WeightsError, match=r"layers.0.linear_attn.in_proj_qkv.weight has shape"):
        load_target(tmp_path)


def test_it_is_not_written_as_gguf(tmp_path: Path) -> None:
    build_decoder("qwen3_5", tmp_path)
    with pytest.raises(
        UsageError, match="is a qwen3_5_text, of which no GGUF files are written: it runs as it is"
    ):
        write_gguf(tmp_path, tmp_path / "out.gguf", None)
