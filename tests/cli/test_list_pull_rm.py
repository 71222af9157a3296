"""What is in the caches: listed, fetched and removed. A hub cache of the test's own, and no network."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from unittest import mock

import huggingface_hub
import pytest
from huggingface_hub import constants

from paceline.cli import main
from paceline.errors import LoadError
from paceline.hub import resolve as hub
from paceline.hub.resolve import bundled

Capture = pytest.CaptureFixture[str]


def call(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["paceline", *args])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def stored(cache: Path, name: str, source: Path | None) -> Path:
    """A repository in a hub cache: blobs, and a snapshot of links to them."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for file in sorted(source.iterdir()) if source is not None else []:
        shutil.copyfile(file, repository / "blobs" / file.name)
        (snapshot / file.name).symlink_to(repository / "blobs" / file.name)
    return snapshot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "hub"
    place.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(place))
    return place


def test_list_says_what_is_here_and_what_cannot_be_used(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    stored(cache, "org/target", bundled("target"))
    stored(cache, "org/target-assistant", bundled("assistant"))
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    stored(cache, "org/bert", tmp_path / "bert")
    stored(cache, "org/broken", None)
    cut = stored(cache, "org/cut", bundled("target"))
    next(cut.glob("*.safetensors")).unlink()
    (cache / "datasets--org--data").mkdir()
    assert call(monkeypatch, "list", "--json") == 0
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert set(found) - {"smollm2"} == {
        "demo", "org/target", "org/target-assistant", "org/bert", "org/broken", "org/cut",
    }  # fmt: skip
    assert (found["demo"]["role"], found["org/target"]["role"]) == ("target", "target")
    assert found["org/target-assistant"]["role"] == "drafter"
    size = sum(file.stat().st_size for file in bundled("target").iterdir())
    assert found["org/target"]["size"] == size  # links are not counted beside their blobs
    assert "bert" in found["org/bert"]["why"]
    assert "download is not complete" in found["org/broken"]["why"]
    assert found["org/cut"]["role"] == "unknown"
    assert call(monkeypatch, "list") == 0
    out = capsys.readouterr().out
    assert "org/target-assistant" in out
    assert str(cache) in out


def test_list_without_any_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "none"))
    assert call(monkeypatch, "list") == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("demo")


def test_rm_removes_only_what_is_named_in_the_cache(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for name in ("org/target", "org/other"):
        stored(cache, name, bundled("draft"))
    (cache / ".locks" / "models--org--target").mkdir(parents=True)
    assert call(monkeypatch, "rm", "org/target") == 2  # nobody to ask
    assert "--yes" in capsys.readouterr().err
    for bad, words in {
        "demo": "comes with paceline", "org/none": "`paceline list` shows", "../org": "files of your own",
        "org/target@v1": "no name of a repository",
    }.items():  # fmt: skip
        assert call(monkeypatch, "rm", "--yes", "org/target", bad) == 2, bad
        assert words in capsys.readouterr().err
    assert (cache / "models--org--target").is_dir()  # one bad name, and nothing is removed
    monkeypatch.setattr(sys, "stdin", mock.Mock(isatty=lambda: True))
    monkeypatch.setattr("click.confirm", mock.Mock())
    assert call(monkeypatch, "rm", "org/target") == 0
    assert "MiB are free again" in capsys.readouterr().out
    assert sorted(p.name for p in cache.rglob("models--*")) == ["models--org--other"]


def test_pull_fetches_the_model_and_the_drafter_published_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert call(monkeypatch, "pull", "demo") == 0
    assert "is on this machine" in capsys.readouterr().out
    target = tmp_path / "gemma-4-E2B-it"
    shutil.copytree(bundled("target"), target)
    fetched: list[str] = []

    def fetch(name: str, **_: object) -> str:
        fetched.append(name)
        if name == "org/nothing":
            raise ConnectionError
        return str(bundled("assistant") if name.endswith("assistant") else target)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.setattr("paceline.hub.resolve.outline", lambda found, scratch, text: target)
    assert call(monkeypatch, "pull", "org/gemma") == 0
    assert fetched == ["org/gemma", "google/gemma-4-E2B-it-assistant"]
    assert "paceline run org/gemma" in capsys.readouterr().out
    fetched.clear()
    assert call(monkeypatch, "pull", "org/gemma@v1", "--no-drafter") == 0
    assert fetched == ["org/gemma"]
    assert call(monkeypatch, "pull", "org/nothing") == 3
    assert "check the network" in capsys.readouterr().err


def test_pull_refuses_what_cannot_run_before_any_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma3n"}', encoding="utf-8")
    monkeypatch.setattr("paceline.hub.resolve.outline", lambda found, scratch, text: tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", mock.Mock(side_effect=AssertionError))
    assert call(monkeypatch, "pull", "org/old") == 3
    assert "gemma3n" in capsys.readouterr().err


def test_a_model_whose_drafter_cannot_be_fetched_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    target = tmp_path / "gemma-4-12B-it"
    shutil.copytree(bundled("target"), target)

    def download(name: str, revision: str | None = None) -> Path:
        if name.endswith("assistant"):
            raise LoadError("no network")
        return target

    monkeypatch.setattr(hub, "download", download)
    monkeypatch.setattr("paceline.hub.resolve.outline", lambda found, scratch, text: target)
    assert call(monkeypatch, "pull", "org/gemma") == 3
    assert "org/gemma is here, its drafter is not: no network" in capsys.readouterr().err
