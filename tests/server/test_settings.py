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
from paceline.server.errors import ApiError
from paceline.server.params import check_limits, sampling_params
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
        ("[engine]\nverify = 'lossy'", "is unknown: use match"),
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
    text = (Path(__file__).parents[2] / "docs" / "server-reference.md").read_text()
    listed = dict(re.findall(r"^\| `(\w+)` \| ([^`\s]+) \|", text, re.MULTILINE))
    for field in fields(ServerConfig):
        if field.name == "sampling":
            continue  # a table of its own
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


def test_a_server_has_sampling_defaults_by_flag_and_by_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags win over the file, and what a request says over both."""
    path = tmp_path / "c.toml"
    path.write_text("[sampling]\ntemperature = 0.7\ntop_p = 0.9\nmax_tokens = 40\n")
    seen: list[ServerConfig] = []
    monkeypatch.setattr(start_module, "run", lambda app, worker, config, listening: seen.append(config))
    start(str(path), {"port": 0, "sampling": {"temperature": 0.2}}, {}, print)
    assert dict(seen[0].sampling) == {"temperature": 0.2, "top_p": 0.9, "max_tokens": 40}
    for body, expected in (
        (CompletionRequest(prompt="x"), (0.2, 0.9, 40)),
        (CompletionRequest(prompt="x", temperature=1.5, max_tokens=3), (1.5, 0.9, 3)),
        (ChatRequest(messages=[{"role": "user", "content": "x"}]), (0.2, 0.9, 40)),
    ):
        params = sampling_params(body, 1000, {}, seen[0].sampling)
        assert (params.temperature, params.top_p, params.max_tokens) == expected
    params = sampling_params(CompletionRequest(prompt="x"), 9, {}, seen[0].sampling)
    assert params.max_tokens == 9  # no more than fit
    with pytest.raises(UsageError, match="temperature=-1 is not possible"):
        start(None, {"port": 0, "sampling": {"temperature": -1}}, {}, print)
    for text, message in (
        (
            "[sampling]\ntemprature = 1.0\n",
            r"\[sampling\]: unknown key 'temprature': did you mean temperature",
        ),
        ("[server]\nsampling = {}\n", "unknown key 'sampling'"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=message):
            read_config(path)


def test_top_p_may_be_0_and_stop_strings_many() -> None:
    many = [f"stop {i}" for i in range(ServerConfig().max_stop)]
    body = CompletionRequest(prompt="x", top_p=0, temperature=1.0, stop=many)
    check_limits(body, ServerConfig())
    params = sampling_params(body, 100, {}, {})
    assert (params.top_p, len(params.stop)) == (0, 64)
    with pytest.raises(ApiError, match="at most 64 strings"):
        check_limits(CompletionRequest(prompt="x", stop=[*many, "y"]), ServerConfig())
