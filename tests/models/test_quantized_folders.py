"""Matrices as other tools store them, read by our own code: against the values that the tools' own code gives.

quantized.npz holds what the makers' libraries packed and unpacked (recipes/quantized/make.py); no library is needed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from decoders import build_decoder
from layouts import write
from paceline import LLM, SamplingParams
from paceline.checkpoints.loading import Tensors, Weights
from paceline.core import ForwardBatch
from paceline.errors import LoadError, WeightsError
from paceline.models.inspection import inspect
from paceline.ops import native
from paceline.ops.base import Weight
from paceline.ops.reference import dequantize
from packings import CONFIGS, PACKINGS, TABLES, pack_folder

STORED = Path(__file__).parent / "quantized.npz"
AT, NAME = "model.layers.0.mlp.up_proj", "layers.0.mlp.up_proj"
OUT, IN = 32, 256


@cache
def held() -> dict[str, np.ndarray]:
    with np.load(STORED) as file:
        return dict(file)


CASES: dict[str, Any] = json.loads(str(held()["cases"]))
# what each becomes where blocks are multiplied with
KEPT = {
    "w4a16 g32": "int4", "w4a16 g64": "int4", "w4a16 g128": "int4", "w4a16 channel": "int4",
    "w4a16 g128 asymmetric": "q5_0", "w8a16 g128": "q8_0", "w8a8 channel": "int8", "w8a8 tensor": "int8",
    "fp8 tensor": "bfloat16", "fp8 channel": "bfloat16", "nvfp4": "nvfp4",
    "nf4 twice": "bfloat16", "nf4 once": "bfloat16", "fp4 twice": "bfloat16", "llm.int8": "int8",
    "mlx 4 bits g64": "q4_1", "mlx 4 bits g64 f16": "q4_1", "mlx 4 bits g32": "q4_1", "mlx 8 bits g64": "bfloat16",
    "mlx 3 bits g64": "q4_1", "mlx 2 bits g128": "q4_1", "mlx 6 bits g64": "bfloat16", "mlx 5 bits g32": "q5_1",
    "mlx mxfp4": "mxfp4", "gptq 4 bits g128": "int4", "gptq 4 bits g128 desc_act": "bfloat16",
    "gptq 4 bits g32 asymmetric": "q5_0", "gptq 8 bits g128": "q8_0", "gptq 4 bits g128 asymmetric v2": "q5_0",
    "gptq 4 bits g64 asymmetric desc_act v2": "bfloat16", "gptq 3 bits g64 asymmetric": "int4", "gptq 2 bits g64": "int4",
    "awq g128": "q5_0", "awq g64": "q5_0", "hqq 4 bits g64 axis 1": "bfloat16", "hqq 4 bits g64 axis 0": "bfloat16",
    "hqq 8 bits g128 axis 1": "bfloat16", "hqq 2 bits g32 axis 1": "bfloat16",
}  # fmt: skip
TYPES = {
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float32": torch.float32,
    "float16": torch.float16,
}


def parts_of(case: str) -> dict[str, Tensor]:
    types = CASES[case]["types"]
    out = {}
    for end, kind in types.items():
        data = torch.from_numpy(held()[f"{case}/{end}"].copy())
        out[f"{AT}.{end}"] = data.view(TYPES[kind]) if kind in TYPES else data
    return out


def put(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: data.contiguous() for name, data in tensors.items()}, folder / "model.safetensors")
    key = "quantization" if "quant_method" not in config else "quantization_config"
    write(folder / "config.json", {"model_type": "llama", key: config})
    return folder


def read(folder: Path, blocks: bool, shape: tuple[int, ...] = (OUT, IN)) -> Weight:
    tensors = Tensors(folder, {f"{NAME}.weight": shape})
    weight = Weights(tensors, torch.device("cpu"), blocks=blocks).matrix(NAME)
    tensors.finish()
    return weight


def test_every_case_is_held() -> None:
    assert set(KEPT) == set(CASES)


@pytest.mark.parametrize("case", KEPT)
def test_values_are_those_of_the_maker(case: str, tmp_path: Path) -> None:
    """In the type that the maker's code computes in; what stays in few bits and what does not alike."""
    folder = put(tmp_path / "m", parts_of(case), CASES[case]["config"])
    want, computed = torch.from_numpy(held()[f"{case}/="]), TYPES[CASES[case]["computed"]]
    for blocks in (False, True):
        weight = read(folder, blocks)
        if blocks or weight.kind in ("int4", "int8"):
            assert weight.kind == KEPT[case]
        got = dequantize(weight, None, torch.float32)
        if weight.kind == "bfloat16" and computed == torch.float32:
            assert torch.equal(got, want.bfloat16().float())
            continue
        if (
            weight.kind == "bfloat16" and computed == torch.float16
        ):  # theirs is rounded to it before, ours is not
            assert torch.allclose(got, want, rtol=2**-8, atol=0)
            continue
        got = got.to(computed).float()
        ulp = {torch.float32: 2**-23, torch.float16: 2**-11, torch.bfloat16: 2**-8}[computed]
        assert torch.equal(got, want) or (case in ROUNDED and torch.allclose(got, want, rtol=ulp, atol=0)), (
            (got - want).abs().max()
        )


