"""Drafters that nobody named: found beside a target and in caches, said and never loaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest

from paceline.errors import CapacityError
from paceline.hub.resolve import bundled
from paceline.llm import LLM
from paceline.suggest import Suggestion, check_memory, costs_too_much, suggestions, weights

WORDS = [f"word{i}" for i in range(50)]


def model(path: Path, size: int, words: list[str] = WORDS) -> Path:
    """A GGUF file of about `size` bytes with a list of tokens."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(words)
    writer.add_tensor("token_embd.weight", np.zeros((1, size // 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_smaller_models_of_the_vocabulary_are_found_beside_the_file_and_in_the_cache(tmp_path: Path) -> None:
    target = model(tmp_path / "models" / "big.gguf", 400_000)
    small = model(tmp_path / "models" / "small.gguf", 40_000)
    model(tmp_path / "models" / "nearly.gguf", 350_000)
    model(tmp_path / "models" / "larger.gguf", 900_000)
    model(tmp_path / "models" / "other.gguf", 40_000, [*WORDS[:-1], "another"])
    model(tmp_path / "models" / "longer.gguf", 40_000, [*WORDS, "more"])
    (tmp_path / "models" / "broken.gguf").write_bytes(b"GGUF")
    (tmp_path / "models" / "folder").mkdir()
    snapshot = tmp_path / "cache" / "models--org--name" / "snapshots" / "1234"
    kept = model(snapshot / "kept.gguf", 80_000)
    found = suggestions(target, [tmp_path / "cache", tmp_path / "none"])
    assert [one.path for one in found] == [small, kept]
    assert found[0].share == pytest.approx(weights(small) / weights(target))
    said = found[0].described(target)
    assert f"--drafter {small}" in said
    assert "lies beside it" in said
    assert f"is in {snapshot}" in found[1].described(target)
    assert suggestions(tmp_path / "gone.gguf") == []


def test_heads_and_draft_models_of_a_folder_are_found(tmp_path: Path) -> None:
    for name in ("target", "assistant", "draft"):
        shutil.copytree(bundled("target").with_name(name), tmp_path / name)
    found = {one.path.name: one.kind for one in suggestions(tmp_path / "target")}
    assert found == {"assistant": "mtp", "draft": "model"}
    assert "a mtp head made for it" in Suggestion(tmp_path / "assistant", "mtp", 1, 0.1).described(
        tmp_path / "target"
    )


def test_auto_names_a_smaller_model_and_does_not_load_it(tmp_path: Path) -> None:
    for name in ("target", "draft"):
        shutil.copytree(bundled("target").with_name(name), tmp_path / name)
    said: list[str] = []
    options = {"max_model_len": 128, "threads": 1, "draft_tokens": 2}
    with LLM(str(tmp_path / "target"), say=said.append, **options) as llm:  # type: ignore[arg-type]
        assert llm.info["drafter"] == "ngram"
    assert sum(f"--drafter {tmp_path / 'draft'}" in line for line in said) == 1
    said.clear()
    with LLM(str(tmp_path / "target"), drafter="ngram", say=said.append, **options):  # type: ignore[arg-type]
        assert not any("--drafter" in line for line in said)
    with LLM(
        str(tmp_path / "draft"),
        drafter=str(tmp_path / "target"),
        say=said.append,
        **options,  # type: ignore[arg-type]
    ) as llm:
        assert llm.info["drafter"] == "model+ngram"
    assert sum("times its target's bytes" in line for line in said) == 1


def test_a_draft_model_larger_than_its_target_is_said_to_cost_too_much(tmp_path: Path) -> None:
    small, large = model(tmp_path / "small.gguf", 40_000), model(tmp_path / "large.gguf", 200_000)
    line = costs_too_much(large, small)
    assert line is not None
    assert "4." in line
    assert costs_too_much(small, large) is None
    assert costs_too_much(small, tmp_path / "gone") is None


def test_memory_for_one_of_the_two_only_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = model(tmp_path / "t.gguf", 400_000), model(tmp_path / "d.gguf", 100_000)
    check_memory(target, drafter, 600_000)
    check_memory(target, target, 420_000)  # heads in the target's own files
    with pytest.raises(CapacityError, match=r"need .* together"):
        check_memory(target, drafter, 450_000)
    free = weights(bundled("target")) + 1000
    monkeypatch.setattr("paceline.assembly.free_memory", lambda device: free)
    with pytest.raises(CapacityError, match="--drafter none or ngram"):
        LLM("demo", drafter="model", max_model_len=128, threads=1)
