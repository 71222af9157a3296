"""Several models in one server: chosen by name, loaded on demand, unloaded when idle or for room."""

from __future__ import annotations

import gc
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from decoders import build_decoder
from paceline.assembly import Footprint
from paceline.chat.road import Chats
from paceline.config import EngineConfig
from paceline.engine.worker import Worker
from paceline.errors import LoadError, UsageError
from paceline.server import start as start_module
from paceline.server.errors import ApiError
from paceline.server.models import Models, seconds_of
from paceline.server.run import PatientServer, bind, settings
from paceline.server.security import Gate, Keys
from paceline.server.service import Room, Service
from paceline.server.settings import Served, ServerConfig, read_models
from paceline.server.several import build_models
from paceline.server.start import start
from paceline.text.formats.gemma import GEMMA
from server.fake_engine import FakeEngine, make_tokenizer
from server.serving import NoGrammars, render

MIB = 1 << 20
TEXT = "/v1/completions"


@dataclass
class Several:
    """A server of fake models that say their own names; each takes 100 MiB."""

    models: Models
    client: httpx.Client
    engines: dict[str, list[FakeEngine]] = field(default_factory=dict)
    fails: dict[str, Exception] = field(default_factory=dict)

    def loaded(self) -> list[str]:
        return [one["id"] for one in self.client.get("/v1/models").json()["data"] if one["loaded"]]

    def say(self, model: str | None = None, path: str = TEXT, **body: Any) -> httpx.Response:
        asked = {"prompt": "x", "max_tokens": 40} | ({"model": model} if model else {}) | body
        return self.client.post(path, json=asked)

    def until(self, check: Callable[[], bool], seconds: float = 10.0) -> bool:
        end = time.monotonic() + seconds
        while not check() and time.monotonic() < end:
            time.sleep(0.01)
        return check()


@contextmanager
def running(*names: str, slow: float = 0.0, **options: Any) -> Iterator[Several]:
    config = ServerConfig(**({"port": 0} | options))
    made: dict[str, list[FakeEngine]] = {}
    fails: dict[str, Exception] = {}

    def make(wanted: Callable[[], EngineConfig], service: Service) -> Worker:
        def load() -> FakeEngine:
            wanted()
            if service.model in fails:
                raise fails[service.model]
            engine = FakeEngine(make_tokenizer(), script=f"I am {service.model}.", delay=slow)
            made.setdefault(service.model, []).append(engine)
            chats = Chats(engine.tokenizer, render, GEMMA)
            service.loaded = Room(
                chats, NoGrammars(), engine.max_len, engine.tokenizer.vocab_size, ("none",), chat=True
            )
            return engine

        return Worker(load, max_texts=config.max_texts)

    models = build_models({name: Served({}) for name in names}, {}, config, make, False)
    models._measure = lambda wanted: Footprint(80 * MIB, 20 * MIB, 1 << 40)
    listening = bind(config)
    gate = Gate(models, config, Keys([]), models.entries[0].service.metrics.answered, None, models.most_bytes)
    server = PatientServer(settings(gate, config), models, config.drain_timeout)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    models.start()
    thread.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=30) as client:
            yield Several(models, client, made, fails)
    finally:
        server.should_exit = True
        models.close()
        thread.join(10)
        models.join(10)
        listening.close()


def test_a_request_chooses_by_name_and_models_are_loaded_on_first_use() -> None:
    with running("a", "b") as s:
        assert s.say().json()["choices"][0]["text"] == "I am a."
        assert s.loaded() == ["a"], "the first is loaded at start, and answers who names none"
        assert s.say("b").json()["choices"][0]["text"] == "I am b."
        assert s.say("b").json()["model"] == "b"
        assert s.say("a").json()["choices"][0]["text"] == "I am a."
        assert s.loaded() == ["a", "b"]
        assert {name: len(engines) for name, engines in s.engines.items()} == {"a": 1, "b": 1}
        talk = {"messages": [{"role": "user", "content": "hi"}], "stream": False}
        assert s.say("b:latest", "/api/chat", **talk).json()["message"]["content"] == "I am b."
        assert (
            s.say("b", "/v1/messages", **talk | {"max_tokens": 40}).json()["content"][0]["text"] == "I am b."
        )
        made = s.client.post("/v1/responses", json={"model": "b", "input": "hi"}).json()
        assert made["output"][0]["content"][0]["text"] == "I am b."
        assert s.client.get("/props", params={"model": "b"}).json()["model_alias"] == "b"


