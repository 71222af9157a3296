"""The fuzzer of requests: it finds what is planted, shrinks it, and what it writes is a test."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

import fuzzing
from fuzzing import Case, Differs, Worlds
from planted import keep_a_rejected_token

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds(tmp_path_factory.mktemp("worlds"))


def test_random_requests_over_some_families(worlds: Worlds) -> None:
    families = ("llama", "gemma3", "qwen3_5", "gpt-oss", "lfm2", "deepseek")
    for seed, family in enumerate(families):
        assert fuzzing.search(worlds, [family], 8, seed) is None
    assert set(worlds.tokens) == set(families)


def test_what_is_planted_is_found_shrunk_and_written_as_a_test(
    worlds: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_a_rejected_token(monkeypatch)
    found = fuzzing.search(worlds, ["llama"], 100, seed=2)
    assert found is not None
    case, what = found
    assert len(case.prompts) == 1
    assert len(case.prompts[0]) <= 3
    assert set(case.params[0]) == {"max_tokens", "seed"}
    assert case.params[0]["max_tokens"] <= 12
    assert case.draft_tokens <= 3
    assert "without a drafter" in what
    path = fuzzing.write_test(case, what, tmp_path)
    written = runpy.run_path(str(path))
    assert written["CASE"] == case
    with pytest.raises(Differs):
        written["test_found"](tmp_path / "again")
    monkeypatch.undo()
    written["test_found"](tmp_path / "repaired")


def test_an_engine_that_raises_is_a_difference(worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("llama", "oracle", 2, [[3, 4]], [{"max_tokens": 4, "seed": 0}])
    worlds.compare(case)

    def broken(*_: object) -> None:
        raise IndexError("row 7")

    monkeypatch.setattr("paceline.engine.verify.verify_match", broken)
    with pytest.raises(Differs, match="raised IndexError: row 7"):
        worlds.compare(case)


def test_the_script_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state.json"

    def script(tokens: int) -> int:
        command = ["fuzz.py", "--tokens", str(tokens), "--state", str(state), "--families", "llama"]
        monkeypatch.setattr(sys, "argv", [*command, "--write", str(tmp_path)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(SCRIPTS / "fuzz.py"), run_name="__main__")
        return end.value.code  # type: ignore[return-value]

    monkeypatch.setattr("fuzzing.search", lambda worlds, families, examples, seed: _pretend(worlds, seed))
    assert script(250) == 0
    assert "0" not in capsys.readouterr().err.split(" rounds")[0]
    assert script(350) == 0
    said = capsys.readouterr()
    assert said.err.startswith("4 rounds, 400 of 350 tokens")
    assert "400 tokens of 1 families were compared, none differs" in said.out
    assert script(1000) == 1
    assert "a text changed with a drafter" in capsys.readouterr().out
    assert len(list(tmp_path.glob("test_found_*.py"))) == 1


def _pretend(worlds: Worlds, seed: int) -> tuple[Case, str] | None:
    """A hundred equal tokens a round; the sixth round finds something."""
    worlds.tokens["llama"] = worlds.tokens.get("llama", 0) + 100
    return (Case("llama", "ngram", 1, [[2]], [{}]), "tokens") if seed == 5 else None
