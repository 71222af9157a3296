"""A real server on a real socket, over the fake engine, in a thread of the test's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx

from paceline.chat.road import Chats
from paceline.engine.worker import StepEngine, Worker
from paceline.errors import UsageError
from paceline.server.app import build_app
from paceline.server.metrics import Metrics
from paceline.server.run import PatientServer, bind, settings
from paceline.server.security import Keys
from paceline.server.service import Room, Service
from paceline.server.settings import ServerConfig
from paceline.text.formats.base import ChatFormat
from paceline.text.formats.gemma import GEMMA
from server.fake_engine import HIDDEN, FakeEngine, make_tokenizer


class NoGrammars:
    def hold(self, schemas: dict[str, Any], arguments: bool = False) -> dict[str, Any]:
        raise UsageError("no grammars in this test")

    def compile(self, kind: str, source: str) -> Any:
        raise UsageError("no grammars in this test")

    def compile_call(self, tools: dict[str, dict[str, Any]], most: int) -> Any:
        raise UsageError("no grammars in this test")

    def close(self) -> None:
        pass


@dataclass
class Served:
    url: str
    port: int
    engine: FakeEngine
    worker: Worker
    service: Service
    client: httpx.Client

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json={"model": "fake", **body})

    def settled(self, check: Callable[[], bool], seconds: float = 10.0) -> bool:
        end = time.monotonic() + seconds
        while not check() and time.monotonic() < end:
            time.sleep(0.005)
        return check()


def render(messages: list[dict[str, Any]], tools: Any, options: dict[str, Any]) -> str:
    if any("explode" in m["content"] for m in messages):
        raise UsageError("the chat template failed: explode")
    text = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
    if options.get("add_generation_prompt", True):
        text += "assistant: "
    return text + ("<|channel>thought\n" if options.get("enable_thinking") else "")


@contextmanager
def served(
    engine: FakeEngine | None = None,
    keys: tuple[str, ...] = (),
    grammars: Any = None,
    load: Callable[[Service], StepEngine] | None = None,
    worker: Callable[..., Worker] | None = None,
    write: Callable[[str], None] | None = None,
    chat: tuple[Any, ChatFormat] = (render, GEMMA),
    transport: httpx.HTTPTransport | None = None,
    verify: Any = True,
    **options: Any,
) -> Iterator[Served]:
    engine = engine or FakeEngine(make_tokenizer())
    config = ServerConfig(**({"port": 0} | options))
    made = (worker or (lambda load, config: Worker(load, max_texts=config.max_texts)))(
        lambda: load(service) if load else engine, config
    )
    service = Service("fake", config, made, Metrics(made))
    drafters = ("none", "ngram", "mtp")
    service.loaded = Room(
        Chats(engine.tokenizer, *chat), grammars or NoGrammars(), engine.max_len, engine.tokenizer.vocab_size,
        drafters, chat=True, hidden_size=HIDDEN,
    )  # fmt: skip
    listening = bind(config)
    port = 0 if config.uds else listening.getsockname()[1]
    how = settings(build_app(service, Keys(keys), write), config)
    how.timeout_graceful_shutdown = 2
    server = PatientServer(how, made, config.drain_timeout)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    made.start()
    thread.start()
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    url = f"{'https' if config.ssl_certfile else 'http'}://127.0.0.1:{port}" if port else "http://localhost"
    with httpx.Client(
        base_url=url, headers=headers, timeout=30, transport=transport, verify=verify
    ) as client:
        while client.get("/health").status_code != 200:
            assert made.state != "failed", made.error
            time.sleep(0.01)
        yield Served(url, port, engine, made, service, client)
    server.should_exit = True
    made.close()
    thread.join(10)
    made.join(10)
    listening.close()
