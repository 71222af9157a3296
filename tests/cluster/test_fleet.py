"""Two engines of the bundled pair as replicas on a Ray of this machine, behind the real server."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install paceline[ray]")

from ray import serve

import paceline
from paceline.cluster.app import build
from paceline.cluster.config import FleetConfig, sized
from paceline.cluster.fleet import Elsewhere, deployment, join
from paceline.cluster.worker import RemoteWorker
from paceline.config import EngineConfig
from paceline.errors import LoadError
from paceline.llm import LLM
from paceline.server.metrics import Metrics
from paceline.server.service import Service
from paceline.server.settings import ServerConfig
from server.serving import Served, served

DEMO = Path(paceline.__file__).parent / "demo"
pytestmark = [
    pytest.mark.skipif(not (DEMO / "target" / "config.json").is_file(), reason="the demo pair is not here"),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]
PROMPTS = ["def parse(self, text):\n    ", "class Queue:\n", "import os\nimport ", "for item in items:\n"]
ENGINE = EngineConfig(target="demo", threads=1, max_model_len=512)
FLEET = FleetConfig(replicas=2)
STREAMS = 12


def ask_for(i: int) -> dict[str, Any]:
    """The sampling of the i-th request."""
    said: dict[str, Any] = {"max_tokens": 120, "seed": i, "temperature": (0, 0.8)[i % 2], "ignore_eos": True}
    if i % 3 == 0:
        said |= {"repetition_penalty": 1.1, "min_p": 0.02, "stop": ["\n\n\n\n"]}
    return said


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The token ids of one undisturbed engine."""
    with LLM("demo", threads=1, max_model_len=512) as llm:
        params = [llm.params(**ask_for(i)) for i in range(STREAMS)]
        return [c.token_ids for c in llm.generate([PROMPTS[i % 4] for i in range(STREAMS)], params)]


@pytest.fixture(scope="module")
def proxy() -> int:
    """Where Ray's own HTTP proxy is bound."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def s(proxy: int) -> Iterator[Served]:
    place = Elsewhere(FLEET)

    def join_first(load: Callable[[], Any], config: ServerConfig) -> RemoteWorker:
        join(
            FLEET, 4
        )  # cores as Ray counts them: a test adds a third replica, another one a replica and its ingress
        serve.start(
            http_options={"port": proxy}
        )  # for the test of the application that has its ingress within
        return RemoteWorker(load, max_texts=config.max_texts)

    try:
        with served(
            load=lambda service: place.load(ENGINE, service, lambda line: None),
            worker=join_first,
            request_timeout=300,
        ) as server:
            wait(lambda: len(replicas()) == 2)
            yield server
            assert server.service.loaded is not None
            server.service.loaded.grammars.close()
    finally:
        place.close()


def wait(check: Callable[[], bool], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.05)


def replicas() -> list[int]:
    """The processes of the replicas, if all of them are ready."""
    (app,) = [app for name, app in serve.status().applications.items() if name == "paceline-fake"]
    found = processes(b"ray::ServeReplica:paceline-fake:Replica")
    return found if len(found) == app.deployments["Replica"].replica_states.get("RUNNING", 0) else []


def processes(name: bytes) -> list[int]:
    """Ray's processes of this name."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            title = path.read_bytes()
        except OSError:
            continue
        if title.startswith(name) and descends(int(path.parent.name)):
            found.append(int(path.parent.name))
    return found


def descends(pid: int) -> bool:
    """Whether a process was started by this one, however far back."""
    while pid > 1:
        if pid == os.getpid():
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return False


def stream(s: Served, i: int, **more: Any) -> list[int]:
    """The token ids of the i-th request; its text is whole."""
    body = {"model": "fake", "prompt": PROMPTS[i % 4], "stream": True, "speculation": {"trace": True}}
    ids: list[int] = []
    reason = None
    with httpx.stream(
        "POST", f"{s.url}/v1/completions", json={**body, **ask_for(i), **more}, timeout=300
    ) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                ids += chunk["paceline"]["tokens"]
                reason = chunk["choices"][0]["finish_reason"]
    assert reason in ("length", "stop")
    return ids


def all_streams(s: Served) -> list[list[int]]:
    with ThreadPoolExecutor(STREAMS) as pool:
        return list(pool.map(lambda i: stream(s, i), range(STREAMS)))


def worker(s: Served) -> RemoteWorker:
    assert isinstance(s.worker, RemoteWorker)
    return s.worker


def test_two_replicas_write_what_one_engine_writes(s: Served, expected: list[list[int]]) -> None:
    assert all_streams(s) == expected
    shown = s.client.get("/metrics").text
    assert shown.count("paceline_replica_tokens_total{") == 2
    assert 'chosen="load"' in shown
    assert 'value="engine_steps"' in shown
    assert "paceline_moved_total 0.0" in shown
    assert "paceline_replica_kinds 1.0" in shown


