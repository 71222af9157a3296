"""The recipes around processes: their models are there, first calls are told."""

from __future__ import annotations

import importlib.util
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


@pytest.mark.parametrize(("count", "code"), [(0, 0), (1, 1)])
def test_first_calls_are_told(
    count: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = loaded("processes/first_calls.py", monkeypatch)
    monkeypatch.setattr(recipe, "differing", lambda function, forks: count)
    monkeypatch.setattr(recipe.torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(sys, "argv", ["first_calls.py", "--forks", "4", "--only", "cos", "sum"])
    assert recipe.main() == code
    assert f"{2 * count} of 4 first calls differ from the second" in capsys.readouterr().out
