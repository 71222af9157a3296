"""The recipes around processes: their models are there, first calls are told."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def loaded(path: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(RECIPES / "processes"), *sys.path])
    spec = importlib.util.spec_from_file_location(Path(path).stem, RECIPES / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_models_are_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny = loaded("processes/tiny.py", monkeypatch)
    order = tiny.build("qwen3", tmp_path)
    assert Path(order.target, "config.json").exists()
    made = Path(order.target, "model.safetensors").stat().st_mtime_ns
    assert tiny.build("qwen3", tmp_path) == order
    assert Path(order.target, "model.safetensors").stat().st_mtime_ns == made


def test_first_calls_are_told() -> None:
    command = [
        sys.executable,
        str(RECIPES / "processes" / "first_calls.py"),
        "--forks",
        "2",
        "--only",
        "cos",
        "sum",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "0 of 2 first calls differ" in done.stdout
