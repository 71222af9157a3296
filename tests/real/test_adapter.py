"""LoRA adapters in PEFT's layout: the merged weights, and every adapter that cannot be merged."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from checkpoints import build_target
from layouts import model, write
from paceline import LLM, SamplingParams
from paceline.assembly import build_engine
from paceline.config import EngineConfig
from paceline.errors import LoadError, UsageError
from paceline.models.adapter import load_adapter
from paceline.models.registry import load_target

Q, GATE = "layers.0.self_attn.q_proj", "layers.1.mlp.gate_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "target"
    build_target("e2b", folder)
    return folder


def adapter(folder, *, tensors=None, prefix="base_model.model.model.", **changes):
    """An adapter of rank 4 for two matrices of the base, and for K/V that a layer has but never uses."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape):
        return torch.randn(*shape, generator=generator) * 0.1

    made = {
        f"{prefix}{Q}.lora_A.weight": random(4, 48), f"{prefix}{Q}.lora_B.weight": random(64, 4),
        f"{prefix}{GATE}.lora_A.default.weight": random(4, 48), f"{prefix}{GATE}.lora_B.default.weight": random(64, 4),
        f"{prefix}layers.5.self_attn.k_proj.lora_A.weight": random(4, 48),
        f"{prefix}layers.5.self_attn.k_proj.lora_B.weight": random(32, 4),
    }  # fmt: skip
    made |= tensors or {}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v for k, v in made.items() if v is not None}, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "gate_proj", "k_proj"],
    }
    write(folder / "adapter_config.json", config | changes)
    return made


@pytest.mark.parametrize(
    ("changes", "scales"),
    [
        ({}, (2.0, 2.0)),
        ({"use_rslora": True}, (4.0, 4.0)),
        ({"alpha_pattern": {"gate_proj": 2}}, (2.0, 0.5)),
        ({"alpha_pattern": {r"layers\.0.*q_proj": 1}}, (0.25, 2.0)),
        ({"prefix": "base_model.model.model.language_model."}, (2.0, 2.0)),
    ],
)
def test_weights_are_merged(base, tmp_path, changes, scales):
    """W + scale * B @ A: alpha / r, or alpha / sqrt(r)."""
    made = adapter(tmp_path / "a", **changes)
    prefix = changes.get("prefix", "base_model.model.model.")
    plain = load_target(base)
    one = load_adapter(tmp_path / "a", base)
    merged = load_target(base, transform=one)
    assert len(one.skipped) == 2
    q = made[f"{prefix}{Q}.lora_B.weight"] @ made[f"{prefix}{Q}.lora_A.weight"] * scales[0]
    gate = (
        made[f"{prefix}{GATE}.lora_B.default.weight"]
        @ made[f"{prefix}{GATE}.lora_A.default.weight"]
        * scales[1]
    )
    torch.testing.assert_close(merged.layers[0].attention.q.data, plain.layers[0].attention.q.data + q)
    torch.testing.assert_close(merged.layers[1].gate.data, plain.layers[1].gate.data + gate)
    assert torch.equal(merged.layers[1].up.data, plain.layers[1].up.data)