ROUNDED = {"llm.int8"}  # multiplied in another order than the maker does


LATENT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "kv_lora_rank": 32, "q_lora_rank": 64,
    "num_hidden_layers": 2, "qk_nope_head_dim": 16, "v_head_dim": 16, "qk_rope_head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip


@pytest.mark.parametrize("kind", ["awq", "gptq"])
def test_experts_and_latent_attention_of_other_tools(kind: str, tmp_path: Path) -> None:
    """kv_b_proj is taken apart, so it is read as floats; experts with one group a row."""
    build_decoder("deepseek", tmp_path / "packed", **LATENT)
    shutil.copytree(tmp_path / "packed", tmp_path / "whole")
    values = pack_folder(tmp_path / "packed", kind)
    save_file(values, tmp_path / "whole" / "model.safetensors", metadata={"format": "pt"})
    texts = []
    for name in ("packed", "whole"):
        llm = LLM(
            str(tmp_path / name),
            drafter="none",
            activations="float32",
            max_model_len=64,
            profile_dir="none",
            threads=1,
        )
        (one,) = llm.generate([[5, 6, 7, 8]], SamplingParams(max_tokens=16, temperature=0, ignore_eos=True))
        texts.append(list(one.token_ids))
    assert texts[0] == texts[1]


LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "plain"
    build_decoder("llama", folder, **LLAMA)
    return folder


@pytest.mark.parametrize("kind", PACKINGS)
def test_a_model_writes_the_text_of_its_values(kind: str, plain: Path, tmp_path: Path) -> None:
    """With drafts and without; inputs are not rounded, so the values alone decide."""
    folders = [Path(shutil.copytree(plain, tmp_path / name)) for name in ("packed", "whole")]
    values = pack_folder(folders[0], kind)
    save_file(values, folders[1] / "model.safetensors", metadata={"format": "pt"})
    seen = inspect(folders[0])
    assert seen.unsupported == []
    assert seen.parameters == inspect(folders[1]).parameters
    assert seen.quantized is not None
    assert MAKERS[kind] in seen.quantized
    plain_ = {
        n: t.numel()
        for n, t in values.items()
        if kind not in TABLES and ("embed_tokens" in n or "lm_head" in n)
    }
    packed_ = sum(t.numel() for n, t in values.items() if t.dim() == 2 and n not in plain_)
    bits = 8 * (sum(seen.kept.values()) - 4 * sum(plain_.values())) / packed_
    assert BITS.get(kind, 16) <= bits < BITS.get(kind, 16) + 0.7, "with norms, and scales of rows"
    texts = []
    for folder, drafter in ((folders[0], "ngram"), (folders[0], "none"), (folders[1], "none")):
        llm = LLM(
            str(folder),
            drafter=drafter,
            activations="float32",
            max_model_len=96,
            profile_dir="none",
            threads=1,
        )
        (one,) = llm.generate(
            [[5, 9, 14, 5, 9, 14, 5, 9]], SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
        )
        texts.append(list(one.token_ids))
    assert texts[0] == texts[1]
    if kind not in ROUNDED_INPUTS:
        assert texts[1] == texts[2]


