"""`serve --replicas` and `generate --ray` as users run them, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from click.testing import CliRunner

import paceline
from paceline.cli import group, options
from paceline.cluster.config import FleetConfig, sized
from paceline.config import EngineConfig
from paceline.errors import UsageError

DEMO = Path(paceline.__file__).parent / "demo"
ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-c", "from paceline.cli import main; main()"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(paceline.__file__).parents[1])}
has_demo = pytest.mark.skipif(
    not (DEMO / "target" / "config.json").is_file(), reason="the demo pair is not here"
)


def needs_ray() -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install paceline[ray]")


def ended(*arguments: str, seconds: float = 120) -> tuple[int, str]:
    """Exit code and standard error of a command."""
    done = subprocess.run(
        [*COMMAND, *arguments], env=ENVIRONMENT, capture_output=True, text=True, timeout=seconds, check=False
    )
    return done.returncode, done.stderr


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(options.importlib.util, "find_spec", lambda name: None)
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "x"}\n')
    for arguments in (
        ["serve", "--replicas", "2"],
        ["generate", str(source), "-o", str(tmp_path / "out.jsonl"), "--ray"],
    ):
        result = CliRunner().invoke(group, arguments)
        assert isinstance(result.exception, UsageError)
        assert str(result.exception) == "ray is missing: install it with `pip install paceline[ray]`"


def test_what_cannot_be_is_refused() -> None:
    needs_ray()
    with pytest.raises(UsageError, match="below replicas=3"):
        FleetConfig(replicas=3, max_replicas=2)
    with pytest.raises(UsageError, match="give at least 1"):
        FleetConfig(replicas=0)
    with pytest.raises(UsageError, match="give threads"):
        sized(EngineConfig(), FleetConfig(ray_address="auto"))
    assert sized(EngineConfig(), FleetConfig(replicas=1000)).threads == 1
    result = CliRunner().invoke(group, ["serve", "--replicas", "3", "--max-replicas", "2"])
    assert "below replicas=3" in str(result.exception)
    code, said = ended("generate", "none.jsonl", "-o", "out.jsonl", "--ray-address", "x")
    assert code == 2
    assert "--ray-address is for --ray" in said


def test_a_cluster_that_is_not_there_is_one_line() -> None:
    needs_ray()
    code, said = ended("serve", "--ray-address", "127.0.0.1:1", "--threads", "1", "--port", "0")
    assert code == 2, said
    assert "cannot join Ray at 127.0.0.1:1" in said
    assert "Traceback" not in said


def test_the_server_ends_though_ray_has_died(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What asks a dead Ray waits for ever."""
    needs_ray()
    from paceline.cluster.fleet import Elsewhere

    released = threading.Event()
    place = Elsewhere(FleetConfig(replicas=1))
    place._deployed, place._patience = "paceline-demo", 0.05
    monkeypatch.setattr("paceline.cluster.fleet.ray.is_initialized", lambda: True)
    monkeypatch.setattr("paceline.cluster.fleet.serve.delete", lambda name: released.wait(30))
    monkeypatch.setattr("paceline.cluster.fleet.serve.shutdown", lambda: None)
    monkeypatch.setattr("paceline.cluster.fleet.ray.shutdown", lambda: None)
    place.close()
    assert not released.is_set()
    assert "Ray does not answer" in caplog.text
    released.set()