def test_a_killed_replica_loses_no_token(s: Served, expected: list[list[int]]) -> None:
    moved = worker(s).replicas.moved
    for kills in range(6):
        if kills >= 2 and worker(s).replicas.moved > moved:
            break  # a replica of which no text had begun moves none
        wait(lambda: len(replicas()) == 2)
        victim = replicas()[0]
        before = worker(s).replicas.tokens.copy()
        with ThreadPoolExecutor(STREAMS) as pool:
            open_ = [pool.submit(stream, s, i) for i in range(STREAMS)]
            wait(lambda before=before: (worker(s).replicas.tokens - before).total() > 4 * STREAMS)
            os.kill(victim, signal.SIGKILL)
            assert [one.result() for one in open_] == expected
    assert worker(s).replicas.moved > moved
    assert worker(s).load().texts == 0


def test_grammars_and_several_texts_go_to_replicas(s: Served) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"],
              "additionalProperties": False}  # fmt: skip
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"prompt": PROMPTS[1], "seed": 5, "max_tokens": 100, "n": 3, "temperature": 0.8}
    answer = s.post("/v1/completions", **body, response_format=wanted).json()
    assert [isinstance(json.loads(c["text"])["age"], int) for c in answer["choices"]] == [True] * 3
    bad = s.post("/v1/completions", **body, response_format={"type": "regex", "regex": "("})
    assert bad.status_code == 400
    assert "grammar" in bad.json()["error"]["message"]


def test_a_client_that_leaves_frees_its_replica(s: Served) -> None:
    wait(lambda: len(replicas()) == 2)
    body = {"prompt": PROMPTS[0], "max_tokens": 480, "ignore_eos": True, "stream": True, "model": "fake"}
    with httpx.stream("POST", f"{s.url}/v1/completions", json=body, timeout=300) as answer:
        next(answer.iter_lines())
    wait(lambda: worker(s).load().texts == 0)
    wait(lambda: not +worker(s).replicas.open)
    assert len(stream(s, 1)) == 120


def test_a_model_that_no_replica_can_load_is_one_line(s: Served, tmp_path: Path) -> None:
    for file in (DEMO / "target").iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).symlink_to(file)
    place, worker = Elsewhere(FleetConfig(replicas=1)), RemoteWorker(lambda: None)
    broken = Service("broken", ServerConfig(), worker, Metrics(worker))
    with pytest.raises(
        LoadError, match=r"no replica could be started: .*safetensors is named in the index but missing"
    ):
        place.load(replace(ENGINE, target=str(tmp_path)), broken, lambda line: None)
    serve.delete("paceline-broken")


def test_scaled_down_and_up_under_load_nothing_is_lost(s: Served, expected: list[list[int]]) -> None:
    done = threading.Event()
    failed: list[BaseException] = []
    counts: list[int] = []

    def load() -> None:
        while not done.is_set():
            try:
                with ThreadPoolExecutor(4) as pool:
                    assert list(pool.map(lambda i: stream(s, i), range(4))) == expected[:4]
                counts.append(1)
                done.wait(0.3)  # two cores have replicas to start, too
            except BaseException as error:  # noqa: BLE001  it is reported below
                failed.append(error)
                return

    thread = threading.Thread(target=load)
    thread.start()
    try:
        for count in (3, 1):
            fleet = FleetConfig(replicas=count)
            app = deployment(sized(ENGINE, fleet), s.service.config, fleet)
            serve.run(app, name="paceline-fake", route_prefix=None)
            wait(lambda count=count: len(replicas()) == count)
    finally:
        done.set()
        thread.join(60)
    assert not failed, failed
    assert counts


def test_streams_need_no_controller_and_ray_starts_it_again(s: Served, expected: list[list[int]]) -> None:
    before = len(replicas())
    with ThreadPoolExecutor(4) as pool:
        open_ = [pool.submit(stream, s, i) for i in range(4)]
        os.kill(processes(b"ray::ServeController")[0], signal.SIGKILL)
        assert [one.result() for one in open_] == expected[:4]
    wait(lambda: len(replicas()) == before)
    assert stream(s, 5) == expected[5]


def test_the_application_with_its_ingress_within_ray(
    s: Served, proxy: int, expected: list[list[int]]
) -> None:
    args = {
        "engine": {"target": "demo", "threads": 1, "max_model_len": 512},
        "server": {"without_key": True, "model_name": "fake"},
    }
    app = serve.RunTarget(build(args), name="whole", route_prefix="/whole")
    serve.run_many([app], wait_for_applications_running=False)
    wait(lambda: serve.status().applications["whole"].status == "RUNNING")
    inside = replace(s, url=f"http://127.0.0.1:{proxy}/whole")
    wait(lambda: httpx.get(f"{inside.url}/health").status_code == 200)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda i: stream(inside, i), range(4))) == expected[:4]
    body = {"prompt": "x", "max_tokens": 480, "ignore_eos": True, "stream": True, "model": "fake"}
    with httpx.stream("POST", f"{inside.url}/v1/completions", json=body, timeout=300) as answer:
        next(answer.iter_lines())
    wait(lambda: "paceline_open_texts 0.0" in httpx.get(f"{inside.url}/metrics").text, 20)
    serve.delete("whole")
