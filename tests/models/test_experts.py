"""Experts in the ways checkpoints store them give the model that transformers' own stacks give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import build_target
from decoders import build_decoder
from paceline.errors import WeightsError
from paceline.models.inspection import inspect
from paceline.models.registry import load_target
from paceline.ops.quantize import quantize

LAYOUTS = (
    "one by one",
    "one by one, gate and up together",
    "MLX",
    "MLX, gate and up together",
    "named as weights",
)


def restored(tensors: dict[str, torch.Tensor], layout: str, mlx: str) -> dict[str, torch.Tensor]:
    """`tensors` with each pair of stacks `...experts.gate_up_proj` and `.down_proj` stored in another way."""
    out = {}
    for name, data in tensors.items():
        at, _, stack = name.rpartition(".")
        if not at.endswith(".experts"):
            out[name] = data
            continue
        parts = {stack: data}
        if stack == "gate_up_proj" and "together" not in layout and layout != "named as weights":
            parts = dict(zip(("gate_proj", "up_proj"), data.chunk(2, 1)))
        for part, values in parts.items():
            if layout.startswith("one by one"):
                out |= {f"{at}.{e}.{part}.weight": one.clone() for e, one in enumerate(values)}
            else:
                place = at.removesuffix("experts") + mlx if layout.startswith("MLX") else at
                out[f"{place}.{part}.weight"] = values.clone()
    return out


def stacks_of(target: Any) -> list[torch.Tensor]:
    found = []
    for layer in target.layers:
        experts = layer.moe.experts if hasattr(layer, "norm_pre") else layer.moe
        found += [w.data for w in (*experts.gate_up, *experts.down)]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gemma_experts_of_every_layout(layout: str, tmp_path: Path) -> None:
    """REAL_FILES row 24."""
    build_target("26b", tmp_path)
    want = stacks_of(load_target(tmp_path))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    other = restored(tensors, layout, "experts.switch_glu")
    assert set(other) != set(tensors)
    save_file(other, file, metadata={"format": "pt"})
    assert inspect(tmp_path).unsupported == []
    got = stacks_of(load_target(tmp_path))
    assert len(got) == len(want) == 6 * 2 * 6
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_qwen_experts_as_mlx_stores_them(tmp_path: Path) -> None:
    theirs = build_decoder("qwen3-moe", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {n: t for n, t in load_file(file).items() if ".experts." not in n}
    for i, layer in enumerate(theirs.model.layers):
        gate, up = layer.mlp.experts.gate_up_proj.data.chunk(2, 1)
        stored = {"gate_proj": gate, "up_proj": up, "down_proj": layer.mlp.experts.down_proj.data}
        tensors |= {f"model.layers.{i}.mlp.switch_mlp.{n}.weight": t.clone() for n, t in stored.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    target = load_target(tmp_path)
    for mine, layer in zip(target.layers, theirs.model.layers):
        experts = mine.mlp if hasattr(mine, "mlp") else mine.moe
        assert torch.equal(torch.stack([w.data for w in experts.gate_up]), layer.mlp.experts.gate_up_proj)


def test_quantized_experts_one_by_one(tmp_path: Path) -> None:
    """Values and scales are stacked alike."""
    build_target("26b", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = restored(load_file(file), "one by one", "")
    wanted = {}
    for name in [n for n in tensors if ".experts." in n]:
        weight = quantize(tensors[name], "int8")
        assert weight.scale is not None
        tensors[name], tensors[name + "_scale"] = weight.data, weight.scale
        wanted[name] = weight
    save_file(tensors, file, metadata={"format": "pt"})
    experts = load_target(tmp_path).layers[3].moe.experts
    for e in range(6):
        mine, down = experts.gate_up[e], wanted[f"model.layers.3.experts.{e}.down_proj.weight"]
        gate, up = (wanted[f"model.layers.3.experts.{e}.{part}_proj.weight"] for part in ("gate", "up"))
        assert torch.equal(mine.data, torch.cat((gate.data, up.data)))
        assert torch.equal(mine.scale, torch.cat((gate.scale, up.scale)))
        assert torch.equal(experts.down[e].scale, down.scale)


@pytest.mark.parametrize("layout", ["one by one", "MLX"])
def test_a_part_that_is_missing_is_told(layout: str, tmp_path: Path) -> None:
    build_target("26b", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = restored(load_file(file), layout, "experts.switch_glu")
    del tensors[
        next(n for n in tensors if "layers.2." in n and n.endswith("up_proj.weight") and ".experts." in n)
    ]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"1 missing \(layers.2.experts.gate_up_proj\)"):
        load_target(tmp_path)


def test_experts_of_another_number_are_refused(tmp_path: Path) -> None:
    build_target("26b", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = restored(load_file(file), "MLX", "experts.switch_glu")
    tensors = {n: t[:5].clone() if "switch_glu" in n else t for n, t in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"experts.gate_up_proj has shape \[5, 48, 48\]"):
        load_target(tmp_path)
