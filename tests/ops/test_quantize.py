"""Quantized weights: how well they approximate, that a saved folder loads as what was quantized, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from checkpoints import VOCAB, build_target
from paceline.convert.quantized import measure_loss, save_quantized
from paceline.errors import UsageError, WeightsError
from paceline.models.registry import load_target
from paceline.ops.quantize import kind_for, quantize, quantizer
from paceline.ops.reference import dequantize


@pytest.mark.parametrize(("kind", "worst"), [("int8", 0.01), ("int4", 0.1)])
def test_relative_error_is_small(kind: str, worst: float) -> None:
    data = torch.randn(40, 96, generator=torch.Generator().manual_seed(1))
    back = dequantize(quantize(data, kind), None, torch.float32)
    assert (back - data).norm() / data.norm() < worst


def test_zero_rows_stay_zero_and_extremes_are_kept() -> None:
    data = torch.zeros(3, 64)
    data[1, 5], data[2, 40] = 7.0, -3.0
    for kind in ("int8", "int4"):
        back = dequantize(quantize(data, kind), None, torch.float32)
        torch.testing.assert_close(back, data)


def test_what_cannot_be_quantized_is_refused() -> None:
    with pytest.raises(UsageError, match="multiple of 32"):
        quantize(torch.zeros(2, 33), "int4")
    with pytest.raises(UsageError, match="not finite"):
        quantize(torch.full((2, 32), torch.nan), "int8")
    with pytest.raises(UsageError, match="not finite"):
        quantize(torch.full((2, 32), torch.inf), "int4")
    weight = quantize(torch.ones(2, 64), "int8")
    with pytest.raises(UsageError, match="int8 already"):
        quantizer("int4")("layers.0.mlp.up_proj", weight)
    assert quantizer("int8")("layers.0.mlp.up_proj", weight) is weight


def test_what_steers_is_kept() -> None:
    assert kind_for("layers.0.router.proj", 64, "int4") is None
    assert kind_for("embed_tokens", 64, "int4") == "int8"
    assert kind_for("layers.0.mlp.up_proj", 64, "int4") == "int4"
    assert kind_for("layers.0.mlp.up_proj", 48, "int4") == "int8"


@pytest.mark.parametrize("family", ["e2b", "26b"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_saved_folder_loads_as_quantized_at_load(family: str, kind: str, tmp_path: Path) -> None:
    build_target(family, tmp_path / "source", hidden_size=64)
    sizes = save_quantized(tmp_path / "source", tmp_path / "out", kind)
    assert sizes["after"] < 0.5 * sizes["before"]
    original = load_target(tmp_path / "source")
    saved, at_load = (
        load_target(tmp_path / "out"),
        load_target(tmp_path / "source", transform=quantizer(kind)),
    )
    for a, b in zip(saved.layers, at_load.layers, strict=True):
        assert a.gate.kind == b.gate.kind == kind
        assert torch.equal(a.gate.data, b.gate.data)
        assert a.gate.scale is not None
        assert b.gate.scale is not None
        assert torch.equal(a.gate.scale, b.gate.scale)
    tokens = [(11 * i) % VOCAB for i in range(100)]
    loss = measure_loss(original, saved, tokens, 100)
    assert 0 < loss.kl < (0.5 if kind == "int8" else 3)  # a random router has near-ties
    assert measure_loss(original, original, tokens, 100).kl == 0


def test_folder_of_another_target_is_refused(tmp_path: Path) -> None:
    build_target("dense", tmp_path / "source")
    save_quantized(tmp_path / "source", tmp_path / "out", "int8")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(WeightsError, match="of another model"):
        load_target(tmp_path / "out")
    with pytest.raises(UsageError, match="quantized already"):
        save_quantized(tmp_path / "out", tmp_path / "again", "int8")
    with pytest.raises(UsageError, match="not empty"):
        save_quantized(tmp_path / "source", tmp_path / "out", "int8")