def test_who_is_unknown_is_a_404_and_bad_bodies_are_told() -> None:
    with running("a", "b") as s:
        for path, shape in ((TEXT, "error"), ("/api/chat", None), ("/v1/messages", "error")):
            answer = s.say("c", path)
            assert answer.status_code == 404
            said = answer.json()["error"] if shape is None else answer.json()["error"]["message"]
            assert "use one of 'a', 'b'" in said
        assert s.client.get("/v1/models/c").status_code == 404
        assert s.client.get("/v1/models/b").json()["id"] == "b"
        headers = {"Content-Type": "application/json"}
        for content in ("{", "[1]", '{"model": 5, "prompt": "x"}', "[" * 40000):
            assert s.client.post(TEXT, content=content, headers=headers).status_code == 400, content[:20]
        assert s.client.post("/nowhere", json={"model": "b"}).status_code == 404
        assert s.client.get("/nowhere").status_code == 404
        assert s.loaded() == ["a"], "none of these has loaded anything"
        assert s.until(lambda: s.client.head("/health").status_code == 200)
        assert s.client.get("/").status_code == 200


def test_idle_models_are_unloaded_and_come_back() -> None:
    with running("a", "b", idle_unload=0.2) as s:
        assert s.say("b").status_code == 200
        engine = weakref.ref(s.engines["b"].pop())
        assert s.until(lambda: s.loaded() in (["a"], []))
        assert s.until(lambda: gc.collect() >= 0 and engine() is None), "what it was made of is gone"
        assert s.say("b").json()["choices"][0]["text"] == "I am b."
        lines = s.client.get("/metrics").text.splitlines()
        (steps,) = [line.split()[1] for line in lines if line.startswith("paceline_engine_steps ")]
        assert float(steps) > 2, "those of the engine that is gone count, too"


def test_keep_alive_of_a_request() -> None:
    with running("a", "b") as s:
        s.say("b", "/api/generate", stream=False, keep_alive="1h")
        (entry,) = [one for one in s.client.get("/api/ps").json()["models"] if one["name"] == "b"]
        assert not entry["expires_at"].startswith("9999")
        assert "warnings" not in s.say("b", keep_alive=-1).json()
        (entry,) = [one for one in s.client.get("/api/ps").json()["models"] if one["name"] == "b"]
        assert entry["expires_at"].startswith("9999")
        done = s.client.post("/api/generate", json={"model": "b", "keep_alive": 0}).json()
        assert done["done_reason"] == "unload"
        assert s.until(lambda: s.loaded() == ["a"])
        assert s.say("b").status_code == 200
        (entry,) = [one for one in s.client.get("/api/ps").json()["models"] if one["name"] == "b"]
        assert entry["expires_at"].startswith("9999"), "what one request says does not hold for the next"
        s.say("b", keep_alive=0)
        assert s.until(lambda: s.loaded() == ["a"])
        assert [one["name"] for one in s.client.get("/api/tags").json()["models"]] == ["a", "b"]
        for wrong in ("soon", "5 minutes", True, [], {"s": 1}, "9" * 100):
            answer = s.say("b", keep_alive=wrong)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "keep_alive"), wrong
        assert s.loaded() == ["a"]


@pytest.mark.parametrize(
    ("said", "seconds"),
    [(5, 5), (0, 0), ("0", 0), ("300", 300), ("5m", 300), ("1h30m", 5400), ("1.5s", 1.5), (None, None), ("250ms", 0.25),
     (-1, float("inf")), ("-1", float("inf")), ("-1m", float("inf"))],
)  # fmt: skip
def test_times_as_ollama_has_them(said: Any, seconds: float | None) -> None:
    assert seconds_of(said) == seconds
    with pytest.raises(ApiError):
        seconds_of("5m2")


def test_the_one_that_waited_longest_makes_room() -> None:
    with running("a", "b", "c", memory="250M") as s:
        assert s.say("a").status_code == s.say("b").status_code == 200
        assert s.say("a").status_code == 200
        assert s.say("c").status_code == 200
        assert s.loaded() == ["a", "c"]
        with running("x", "y", memory="90M") as small:
            answer = small.say("y")
            assert answer.status_code == 503
            assert "--memory" in answer.json()["error"]["message"]
            assert answer.headers["retry-after"]


SLOWLY = {"model": "a", "prompt": "x", "max_tokens": 40, "stream": True, "speculation": {"drafter": "none"}}


def text_of(lines: list[str]) -> str:
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(event["choices"][0]["text"] for event in events)