@has_demo
def test_the_application_and_its_files_for_ray_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file for `serve run`, and the one for KubeRay, name what can be built."""
    needs_ray()
    yaml = pytest.importorskip("yaml")
    from ray.serve.schema import ServeDeploySchema

    from paceline.cluster.app import build

    plain = yaml.safe_load((ROOT / "deploy/ray-serve.yaml").read_text(encoding="utf-8"))
    kube = yaml.safe_load((ROOT / "deploy/rayservice.yaml").read_text(encoding="utf-8"))
    assert kube["kind"] == "RayService"
    for config in (plain, yaml.safe_load(kube["spec"]["serveConfigV2"])):
        (app,) = ServeDeploySchema.model_validate(config).applications
        assert app.import_path == "paceline.cluster.app:build"
        assert build(app.args) is not None
    for wrong, message in (
        ({"engine": {}}, "give threads"),
        ({"engine": {"threads": 1}, "fleet": {"replica": 2}}, "did you mean replicas"),
        ({"engine": {"threads": 1, "target": 5}}, "target=5 is not possible"),
        ({"engine": {"threads": 1}}, "give --api-key-file"),
        ({"engine": {"threads": 1}, "server": {"host": "127.0.0.1"}}, "leave it out"),
    ):
        with pytest.raises(UsageError, match=message):
            build(wrong)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("batch") / "in.jsonl"
    asked: list[dict[str, Any]] = [
        {
            "id": f"line {i}",
            "prompt": f"def f{i}(",
            "seed": i,
            "temperature": 0.8,
            "max_tokens": 60,
            "n": 1 + i % 2,
        }
        for i in range(40)
    ]
    asked[7] = {"id": "bad", "prompt": "x", "top_p": 7}
    asked[9] = {"id": "empty", "prompt": []}
    path.write_text("".join(json.dumps(one) + "\n" for one in asked))
    return path


def actors(parent: int) -> list[int]:
    """The processes of the writers below a command's process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            title, pid = path.read_bytes(), int(path.parent.name)
            while title.startswith(b"ray::Writer") and pid not in (0, 1, parent):
                pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if title.startswith(b"ray::Writer") and pid == parent:
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@has_demo
def test_a_batch_over_actors_is_the_batch_of_one_engine_in_order(lines: Path, tmp_path: Path) -> None:
    """Both actors are killed on the way, and the first one that comes back again. A second run has nothing left to do
    but the lines that are wrong.
    """
    needs_ray()
    options_ = ["--threads", "1", "--max-model-len", "256", "--max-batch", "4"]
    one, many = tmp_path / "one.jsonl", tmp_path / "many.jsonl"
    code, said = ended("generate", str(lines), "-o", str(one), *options_)
    assert code == 2, said
    arguments = ["generate", str(lines), "-o", str(many), "--ray", "--replicas", "2", *options_]
    with subprocess.Popen(
        [*COMMAND, *arguments], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            end = time.monotonic() + 100
            while many.stat().st_size == 0 if many.exists() else True:
                assert time.monotonic() < end
                assert running.poll() is None, running.stderr
                time.sleep(0.02)
            killed = actors(running.pid)
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            while not (back := set(actors(running.pid)) - set(killed)):
                assert time.monotonic() < end
                time.sleep(0.02)
            os.kill(back.pop(), signal.SIGKILL)
            assert running.wait(100) == 2
        finally:
            running.kill()
    got = [json.loads(line) for line in many.read_text().splitlines()]
    expected = {r["id"]: r for r in map(json.loads, one.read_text().splitlines())}
    assert {r["id"]: r.get("texts", r.get("text")) for r in got} == {
        name: r.get("texts", r.get("text")) for name, r in expected.items()
    }
    assert len(got) == 40
    answered = [r["id"] for r in got if "text" in r]
    assert answered == [f"line {i}" for i in range(40) if i not in (7, 9)]
    before = many.read_bytes()
    code, said = ended(*arguments)
    assert code == 2
    assert "are done already" in said
    assert many.read_bytes() == before


@has_demo
def test_the_server_with_replicas_drains_on_sigterm() -> None:
    needs_ray()
    arguments = [
        "serve",
        "demo",
        "--replicas",
        "1",
        "--threads",
        "1",
        "--max-model-len",
        "512",
        "--port",
        "0",
    ]
    body = {"model": "demo", "prompt": "def f(", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with subprocess.Popen(
        [*COMMAND, *arguments], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            assert server.stdout is not None
            url = next(line.split()[-1] for line in server.stdout if "is ready on" in line)
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
                found = stream.iter_lines()
                next(found)
                server.send_signal(signal.SIGTERM)
                rest = [line for line in found if line]
            assert rest[-1] == "data: [DONE]"
            assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
            assert server.wait(30) == 0
        finally:
            server.kill()
