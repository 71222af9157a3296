"""Names to folders, and the search for a target's own drafter: no network."""

from __future__ import annotations

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

from paceline.errors import LoadError, UsageError
from paceline.models import hub


def make(folder):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_local_folder_wins_over_hub_id(tmp_path, monkeypatch):
    make(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("org/name", "target") == tmp_path / "org" / "name"


@pytest.mark.parametrize("name", ["nowhere", "./no/where", "/no/where", "a/b/c", "", "org/name@"])
def test_neither_folder_nor_hub_id(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="give demo, smollm2, an existing folder"):
        hub.resolve(name, "target")


def test_a_file_is_no_model(tmp_path):
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(UsageError, match="is a file: give the model folder"):
        hub.resolve(path, "target")


def test_download_takes_no_code_and_no_pickles(tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **kw: asked.update(kw, name=name) or str(tmp_path)
    )
    assert hub.resolve("org/name@v1", "target") == tmp_path
    assert asked["name"] == "org/name"
    assert asked["revision"] == "v1"
    allowed = asked["allow_patterns"]
    assert allowed == ["*.safetensors", "*.json", "*.jinja", "README.md"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (LocalEntryNotFoundError("offline"), r"cannot download org/name \(offline\): check the network"),
        (ConnectionError(), r"cannot download org/name \(ConnectionError\)"),
        (
            type("ConnectError", (Exception,), {"__module__": "httpx2"})("no route"),
            r"\(no route\): check the network",
        ),
        (RepositoryNotFoundError.__new__(RepositoryNotFoundError), "neither a local folder nor a repository"),
    ],
)
def test_download_fails_in_one_line(error, words, monkeypatch):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(LoadError, match=words) as caught:
        hub.resolve("org/name", "target")
    assert "\n" not in str(caught.value)


GEMMA = {"model_type": "gemma4_text"}


def test_drafter_beside_the_target(tmp_path):
    target, drafter = make(tmp_path / "gemma"), make(tmp_path / "gemma-assistant")
    found, why = hub.find_assistant(target, {})
    assert found == drafter
    assert "beside the target" in why


def test_drafter_in_a_pair_folder(tmp_path):
    target, drafter = make(tmp_path / "target"), make(tmp_path / "assistant")
    assert hub.find_assistant(target, {})[0] == drafter


def test_drafter_named_in_config(tmp_path):
    target, drafter = make(tmp_path / "gemma"), make(tmp_path / "mine")
    make(tmp_path / "gemma-assistant")
    found, why = hub.find_assistant(target, {"assistant_model": "../mine"})
    assert found is not None
    assert found.resolve() == drafter
    assert "named in" in why


def test_drafter_among_downloads(tmp_path):
    target = make(tmp_path / "models--google--gemma-4-E2B-it" / "snapshots" / "abc")
    found, why = hub.find_assistant(target, GEMMA)
    assert found is None
    assert "--drafter google/gemma-4-E2B-it-assistant" in why
    drafter = make(tmp_path / "models--google--gemma-4-E2B-it-assistant" / "snapshots" / "def")
    assert hub.find_assistant(target, GEMMA)[0] == drafter
    assert hub.find_assistant(target, {"assistant_model": "google/gemma-4-E2B-it-assistant"})[0] == drafter


def test_no_drafter(tmp_path):
    found, why = hub.find_assistant(make(tmp_path / "gemma"), GEMMA)
    assert found is None
    assert "no gemma-assistant beside the target" in why
