"""A set of kernels that computes wrongly on this processor is left out, and said."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from cli.test_cli import call
from paceline.cli import doctor, self_test
from paceline.config import EngineConfig
from paceline.ops import native
from paceline.ops.extension import extension
from paceline.ops.runners import pick_runner

pytestmark = pytest.mark.skipif(extension("left_out") is None, reason="needs the native kernels")
BEST = native.isa() if native.available() else ""


@pytest.fixture(autouse=True)
def whole() -> Iterator[None]:
    yield
    native._extension().choose_again([])


def sets() -> list[str]:
    """Those of this processor by name, the best first, without the portable one."""
    made = native._extension()
    names = [name for name in ("avx512", "avx2", "neon") if made.choose_isa(name)]
    made.choose_isa("best")
    return names


def test_all_sets_are_right_here() -> None:
    native._extension().choose_again([])
    assert native.left_out() == ""
    assert native.isa() == BEST


@pytest.mark.parametrize(
    ("operation", "words"),
    [("linear", "a linear of float32"), ("attention", "attention"), ("norm", "a norm")],
)
def test_the_next_set_takes_its_place(operation: str, words: str) -> None:
    """However many fail, and down to the portable one."""
    here, made = sets(), native._extension()
    for failing in range(1, len(here) + 1):
        made.choose_again([(name, operation) for name in here[:failing]])
        assert made.isa() == (here + ["generic"])[failing]
        for name in here[:failing]:
            assert f"{name}" in native.left_out()
        assert words in native.left_out()


def test_another_way_to_the_same_bits_comes_first() -> None:
    made = native._extension()
    if not made.choose_isa("pairs"):
        pytest.skip("this processor multiplies no pairs of bfloat16")
    made.choose_isa("best")
    way, other = made.bf16_dot_way(), {"pairs": "floats", "floats": "pairs"}
    made.choose_again([(way, "linear")])
    assert made.isa() == "avx512"
    assert made.bf16_dot_way() == other.get(way, made.bf16_dot_way()) != way
    assert native.left_out() == f"avx512 by {way} (a linear of float32)"


def test_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    here, said = sets(), []
    if not here:
        pytest.skip("this processor has the portable set alone")
    native._extension().choose_again([(here[0], "attention")])
    _, arithmetic = pick_runner(EngineConfig(threads=1), torch.device("cpu"), say=said.append)
    assert said == [
        f"kernels that compute wrongly on this processor are not used: {native.left_out()}; others are, which are "
        "slower: `paceline self-test` says what to do"
    ]
    assert f"without {here[0]}" in arithmetic
    with caplog.at_level(logging.WARNING):
        pick_runner(EngineConfig(threads=1), torch.device("cpu"))
    assert "compute wrongly" in caplog.text
    assert f"not used: {here[0]}" in doctor.facts()["kernels"]


def test_the_self_test_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    here = sets()
    if not here:
        pytest.skip("this processor has the portable set alone")
    native._extension().choose_again([(here[0], "norm")])
    monkeypatch.setattr(self_test, "_answer", lambda: iter(["left out"]))
    assert call(monkeypatch, "self-test", "--skip-check") == 1
    out = capsys.readouterr().out
    assert "FAILED  kernels" in out
    assert f"not used: {here[0]}" in out
    assert "Reinstall paceline with another compiler" in out
