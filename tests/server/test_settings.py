"""The config file and the command's refusals: one clear line each, before anything is loaded."""

from __future__ import annotations

import re
import socket
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from paceline.config import EngineConfig
from paceline.errors import UsageError
from paceline.server import start as start_module
from paceline.server.schema import ChatRequest, CompletionRequest, Message, Speculation, StreamOptions
from paceline.server.settings import ServerConfig, read_config
from paceline.server.start import model_name, start


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server]\nprot = 1", "did you mean port"),
        ("[sever]\n", "did you mean server"),
        ("[engine]\ndrafter_tokens = 1", "did you mean draft_tokens"),
        ("[server]\nport = '1'", "wrong type"),
        ("[server]\nport = true", "wrong type"),
        ("[engine]\nverify = 'lossy'", "wrong type"),
        ("port = 1", "unknown key"),
        ("server = 5", "has to be a table"),
        ("[server", "not valid TOML"),
        ("[server]\nallowed_hosts = [1]", "wrong type"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_config(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_config(tmp_path / "none.toml")


def test_the_shipped_example_holds_the_defaults() -> None:
    example = Path(__file__).parents[2] / "deploy" / "paceline.toml"
    server, engine = read_config(example)
    assert ServerConfig(**server) == ServerConfig()
    assert EngineConfig(**engine) == EngineConfig()


def test_the_docs_list_every_setting_with_its_default_and_every_field() -> None:
    text = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
    listed = dict(re.findall(r"^\| `(\w+)` \| ([^`\s]+) \|", text, re.MULTILINE))
    for field in fields(ServerConfig):
        default = field.default
        assert listed.pop(field.name) == (
            "none" if default is None or default == () else str(default).lower() if isinstance(default, bool)
            else f"{default:g}" if isinstance(default, float) else str(default)
        )  # fmt: skip
    assert not listed
    for model in (ChatRequest, CompletionRequest, Message, StreamOptions, Speculation):
        for name in model.model_fields:
            assert re.search(rf"[`.\"]{name}[`\"]", text), f"{model.__name__}.{name} is not in the docs"


@pytest.mark.parametrize(
    "options", [{"port": 70000}, {"max_n": -1}, {"request_timeout": float("nan")}, {"host": "0.0.0.0"}]
)
def test_impossible_values_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ServerConfig(**options)


def test_everything_is_refused_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(start_module, "run", lambda *args: started.append(args))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for server, engine, message in (
            ({"port": port}, {}, "choose another --port"),
            ({"api_key_file": str(tmp_path / "none")}, {}, "api-key-file .* cannot be read"),
            ({"port": 0}, {"verify": "lossy"}, "verify="),
            ({"port": 0}, {"draft_tokens": 99}, "draft_tokens"),
            ({"host": "203.0.113.9", "without_key": True}, {}, "cannot listen"),
        ):
            with pytest.raises(UsageError, match=message) as caught:
                start(None, server, engine, print)
            assert caught.value.exit_code == 2
            assert "\n" not in str(caught.value)
    assert not started


def test_flags_win_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        '[server]\nport = 1\nmax_n = 3\nallowed_hosts = ["a.example"]\n[engine]\ntarget = "x/y-z"\n'
    )
    seen: list[Any] = []
    monkeypatch.setattr(
        start_module, "run", lambda app, worker, config, listening: seen.append((app, config))
    )
    start(str(path), {"port": 0, "max_n": None}, {"target": None}, print)
    app, config = seen[0]
    assert (config.port, config.max_n, config.allowed_hosts) == (0, 3, ("a.example",))
    assert app.state.service.model == "y-z"


def test_model_names_come_from_the_target() -> None:
    assert model_name("demo") == "demo"
    assert model_name("google/gemma-4-E2B-it") == "gemma-4-E2B-it"
    assert model_name("/models/my model/") == "my-model"
