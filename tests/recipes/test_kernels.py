"""recipes/cpu/kernels.py: its floors, and the smallest run of it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from paceline.forecast.random_target import RandomWeights, random_weight
from paceline.ops import native
from paceline.ops.base import WeightKind
from paceline.ops.reference import dequantize

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "cpu" / "kernels.py"
spec = importlib.util.spec_from_file_location("cpu_kernels", RECIPE)
assert spec is not None
assert spec.loader is not None
kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason="no native kernels here")


def test_a_floor_is_the_larger_of_reading_and_arithmetic_as_measured_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "MEMORY", 1 << 16)
    floors = kernels.Floors()
    floors.measure()
    assert floors.reads[0] > 0
    assert floors.peaks[0] > 0
    floors.reads, floors.peaks = [1.0, 50.0, 150.0], [1.0, 300.0, 500.0]
    assert floors.least(1000.0, 1000.0) == pytest.approx(10.0)
    assert floors.least(100.0, 4000.0) == pytest.approx(10.0)
    assert floors.as_json() == {"read": 50.0, "read_best": 150.0, "peak": 300.0, "peak_best": 500.0}


def test_linears_are_held_against_floors_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MEMORY", 1 << 16)
    monkeypatch.setattr(kernels, "SHAPES", ((64, 256),))
    floors = kernels.Floors()
    lines = kernels.linear_report(floors, 1)
    assert [line["weights"] for line in lines if not line["weights"].startswith("torch")] == list(
        kernels.KINDS
    )
    assert all(set(line["ms"]) == set(line["over_floor"]) >= {1, 5} for line in lines)
    assert len(floors.reads) == 2 * 2 * (len(kernels.KINDS) * 8 + 4)


@pytest.mark.parametrize("kind", kernels.BLOCK_KINDS)
def test_random_blocks_are_of_about_unit_gain(kind: WeightKind) -> None:
    weight = random_weight(RandomWeights({}, "bfloat16"), (64, 512), kind)
    values = dequantize(weight, None, torch.float32)
    assert values.isfinite().all()
    assert 0.5 < values.square().sum(-1).mean().sqrt() < 2.5


@pytest.fixture
def threads_again() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    native.set_threads(native.default_threads())


@pytest.mark.usefixtures("threads_again")
def test_a_quick_run_writes_its_results(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        kernels.main, ["--quick", "--only", "share", "--out", str(tmp_path), "--threads", "1"]
    )
    assert done.exit_code == 0, done.output
    share = json.loads((tmp_path / "kernels.json").read_text())["share"]
    assert 0 < share["outside_programs"] < 1
    assert "outside the native programs" in (tmp_path / "kernels.md").read_text()