def test_nothing_is_unloaded_under_a_stream() -> None:
    with running("a", "b", slow=0.1, memory="150M") as s:
        with s.client.stream("POST", TEXT, json=SLOWLY) as stream:
            lines = stream.iter_lines()
            first = next(lines)
            refused = s.say("b")
            rest = [first, *lines]
        assert refused.status_code == 503
        assert "a, which is answering" in refused.json()["error"]["message"]
        assert text_of(rest) == "I am a."
        assert "data: [DONE]" in rest
        assert s.until(lambda: s.say("b").status_code == 200)
        assert s.loaded() == ["b"]


def test_keep_alive_0_waits_for_streams_too() -> None:
    with running("a", "b", slow=0.1) as s:
        with s.client.stream("POST", TEXT, json=SLOWLY) as stream:
            lines = stream.iter_lines()
            first = next(lines)
            assert s.client.post("/api/generate", json={"model": "a", "keep_alive": 0}).status_code == 200
            assert text_of([first, *lines]) == "I am a."
        assert len(s.engines["a"]) == 1
        assert s.until(lambda: s.loaded() == [])


def test_one_that_cannot_be_loaded_says_why_and_is_tried_again() -> None:
    with running("a", "b") as s:
        assert s.say("a").status_code == 200
        s.fails["b"] = LoadError("config.json is missing: download it again")
        answer = s.say("b")
        assert answer.status_code == 503
        assert "b cannot be loaded: config.json is missing" in answer.json()["error"]["message"]
        assert s.say("a").status_code == 200, "the others go on"
        s.fails.clear()
        assert s.say("b").json()["choices"][0]["text"] == "I am b."


def test_ten_at_once_load_it_once() -> None:
    with running("a", "b") as s:
        answers: list[int] = []
        threads = [threading.Thread(target=lambda: answers.append(s.say("b").status_code)) for _ in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert answers == [200] * 10
        assert len(s.engines["b"]) == 1


def test_real_models_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tiny decoders and their drafter `none`: each writes what it writes alone, before and after it was unloaded."""
    for name in ("llama", "qwen3"):
        build_decoder(name, tmp_path / name)
    (tmp_path / "c.toml").write_text(f"""
[server]
port = 0
[engine]
drafter = "none"
max_model_len = 64
profile_dir = "none"
[[models]]
target = "{tmp_path / "llama"}"
[[models]]
name = "other"
target = "{tmp_path / "qwen3"}"
sampling = {{temperature = 0.5}}
""")
    lines: list[str] = []

    def fake_run(app: Any, models: Models, config: ServerConfig, listening: Any) -> None:
        server = PatientServer(settings(app, config), models, 5.0)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        models.start()
        thread.start()
        with httpx.Client(base_url=f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=60) as client:
            while client.get("/v1/models").json()["data"][0].get("max_model_len") is None:
                time.sleep(0.02)
            asked = {"prompt": [5, 9, 11], "max_tokens": 8, "seed": 1, "ignore_eos": True}

            def write(model: str) -> str:
                made = client.post(TEXT, json=asked | {"model": model})
                assert made.status_code == 200, made.text
                return str(made.json()["choices"][0]["text"])

            first, other = write("llama"), write("other")
            assert first != other
            assert models.find("other").service.config.sampling == {"temperature": 0.5}
            client.post("/api/generate", json={"model": "llama", "keep_alive": 0})
            while client.get("/v1/models").json()["data"][0]["loaded"]:
                time.sleep(0.02)
            assert (write("other"), write("llama")) == (other, first)
        server.should_exit = True
        models.close()
        thread.join(20)
        assert models.join(20)

    monkeypatch.setattr(start_module, "run", fake_run)
    start(str(tmp_path / "c.toml"), {}, {}, lines.append)
    assert sum("llama is ready on http://" in line for line in lines) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models = 5", "a table for each"),
        ("[models]\ntarget = 'x'", "a table for each"),
        ("[[models]]\nname = 'x'", "no target"),
        ("[[models]]\ntarget = 'x'\nname = 5", "name is a text"),
        ("[[models]]\ntarget = 'x'\ndrafted = 1", "did you mean drafter"),
        ("[[models]]\ntarget = 'x'\n[models.sampling]\ntemprature = 1", "did you mean temperature"),
        ("[[models]]\ntarget = 'x'\nsampling = 1", "sampling a table"),
    ],
)
def test_files_that_cannot_be(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_models(path)


def test_what_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="two models are called demo"):
        start(None, {"port": 0}, {}, print, targets=("demo", "some/demo"))
    for options in ({"memory": "much"}, {"memory": 0}, {"idle_unload": -1.0}):
        with pytest.raises(UsageError):
            ServerConfig(**options)  # type: ignore[arg-type]
    assert ServerConfig(memory="2G").memory == 2 * 2**30