MAKERS = {
    "awq": "AWQ, 4 bits, groups of 32, with zero points; kept as q5_0",
    "gptq": "GPTQ, 4 bits, groups of 32; kept as int4",
    "gptq asymmetric": "GPTQ, 4 bits, groups of 32, with zero points; kept as q5_0",
    "mlx": "MLX, 4 bits, groups of 32, with minima; kept as q4_1",
    "mlx 8 bits": "MLX, 8 bits, groups of 32, with minima; kept as bfloat16",
    "w8a8": "compressed-tensors, 8 bits, one scale a row; kept as int8",
    "w4a16": "compressed-tensors, 4 bits, ", "fp8": "compressed-tensors, 8-bit floats, one scale a row; kept as bfloat16",
    "nvfp4": "ModelOpt, NVFP4: 4-bit floats, groups of 16; kept as nvfp4",
    "nf4": "bitsandbytes, nf4: 4 bits, groups of 32; kept as bfloat16",
    "int8": "bitsandbytes, 8 bits, one scale a row; kept as int8",
}  # fmt: skip
BITS = {"awq": 5.5, "gptq asymmetric": 5.5, "gptq": 5, "w4a16": 5, "mlx": 5, "nvfp4": 5, "w8a8": 8, "int8": 8}
ROUNDED_INPUTS = (
    "w8a8",
    "int8",
    "fp8",
    "mlx 8 bits",
    "nf4",
)  # int8's inputs have 16 bits, bfloat16's may be rounded to it