def test_a_table_and_whole_matrices(base, tmp_path):
    prefix = "base_model.model.model."
    a, b, up = torch.randn(4, 96) * 0.1, torch.randn(48, 4) * 0.1, torch.randn(64, 48)
    tensors = {
        f"{prefix}embed_tokens.lora_embedding_A": a, f"{prefix}embed_tokens.lora_embedding_B": b,
        f"{prefix}layers.1.mlp.up_proj.modules_to_save.default.weight": up,
    }  # fmt: skip
    adapter(tmp_path / "a", tensors=tensors)
    plain, merged = load_target(base), load_target(base, transform=load_adapter(tmp_path / "a", base))
    torch.testing.assert_close(merged.embedding.data, plain.embedding.data + 2 * (b @ a).T)
    assert torch.equal(merged.layers[1].up.data, up)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"peft_type": "IA3"}, "is an adapter of type IA3, not LORA: merge it with PEFT's merge_and_unload"),
        ({"peft_type": None}, "is an adapter of type None, not LORA"),
        ({"use_dora": True}, "use_dora=True is not supported: merge it"),
        ({"bias": "all"}, "bias=all is not supported"),
        ({"init_lora_weights": "pissa_niter_16"}, "was begun with pissa_niter_16, which changes the base's weights"),
        ({"r": 8}, "where this target needs [8, 48] and [64, 8]"),
        ({"r": 0}, "r=0, lora_alpha=8 are no numbers above 0"),
        ({"lora_alpha": float("nan")}, "lora_alpha=nan are no numbers above 0"),
        ({"alpha_pattern": {"(": 1}}, "is no pattern that can be matched without backtracking"),
        ({"tensors": {"base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": None}}, "has only one of"),
        ({"tensors": {"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": torch.ones(4, 48),
                      "base_model.model.model.layers.9.mlp.up_proj.lora_B.weight": torch.ones(64, 4)}},
         "changes layers.9.mlp.up_proj, which this target does not have: give the base it was trained on"),
        ({"tensors": {"base_model.model.model.layers.0.mlp.up_proj.bias": torch.ones(64)}}, "has no place for"),
        ({"tensors": {"base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": torch.full((64, 4), torch.nan)}},
         "holds values that are not finite numbers"),
    ],
)  # fmt: skip
def test_refused(base, tmp_path, changes, line):
    adapter(tmp_path / "a", **changes)
    with pytest.raises(LoadError) as caught:
        load_adapter(tmp_path / "a", base)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_folders_that_hold_no_adapter(base, tmp_path):
    with pytest.raises(LoadError, match=r"has no adapter_config.json: give the folder of a LoRA adapter"):
        load_adapter(base, base)
    adapter(tmp_path / "a")
    (tmp_path / "a" / "adapter_model.safetensors").rename(tmp_path / "a" / "adapter_model.bin")
    with pytest.raises(LoadError, match="a pickle, which can run code"):
        load_adapter(tmp_path / "a", base)


def test_several_are_refused():
    with pytest.raises(UsageError, match="several adapters cannot be merged together"):
        EngineConfig(adapter=("a", "b"))  # type: ignore[arg-type]
    assert EngineConfig(adapter=("a",)).adapter == "a"  # type: ignore[arg-type]
    assert EngineConfig(adapter=()).adapter is None  # type: ignore[arg-type]


def demo_adapter(folder):
    """An adapter for the bundled target that changes what it writes."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for i in range(6):
        at = f"base_model.model.model.layers.{i}.mlp.down_proj"
        tensors[f"{at}.lora_A.weight"] = torch.randn(2, 512, generator=generator) * 0.3
        tensors[f"{at}.lora_B.weight"] = torch.randn(256, 2, generator=generator) * 0.3
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    write(folder / "adapter_config.json", {"peft_type": "LORA", "r": 2, "lora_alpha": 4})
    return folder


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_the_drafter_works_on(tmp_path, quantize):
    """The text with any drafter is the text without; it is another text than the base's."""
    folder = demo_adapter(tmp_path / "a")
    texts = []
    for drafter, given in (("none", str(folder)), ("mtp+ngram", str(folder)), ("none", None)):
        llm = LLM(drafter=drafter, adapter=given, quantize=quantize, native=False)
        assert llm.info["adapter"] == given
        texts.append(llm.generate("def parse(", SamplingParams(max_tokens=12))[0].text)
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_an_adapter_beside_the_model_is_said(tmp_path):
    """Row 6."""
    folder = model(tmp_path / "gemma")
    write(folder / "adapter_config.json", {"peft_type": "LORA"})
    write(folder / "adapter_model.safetensors", b"junk")
    said: list[str] = []
    build_engine(EngineConfig(target=str(folder), drafter="none", native=False), said.append)
    assert any("is an adapter beside the model, not merged: give --adapter" in line for line in said)
