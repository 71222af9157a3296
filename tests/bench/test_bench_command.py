"""`paceline bench` as a user runs it, on the bundled pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tests.checkpoints import FAMILIES, build_target

from paceline.bench.roofline import weight_bytes
from paceline.cli.bench import command
from paceline.hub.resolve import bundled
from paceline.models.registry import load_target
from paceline.ops.base import Weight


def test_further_rounds_are_measured_until_the_ratios_are_known(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    cell, short = (
        ["-w", "code", "-b", "1", "-t", "0", "-k", "2"],
        ["--rounds", "2", "--tokens", "4", "--min-seconds", "0"],
    )
    result = CliRunner().invoke(
        command, [*cell, *short, "--within", "1e-9", "--seconds", "60", "--json", str(out)]
    )
    assert result.exit_code == 0, result.output
    counts = [line["ratio"]["count"] for line in json.loads(out.read_text())["lines"]]
    assert counts == [40, 40]  # none and two tokens: twenty times as many as were asked for
    assert "2 of 2 ratios are not known to within 0.00%" in result.output


def test_what_no_ratio_can_be_known_to_is_refused() -> None:
    result = CliRunner().invoke(command, ["--within", "0"])
    assert result.exit_code == 2
    assert "--within" in result.output


@pytest.mark.parametrize(
    ("asked", "bytes_a_weight"), [([], 2.0), (["--dtype", "float32"], 4.0), (["--quantize", "int8"], 1.0)]
)
def test_the_roofline_is_of_the_weights_as_they_are_held(
    tmp_path: Path, asked: list[str], bytes_a_weight: float
) -> None:
    out = tmp_path / "bench.json"
    short = ["--rounds", "1", "--tokens", "4", "--min-seconds", "0", "--drafter", "none", "--json", str(out)]
    result = CliRunner().invoke(command, ["-w", "code", "-b", "1", "-t", "0", *short, *asked])
    assert result.exit_code == 0, result.output
    target = load_target(bundled("target"), dtype=torch.bfloat16)
    said = json.loads(out.read_text())["roofline"]["weight_bytes"]
    assert said == pytest.approx(weight_bytes(target) * bytes_a_weight / 2, rel=0.02)  # int8 has scales, too
    assert f"{said / 1e6:.1f} MB of weights a token" in result.output


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_token_reads_its_experts_only_and_rows_of_tables_not_at_all(tmp_path: Path, family: str) -> None:
    build_target(family, tmp_path)
    read: dict[str, int] = {}

    def note(name: str, weight: Weight) -> Weight:
        read[name] = weight.nbytes
        return weight

    target = load_target(tmp_path, transform=note)
    looked_up = {"embed_tokens_per_layer"} | (set() if target.config.tied else {"embed_tokens"})
    moe = target.config.moe
    share = moe.top_k / moe.experts if moe else 1.0
    expected = sum(
        [n * (share if ".experts." in name else 1.0) for name, n in read.items() if name not in looked_up]
    )
    assert weight_bytes(target) == pytest.approx(expected)
    assert weight_bytes(target) < sum(read.values()) or not (moe or target.ple)