def shaken(tensors: dict[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Each tensor left out, of another shape, of another type."""
    for name, data in tensors.items():
        yield f"without {name}", {n: t for n, t in tensors.items() if n != name}
        if data.numel() > 1:
            yield f"shorter {name}", tensors | {name: data[: len(data) // 2 or 1].clone()}
            yield f"flat {name}", tensors | {name: data.reshape(-1).clone()}
        yield f"empty {name}", tensors | {name: torch.zeros(0, dtype=torch.uint8).to(data.dtype)}
        yield f"doubles {name}", tensors | {name: torch.zeros(data.shape, dtype=torch.float64)}
        yield f"bytes {name}", tensors | {name: torch.zeros(data.shape, dtype=torch.uint8)}


SHAKEN = (
    "w4a16 g128 asymmetric", "w8a8 channel", "fp8 channel", "nvfp4", "nf4 twice", "llm.int8", "mlx 4 bits g64",
    "mlx mxfp4",
    "gptq 4 bits g128 desc_act", "awq g64", "hqq 4 bits g64 axis 1",
)  # fmt: skip


@pytest.mark.parametrize("case", SHAKEN)
def test_what_does_not_fit_together_is_one_line(case: str, tmp_path: Path) -> None:
    """Or is read, where what was changed does not matter; nothing but our own error leaves the reader."""
    lines = []
    for i, (what, tensors) in enumerate(shaken(parts_of(case))):
        folder = put(tmp_path / f"m{i}", tensors, CASES[case]["config"])
        for blocks in (False, True):
            try:
                read(folder, blocks)
            except LoadError as error:
                lines.append((what, str(error)))
    assert not [one for one in lines if "\n" in one[1] or len(one[1]) > 700]
    assert len(lines) > 5


def test_another_order_than_the_config_says_is_seen(tmp_path: Path) -> None:
    """g_idx of a file whose config has no desc_act is not looked at; with it, and in order, groups stay runs."""
    case = "gptq 4 bits g128"
    config = CASES[case]["config"] | {"desc_act": True}
    weight = read(put(tmp_path / "m", parts_of(case), config), blocks=True)
    assert weight.kind == "bfloat16"
    want = torch.from_numpy(held()[f"{case}/="])
    assert torch.allclose(dequantize(weight, None, torch.float32), want, rtol=2**-7, atol=0)


def test_a_config_that_calls_zero_points_symmetric_is_not_believed(tmp_path: Path) -> None:
    """int4 holds -8 to 7 only: what lies beyond is refused, not cut."""
    case = "gptq 4 bits g32 asymmetric"
    folder = put(tmp_path / "m", parts_of(case), CASES[case]["config"] | {"sym": True})
    with pytest.raises(WeightsError, match="zero points"):
        read(folder, blocks=True)


def test_scales_below_float16_leave_blocks(tmp_path: Path) -> None:
    """What no float16 holds stays exact: the matrix is kept as float32."""
    case = "mlx 4 bits g64"
    tensors = parts_of(case)
    tensors[f"{AT}.scales"] = tensors[f"{AT}.scales"] * 2.0**-14
    weight = read(put(tmp_path / "m", tensors, CASES[case]["config"]), blocks=True)
    assert weight.kind == "float32"


def test_native_kernels_multiply_what_is_kept(tmp_path: Path) -> None:
    """To the bits of float32 weights, also beside a scale of a row."""
    if not native.available():
        pytest.skip(str(native.why_not()))
    x = torch.randn(5, IN, generator=torch.Generator().manual_seed(1))
    rows = ForwardBatch(
        torch.arange(5), torch.arange(5, dtype=torch.int32), torch.zeros(5, dtype=torch.int32), [0, 5]
    )
    for case in ("nvfp4", "awq g64", "mlx 5 bits g32", "w4a16 g128"):
        weight = read(put(tmp_path / case, parts_of(case), CASES[case]["config"]), blocks=True)
        values = Weight(dequantize(weight, None, torch.float32), "float32")
        runner = native.NativeRunner(1, exact=True)
        got, want = (
            runner.run(lambda ops, w=w: (ops.linear(ops.given("x", IN), w),), rows, None, {"x": x})[0].clone()  # type: ignore[misc]
            for w in (weight, values)
        )
        assert torch.equal(got, want), case


def _experts(kind: str, count: int = 3) -> tuple[dict[str, Tensor], Tensor]:
    """(tensors of a layer's gates and ups, what they stand for [E, 2 * I, H])."""
    rng, stored, values = np.random.default_rng(6), {}, []
    for expert in range(count):
        both = []
        for part in ("gate_proj", "up_proj"):
            packed, meant = PACKINGS[kind](rng.normal(size=(32, 64)) * 0.1)
            stored |= {
                f"model.layers.0.mlp.experts.{expert}.{part}.{end}": data for end, data in packed.items()
            }
            both.append(torch.from_numpy(np.ascontiguousarray(meant, dtype=np.float32)))
        values.append(torch.cat(both))
    return stored, torch.stack(values)


def _stacked(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """As MLX has them: one tensor of all experts for each matrix."""
    out = {}
    for part in ("gate_proj", "up_proj"):
        for end in ("weight", "scales", "biases"):
            some = [
                data.view(torch.int32) if end == "weight" else data
                for name, data in stored.items()
                if name.endswith(f"{part}.{end}")
            ]
            whole = torch.stack(some)
            out[f"model.layers.0.mlp.switch_mlp.{part}.{end}"] = (
                whole.view(torch.uint32) if end == "weight" else whole
            )
    return out


@pytest.mark.parametrize(
    ("kind", "stacked"),
    [("mlx", True), ("awq", False), ("gptq", False), ("nvfp4", False), ("w8a8", False), ("fp8", False)],
)
def test_experts_become_stacks_in_the_form_that_one_has(kind: str, stacked: bool, tmp_path: Path) -> None:
    tensors, want = _experts(kind)
    folder = put(tmp_path / "m", _stacked(tensors) if stacked else tensors, CONFIGS[kind])
    name = "layers.0.mlp.experts.gate_up_proj"
    for blocks in (False, True):
        held_ = Tensors(folder, {name: tuple(want.shape)})
        stack = Weights(held_, torch.device("cpu"), blocks=blocks).stack(name)
        held_.finish()
        assert len(stack) == 3
        if blocks:
            kept = {
                "mlx": "q4_1",
                "awq": "q5_0",
                "gptq": "int4",
                "nvfp4": "nvfp4",
                "w8a8": "int8",
                "fp8": "bfloat16",
            }
            assert {one.kind for one in stack} == {kept[kind]}
        for one, values in zip(stack, want, strict=True):
            assert torch.equal(dequantize(one, None, torch.float32), values)
