"""Names to folders, and the search for a target's own drafter: no network."""

from __future__ import annotations

from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

from paceline.errors import LoadError, UsageError
from paceline.hub import gguf as hub_gguf
from paceline.hub import resolve as hub
from paceline.hub.gguf import choose
from paceline.hub.names import HubName


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
    with pytest.raises(UsageError, match="give demo, smollm2, a folder"):
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
    (tmp_path / "model.safetensors").touch()
    assert hub.resolve("org/name@v1", "target") == tmp_path
    assert asked["name"] == "org/name"
    assert asked["revision"] == "v1"
    allowed = asked["allow_patterns"]
    assert allowed == ["*.safetensors", "*.json", "*.jinja", "README.md"]


def test_a_gguf_file_with_brackets_in_its_name_is_the_one_that_is_fetched(tmp_path, monkeypatch):
    names, asked = ["a[1]-Q8_0.gguf", "a1-Q8_0.txt", "a[1]-Q4_1.gguf"], {}
    monkeypatch.setattr(hub_gguf, "listing", lambda name: ("c0ffee", dict.fromkeys(names, 1)))
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **kw: asked.update(kw) or str(tmp_path)
    )
    assert hub_gguf.download_gguf(HubName("org/name", None, "Q8_0")) == tmp_path / names[0]
    found = huggingface_hub.utils.filter_repo_objects(names, allow_patterns=asked["allow_patterns"])
    assert list(found) == names[:1]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (LocalEntryNotFoundError("offline"), r"cannot download org/name \(offline\): check the network"),
        (ConnectionError(), r"cannot download org/name \(ConnectionError\)"),
        (
            type("ConnectError", (Exception,), {"__module__": "httpx2"})("no route"),
            r"\(no route\): check the network",
        ),
        (
            RepositoryNotFoundError(
                "404", response=SimpleNamespace(status_code=404, headers={}, request=None)
            ),
            "neither a local folder nor a repository",
        ),
    ],
)
def test_download_fails_in_one_line(error, words, monkeypatch):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(LoadError, match=words) as caught:
        hub.resolve("org/name", "target")
    assert "\n" not in str(caught.value)


REPOSITORY = [
    "README.md", "BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf", "imatrix.gguf",
    "m-Q2_K.gguf", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-UD-Q5_K_XL.gguf", "m.q8_0.GGUF", "mmproj-m-F16.gguf",
    "mtp-m-Q4_0.gguf", "odd.gguf",
]  # fmt: skip


@pytest.mark.parametrize(
    ("tag", "files"),
    [
        (None, ["m-Q4_K_M.gguf"]),
        ("q4_k_m", ["m-Q4_K_M.gguf"]),
        ("Q4_K_S", ["m-Q4_K_S.gguf"]),
        ("Q8_0", ["m.q8_0.GGUF"]),
        ("q2_k", ["m-Q2_K.gguf"]),
        ("bf16", ["BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"]),
        ("Q5_K_XL", ["m-UD-Q5_K_XL.gguf"]),
        ("UD-Q5_K_XL", ["m-UD-Q5_K_XL.gguf"]),
        ("odd", ["odd.gguf"]),
        ("M-Q4_K_M.gguf", ["m-Q4_K_M.gguf"]),
        ("mtp-m-Q4_0.gguf", ["mtp-m-Q4_0.gguf"]),  # a drafter, by its name only
    ],
)
def test_a_tag_is_a_file(tag, files):
    assert choose(HubName("org/name", None, tag), REPOSITORY) == files


@pytest.mark.parametrize(
    ("tag", "names", "words"),
    [
        (
            "Q6_K",
            REPOSITORY,
            "tagged Q6_K: give one of BF16, Q2_K, Q4_K_M, Q4_K_S, Q8_0, UD-Q5_K_XL, odd.gguf",
        ),
        ("Q4_K", REPOSITORY, "no GGUF file tagged Q4_K:"),
        ("bf16", REPOSITORY[:2], "lacks BF16/m-BF16-00002-of-00002.gguf, a part of"),
        (None, ["a-Q5_0.gguf", "a-Q6_K.gguf"], "of several kinds: give org/name:TAG, TAG one of Q5_0, Q6_K"),
        (
            "Q8_0",
            ["a-Q8_0.gguf", "b-Q8_0.gguf"],
            "2 GGUF files tagged Q8_0: give org/name:FILE, FILE one of a-Q8_0",
        ),
        ("Q8_0", ["model.safetensors"], "has no GGUF file: give it without :Q8_0"),
    ],
)
def test_a_tag_that_is_no_file_is_one_line(tag, names, words):
    with pytest.raises(LoadError) as caught:
        choose(HubName("org/name", None, tag), names)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("names", "one"), [
    (["a-F16.gguf"], ["a-F16.gguf"]), (["x.gguf"], ["x.gguf"]), (["a-Q4_0.gguf", "a-Q8_0.gguf"], ["a-Q4_0.gguf"]),
])  # fmt: skip
def test_without_a_tag(names, one):
    assert choose(HubName("org/name"), names) == one


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
