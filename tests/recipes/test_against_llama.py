"""The comparison with llama-server, against a stand-in that speaks its protocol: no llama.cpp is needed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.errors import LoadError, RequestFailed, UsageError
from paceline.ops import native

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "compare"
DEMO = Path(__file__).resolve().parents[2] / "src" / "paceline" / "demo"

SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

if "--version" in sys.argv:
    print("version: stand-in")
    sys.exit()
if "--broken" in sys.argv:
    sys.exit("error: no such model")
port = int(sys.argv[sys.argv.index("--port") + 1])
short = "--short" in sys.argv


class Handler(BaseHTTPRequestHandler):
    def answer(self, body):
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self):
        self.answer({"status": "ok", "pid": os.getpid()})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        count = asked["n_predict"] - short
        tokens = [asked["prompt"][-1]] * count
        self.answer({"tokens": tokens, "timings": {"predicted_ms": 10.0, "draft_n": 4, "draft_n_accepted": 2}})

    def log_message(self, *args):
        pass


print("pid", os.getpid(), flush=True)
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(RECIPE))
    import against_llama
    import comparison
    import llama_modes
    import llama_server

    return SimpleNamespace(main=against_llama, comparison=comparison, modes=llama_modes, server=llama_server)


@pytest.fixture
def binary(tmp_path: Path) -> Path:
    path = tmp_path / "llama-server"
    path.write_text(f"#!{sys.executable}\n{SERVER}")
    path.chmod(0o755)
    return path


def alive(log: Path) -> bool:
    pid = int(log.read_text().split()[1])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_server_answers_and_is_stopped(recipe: SimpleNamespace, binary: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with recipe.server.LlamaServer(binary, [], log) as server:
        reply = server.complete([5, 7], 6)
        assert alive(log)
    assert reply.token_ids == [7] * 6
    assert reply.decode_seconds == pytest.approx(0.010)
    assert (reply.drafted, reply.accepted) == (4, 2)
    assert not alive(log)


def test_server_is_stopped_after_an_error(recipe: SimpleNamespace, binary: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        pytest.raises(RequestFailed, match="5 tokens where 6 were asked"),
        recipe.server.LlamaServer(binary, ["--short"], log) as server,
    ):
        server.complete([5, 7], 6)
    assert not alive(log)


def test_server_that_does_not_start_says_why(recipe: SimpleNamespace, binary: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"(?s)ended with 1.*no such model"):
        recipe.server.LlamaServer(binary, ["--broken"], tmp_path / "log").__enter__()


def test_no_server_that_is_one(
    recipe: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="build it"):
        recipe.modes.find_binary(None, tmp_path)
    text = tmp_path / "text"
    text.write_text("no program")
    with pytest.raises(LoadError, match="cannot be started"):
        recipe.server.LlamaServer(text, [], tmp_path / "log").__enter__()


def test_every_mode_is_well_formed(recipe: SimpleNamespace, tmp_path: Path) -> None:
    modes = recipe.modes.MODES
    assert len({mode.name for mode in modes}) == len(modes)
    for mode in modes:
        flags = recipe.modes.command_flags(mode, tmp_path, 3)
        loaded = {Path(flag).name for flag in flags if flag.endswith(".gguf")}
        assert loaded == {recipe.modes.file_name(*need) for need in recipe.modes.files_needed([mode])}
        assert flags[flags.index("-t") + 1] == "3"
    with pytest.raises(UsageError, match="no mode 'fast'"):
        recipe.modes.chosen(["fast"])


def test_speeds_and_where_texts_part(recipe: SimpleNamespace) -> None:
    reply, comparison = recipe.server.Reply, recipe.comparison
    slow = [[reply([1] * 11, 2.0, 1.0), reply([1] * 11, 2.0, 1.0)]] * 3
    fast = [[reply([1] * 11, 1.0, 0.5, 9, 6), reply([1] * 11, 1.0, 0.5, 9, 5)]] * 3
    speeds = {"a x": comparison.Speed.of(slow), "a y": comparison.Speed.of(fast)}
    assert speeds["a x"].decode == [10.0] * 3
    assert speeds["a y"].request == [11.0] * 3
    assert speeds["a y"].tokens_per_step == 2.0
    assert comparison.best(speeds, "a ") == "a y"
    assert comparison.ratios(speeds, "a y", "a x") == [2.0] * 3
    assert "| a y | 20 | 20 to 20 | 2.00 | 11 | 2.00 |" in comparison.table(speeds, "a x")
    assert comparison.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert comparison.first_difference([1, 2, 3], [1, 5, 3]) == 1


def test_whole_run(
    recipe: SimpleNamespace, binary: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    asked = f"x --llama-cpp {tmp_path} --server {binary} --rounds 2 --prompts 2 --tokens 6 --threads 1"
    found = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", [*asked.split(), "--only", "f32 plain", "--json", str(found)])
    recipe.main.main()
    said = capsys.readouterr().out
    assert "paceline f32 mtp 4 over llama f32 plain:" in said
    assert "paceline f32 none: 2 of 2 texts equal" in said
    assert "paceline f32 mtp 4: 2 of 2 texts equal" in said
    assert "llama f32 plain: 0 of 2 texts equal (prompt 0 from token" in said
    result = json.loads(found.read_text())
    assert result["provenance"]["llama_server"] == "version: stand-in"
    ours = 6 if native.available() and native.bf16_dot() else 3
    assert [len(speed["decode"]) for speed in result["speeds"].values()] == [2] * (ours + 1)
    assert ("paceline bf16 auto" in result["speeds"]) == (ours == 6)


@pytest.mark.parametrize(
    ("more", "code", "word"),
    [
        ("--tokens 1", 2, "first token to the last"),
        ("--rounds 0", 2, "--rounds 0 is not possible"),
        ("--only fast", 2, "no mode 'fast'"),
        ("--prompts 99", 2, "there are 60"),
    ],
)
def test_bad_arguments(
    recipe: SimpleNamespace, binary: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    more: str, code: int, word: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["x", "--llama-cpp", ".", "--server", str(binary), *more.split()])
    with pytest.raises(SystemExit) as stopped:
        recipe.main.main()
    assert stopped.value.code == code
    assert word in capsys.readouterr().err
