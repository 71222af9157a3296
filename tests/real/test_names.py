"""What people type: hub ids, pages of the hub, tags; and kinds of drafters, which are matched whole."""

from __future__ import annotations

import pytest

from layouts import edit, model
from paceline.assembly import build_engine, choose_drafter
from paceline.config import EngineConfig
from paceline.drafters.registry import check_kind
from paceline.errors import LoadError, UsageError
from paceline.hub.names import HubName, parse_hub
from paceline.hub.resolve import resolve

ID = "google/gemma-4-E2B-it"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (ID, HubName(ID)),
        (f"{ID}@v1", HubName(ID, "v1")),
        (f"{ID}@refs/pr/3", HubName(ID, "refs/pr/3")),
        (f"{ID}:Q4_K_M", HubName(ID, None, "Q4_K_M")),
        (f"https://huggingface.co/{ID}", HubName(ID)),
        (f"https://huggingface.co/{ID}/", HubName(ID)),
        (f"https://huggingface.co/{ID}/tree/main", HubName(ID)),
        (f"https://huggingface.co/{ID}/tree/abc?x=y#z", HubName(ID, "abc")),
        (f"https://huggingface.co/{ID}/blob/main/a-Q4_K_M.gguf", HubName(ID, None, "a-Q4_K_M.gguf")),
        (f"http://www.huggingface.co/{ID}", HubName(ID)),
        (f"HuggingFace.co/{ID}", HubName(ID)),
        (f"hf.co/{ID}:Q4_K_M", HubName(ID, None, "Q4_K_M")),
        (f"hf://{ID}", HubName(ID)),
        ("gemma", None),
        ("a/b/c", None),
    ],
)
def test_names_of_repositories(text, found):
    assert parse_hub(text) == found


@pytest.mark.parametrize("text", ["https://example.org/a/b", "https://huggingface.co/a", "hf.co/datasets/a"])
def test_other_addresses(text):
    with pytest.raises(UsageError, match=r"give a folder or a hub id org/name|is no page of a model"):
        parse_hub(text)


def test_a_gguf_file_is_no_adapter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="is a GGUF file, which is no adapter"):
        resolve(f"hf.co/{ID}:Q4_K_M", "adapter")


@pytest.mark.parametrize("name", ["mtp-out/", "models/my-assistant", "./model", "mtp.d/x"])
def test_a_path_is_a_path(name, tmp_path, monkeypatch):
    """P1: what begins like a kind is no kind."""
    folder = model(tmp_path / name, "assistant")
    monkeypatch.chdir(tmp_path)
    config = EngineConfig(drafter=check_kind(name))
    assert choose_drafter(config, resolve("demo", "target"))[:2] == ("mtp+ngram", folder)


def test_a_folder_without_a_slash(tmp_path, monkeypatch):
    model(tmp_path / "mtp-out", "assistant")
    monkeypatch.chdir(tmp_path)
    assert check_kind("mtp-out") == "mtp-out"
    with pytest.raises(UsageError, match="unknown drafter 'mtp-outt'"):
        check_kind("mtp-outt")


@pytest.mark.parametrize(("given", "kind"), [("ngram+mtp", "mtp+ngram"), ("ngram+model", "model+ngram")])
def test_the_order_of_a_combination_does_not_matter(given, kind):
    """P11."""
    assert check_kind(given) == kind


@pytest.mark.parametrize(("drafter", "kind"), [("demo", "mtp+ngram"), ("./demo", None)])
def test_the_bundled_pair_may_be_named_as_a_drafter(drafter, kind, tmp_path):
    """U11: beside a copy of its target, as `quantize` makes one."""
    config = EngineConfig(drafter=check_kind(drafter))
    if kind is None:
        with pytest.raises(UsageError, match="is no assistant"):
            choose_drafter(config, model(tmp_path / "small"))
    else:
        assert choose_drafter(config, model(tmp_path / "small"))[:2] == (kind, resolve("demo", "assistant"))


def test_a_drafter_is_refused_before_the_target_is_loaded(tmp_path, monkeypatch):
    """Row 11."""
    folder = model(tmp_path / "other", "assistant")
    edit(folder / "config.json", backbone_hidden_size=8)
    monkeypatch.setattr("paceline.assembly.load_target", lambda *a, **k: pytest.fail("weights were loaded"))
    with pytest.raises(LoadError, match="hidden"):
        build_engine(EngineConfig(drafter=str(folder)))
