"""`info` without a model, and `self-test`: what is installed, and whether it works."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cli.test_cli import call
from paceline import __version__
from paceline.cli import self_test
from paceline.ops import native

Capture = pytest.CaptureFixture[str]


def test_without_a_model_info_says_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (tmp_path / "paceline").mkdir()
    (tmp_path / "paceline" / "kept.json").write_text("x" * 2048, encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert call(monkeypatch, "info", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["paceline"].startswith(__version__)
    assert found["torch"].startswith(torch.__version__)
    assert found["cache"] == f"{tmp_path / 'paceline'}: 2.0 KiB"
    assert native.why_not() is not None or found["kernels"].startswith(native.isa())
    (tmp_path / "a file").write_text("", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    assert call(monkeypatch, "info") == 0
    out = capsys.readouterr().out
    assert "cannot be written, so nothing is kept" in out
    assert {line.split()[0] for line in out.splitlines()} >= {
        "python",
        "system",
        "extras",
        "memory",
        "devices",
    }


def test_info_without_torch_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else real(name))
    assert call(monkeypatch, "info") == 0
    assert "pip install torch" in capsys.readouterr().out


def test_the_self_test_passes_here(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    assert call(monkeypatch, "self-test", "--skip-check") == 0
    out = capsys.readouterr().out
    assert out.count("passed  ") == 2
    assert "64 tokens, the same with mtp+ngram as without a drafter" in out
    if native.why_not() is None:
        assert re.search(r"generic off by \S+, bits [0-9a-f]{8}", out)
        assert self_test._worst() == self_test._worst()


@pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
def test_the_self_test_finds_wrong_kernels(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    class Wrong(native.NativeRunner):
        def run(self, *args: object) -> tuple[torch.Tensor, ...]:
            return tuple(result * 1.1 for result in super().run(*args))  # type: ignore[arg-type]

    monkeypatch.setattr(native, "NativeRunner", Wrong)
    monkeypatch.setattr(self_test, "_answer", lambda: iter(["left out"]))
    assert call(monkeypatch, "self-test", "--skip-check") == 1
    out = capsys.readouterr().out
    assert "FAILED  kernels" in out
    assert "1 of 2 failed" in out
    assert native.isa() == str(native._extension().isa()) + {"": "", "registers": "-amx-bf16"}.get(
        native._extension().bf16_dot_way(), "-bf16"
    )


def test_python_m_paceline_is_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"paceline, version {__version__}"


def test_the_check_says_how_far_it_is_in_a_pipe_too(capsys: Capture) -> None:
    show = self_test._progress()
    for share in (0.0, 0.1, 0.25, 0.24, 1.0):
        show("token identity", share)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["0%", "25%", "100%"]
