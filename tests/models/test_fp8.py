"""Checkpoints of 8-bit floats with a scale for each block run as their values in bfloat16; misfits are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import VOCAB
from decoders import build_decoder
from layouts import edit
from mtp_files import build_mtp
from paceline import LLM, SamplingParams
from paceline.convert.quantized import save_quantized
from paceline.errors import LoadError, UsageError, WeightsError
from paceline.models.inspection import inspect
from paceline.models.registry import load_network, load_target

SIZES: dict[str, Any] = {
    "hidden_size": 160,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "kv_lora_rank": 64,
}
CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
KEPT = ("embed_tokens", "lm_head", "mlp.gate.", "eh_proj")  # never stored so
NAME = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"


def shrink(folder: Path, plain: Path) -> None:
    """Store the matrices of a folder as 8-bit floats; `plain` is it with their values in bfloat16."""
    shutil.copytree(folder, plain)
    small, wide = {}, {}
    generator = torch.Generator().manual_seed(3)
    for name, data in load_file(folder / "model.safetensors").items():
        small[name] = wide[name] = data
        if data.dim() == 2 and not any(part in name for part in KEPT):
            blocks = [-(-size // 128) for size in data.shape]
            scale = torch.rand(blocks, generator=generator) * 0.02 + 0.01
            whole = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(data), : data.shape[1]]
            small[name] = (data / whole).to(torch.float8_e4m3fn)
            small[f"{name}_scale_inv"] = scale
            wide[name] = (small[name].float() * whole).bfloat16()
    save_file(wide, plain / "model.safetensors")
    save_file(small, folder / "model.safetensors")
    edit(folder / "config.json", quantization_config=CONFIG)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fp8")
    build_decoder("deepseek", root / "target", **SIZES)
    build_mtp(root / "target", root / "small")
    shrink(root / "small", root / "plain")
    return root


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_they_run_as_their_values_in_bfloat16(quantize: Any, made: Path) -> None:
    texts = []
    for name in ("small", "plain"):
        llm = LLM(str(made / name), quantize=quantize, max_model_len=128, profile_dir="none", threads=1)
        assert llm.info["drafter"] == "mtp+ngram"
        (one,) = llm.generate([[5, 6, 7, 8, 9]], SamplingParams(max_tokens=24, ignore_eos=True, logprobs=0))
        texts.append([(p.token, p.raw) for p in one.logprobs or ()])
    assert len(texts[0]) == 24
    assert texts[0] == texts[1]
    assert all(0 <= token < VOCAB for token, _ in texts[0])


def test_sizes_are_those_of_the_files(made: Path) -> None:
    seen, plain = inspect(made / "small"), inspect(made / "plain")
    assert seen.unsupported == []
    assert seen.parameters == plain.parameters
    stored = (made / "small" / "model.safetensors").stat().st_size
    got = seen.weight_bytes + sum(seen.skipped.values())
    assert 0.9 * stored < got <= stored
    assert inspect(made / "small", target=made / "small").unsupported == []


def test_they_are_quantized_already(made: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError,
        match=r"quantized already \(fp8, 8-bit floats, blocks of 128 x 128; kept as bfloat16\): it can be run",
    ):
        save_quantized(made / "small", tmp_path / "out", "int8")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no scale": ({f"{NAME}_scale_inv": None}, "quantized by FP8 without scales are not supported: use the bfloat16"),
    "other blocks": ({f"{NAME}_scale_inv": torch.ones(2, 3)}, r"together \(8-bit floats, blocks of 128 x 128; weight"),
    "no matrix": ({NAME: None}, "do not fit config.json: 1 missing"),
    "no 8 bits": ({NAME: torch.ones(72, 160)}, "that it does not describe"),
    "integers": ({f"{NAME}_scale_inv": torch.ones(1, 2, dtype=torch.int32)}, r"has weight_scale_inv of I32 \[1, 2\]"),
    "other shape": ({NAME: torch.ones(80, 160).to(torch.float8_e4m3fn)}, r"has shape \[80, 160\] where config.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(BAD))
def test_what_does_not_fit_is_refused_in_one_line(case: str, made: Path, tmp_path: Path) -> None:
    changes, said = BAD[case]
    folder = Path(shutil.copytree(made / "small", tmp_path / "bad"))
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: one for name, one in tensors.items() if one is not None}, folder / "model.safetensors")
    _refused(folder, said)


def test_blocks_have_the_size_that_is_said(made: Path, tmp_path: Path) -> None:
    """64 x 128 would need two rows of scales where the file has one."""
    folder = Path(shutil.copytree(made / "small", tmp_path / "bad"))
    edit(folder / "config.json", quantization_config=CONFIG | {"weight_block_size": [64, 128]})
    _refused(folder, r"do not fit together \(8-bit floats, blocks of 64 x 128;")


def _refused(folder: Path, said: str) -> None:
    with pytest.raises(WeightsError, match=said) as caught:
        load_target(folder)
    assert "\n" not in str(caught.value)
    assert inspect(folder).unsupported == [str(caught.value)]
    with pytest.raises(LoadError):
        load_network(folder, load_target(folder))
