"""`paceline launch`: what is written, set and started for each program. A stand-in tells what it was given."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from paceline.cli import launch, main
from paceline.cli.agents import PROGRAMS, Target, planned
from paceline.cli.launch import Served, write

Capture = pytest.CaptureFixture[str]
MODEL = 'odd"name'
STAND_IN = """#!{python}
import json, os, pathlib, sys
pathlib.Path({out!r}).write_text(json.dumps([sys.argv[1:], dict(os.environ)]))
sys.exit(7)
"""


def call(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["paceline", *args])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, and a stand-in for each program."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "bin").mkdir()
    for program in PROGRAMS.values():
        path = tmp_path / "bin" / program.command
        path.write_text(STAND_IN.format(python=sys.executable, out=str(tmp_path / "given")), encoding="utf-8")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def serving(monkeypatch: pytest.MonkeyPatch, context: int = 32768) -> None:
    monkeypatch.setattr(launch, "_running", lambda url, model: Served("http://127.0.0.1:9", "mine", context))


@pytest.mark.parametrize("name", PROGRAMS)
def test_files_are_what_each_program_can_read(name: str, tmp_path: Path) -> None:
    plan = planned(PROGRAMS[name], Target("http://127.0.0.1:9", MODEL, 6000, tmp_path))
    told = json.dumps([plan.command, plan.environment, plan.files])
    assert "127.0.0.1:9" in told
    assert "{" not in "".join([*plan.command, *plan.environment.values()])
    for file, text in plan.files.items():
        if file.endswith(".toml"):
            read = tomllib.loads(text)
            assert read["model"] == MODEL
            assert read["model_providers"][read["model_provider"]]["base_url"] == "http://127.0.0.1:9/v1"
        elif file.endswith(".yaml"):
            (model,) = yaml.safe_load(text)["models"]
            assert (model["model"], model["apiBase"]) == (MODEL, "http://127.0.0.1:9/v1")
            assert model["defaultCompletionOptions"]["maxTokens"] == 1500  # a quarter of a short context
        elif name == "aider":
            assert json.loads(text)[f"openai/{MODEL}"]["max_input_tokens"] == 6000


def test_opencode_is_given_the_model_it_is_told_of(tmp_path: Path) -> None:
    plan = planned(PROGRAMS["opencode"], Target("http://127.0.0.1:9", "mine", 6000, tmp_path))
    read = json.loads(plan.files["opencode.json"])
    provider, _, model = read["model"].partition("/")
    assert model in read["provider"][provider]["models"]
    assert plan.environment["OPENCODE_CONFIG"] == str(tmp_path / "opencode.json")


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_is_started_with_its_settings_and_its_exit_code_returned(
    name: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    serving(monkeypatch)
    assert call(monkeypatch, "launch", name, "--", "--flag", "a b") == 7
    arguments, environment = json.loads((home / "given").read_text(encoding="utf-8"))
    folder = home / "cache" / "paceline" / "launch" / name
    plan = planned(PROGRAMS[name], Target("http://127.0.0.1:9", "mine", 32768, folder))
    assert arguments == [*plan.command[1:], "--flag", "a b"]
    assert environment.items() >= plan.environment.items()
    assert {path.name for path in folder.iterdir()} - {launch.WRITTEN} == set(plan.files)
    said = capsys.readouterr().err
    assert f"rm -r {folder}" in said
    assert "agents' own prompts" not in said


def test_a_dry_run_shows_all_and_does_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(launch, "_running", lambda url, model: None)
    assert call(monkeypatch, "launch", "codex", "org/mine", "--dry-run", "--", "exec", "a b") == 0
    out = capsys.readouterr().out
    for words in ("config.toml", 'model = "mine"', "CODEX_HOME=", "codex exec 'a b'", "rm -r"):
        assert words in out
    assert not (home / "cache").exists()
    assert not (home / "given").exists()


def test_a_file_that_somebody_has_changed_is_left(tmp_path: Path) -> None:
    assert write(tmp_path, {"a.toml": "x = 1"}) == [f"written: {tmp_path / 'a.toml'}"]
    assert "written" in write(tmp_path, {"a.toml": "x = 2"})[0]  # ours, and not touched since
    (tmp_path / "a.toml").write_text("x = 3", encoding="utf-8")
    (line,) = write(tmp_path, {"a.toml": "x = 4"})
    assert "left as it is" in line
    assert (tmp_path / "a.toml").read_text(encoding="utf-8") == "x = 3"
    (tmp_path / launch.WRITTEN).write_text("[", encoding="utf-8")
    assert "left as it is" in write(tmp_path, {"a.toml": "x = 4"})[0]


def test_what_is_missing_is_said(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    assert call(monkeypatch, "launch", "codex", "--url", "http://127.0.0.1:1") == 2
    assert "does not answer" in capsys.readouterr().err
    serving(monkeypatch, 2048)
    assert call(monkeypatch, "launch", "aider") == 7
    assert "mine reads 2,048 tokens" in capsys.readouterr().err
    (home / "bin" / "codex").unlink()
    assert call(monkeypatch, "launch", "codex") == 2
    assert "npm install -g @openai/codex" in capsys.readouterr().err
    assert call(monkeypatch, "launch") == 0
    out = capsys.readouterr().out
    assert all(name in out for name in PROGRAMS)
    assert "(installed)" in out
    assert call(monkeypatch, "launch", "emacs") == 2


def test_a_server_is_started_for_it_and_ends_with_it(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    ended: list[str] = []

    @contextmanager
    def started(model: str, folder: Path) -> Iterator[Served]:
        yield Served("http://127.0.0.1:9", model, 32768)
        ended.append(model)

    monkeypatch.setattr(launch, "_running", lambda url, model: None)
    monkeypatch.setattr(launch, "_started", started)
    assert call(monkeypatch, "launch", "aider", "demo") == 7
    assert ended == ["demo"]


@pytest.mark.slow
def test_a_real_server_is_started(home: Path) -> None:
    with launch._started("demo", home) as served:
        assert served.model == "demo"
        assert served.context > 0
        assert launch._running(served.url, None) == served
        assert launch._running(served.url, "other") is None
    assert launch._running(served.url, None) is None


@pytest.mark.slow
def test_why_a_server_does_not_start(home: Path) -> None:
    from paceline.errors import LoadError

    with pytest.raises(LoadError, match="nowhere"), launch._started("./nowhere", home):
        pass
