"""Keys, hosts, origins, sizes, limits, overload: what a stranger can send, and what must not happen then."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from starlette.routing import Route

from paceline.errors import UsageError
from paceline.server import security
from paceline.server.app import build_app
from paceline.server.security import Keys
from paceline.server.settings import ServerConfig
from server.fake_engine import FakeEngine, make_tokenizer
from server.serving import GEMMA, Served, served

USER = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def s() -> Iterator[Served]:
    with served(max_body=200_000, header_timeout=1.0, body_timeout=1.0, max_texts=64, strict=True) as server:
        yield server


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    with served(keys=("secret", "other")) as server:
        yield server


def test_every_route_but_health_needs_the_key(locked: Served) -> None:
    app = build_app(locked.service, Keys(["secret"]))
    routes = [(r.path, m) for r in app.routes if isinstance(r, Route) for m in r.methods or ()]
    paths = {path for path, _ in routes}
    assert {
        "/",
        "/metrics",
        "/openapi.json",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
    } <= paths
    routes += [
        ("/nowhere", "GET"),
        ("//health", "GET"),
        ("/health/", "GET"),
        ("/HEALTH", "GET"),
    ]
    for path, method in routes:
        for wrong in (
            {},
            {"Authorization": "Bearer nope"},
            {"Authorization": "secret"},
            {"Authorization": "Basic !"},
        ):
            answer = httpx.request(method, locked.url + path, headers=wrong)
            assert answer.status_code == (
                200 if path in ("/health", "/healthz") and method == "GET" else 401
            ), (
                path,
                method,
            )
    assert b" 401 " in raw(locked, b"GET /v1/../health HTTP/1.0\r\nHost: localhost\r\n\r\n")[:20]
    assert locked.client.get("/v1/models").status_code == 200
    assert httpx.get(locked.url + "/v1/models", auth=("any", "other")).status_code == 200


def test_a_browser_is_asked_for_the_key(locked: Served) -> None:
    page = httpx.get(locked.url + "/", headers={"Accept": "text/html"})
    assert page.headers["www-authenticate"].startswith("Basic ")
    assert httpx.get(locked.url + "/v1/models").headers["www-authenticate"] == "Bearer"


def test_prefix_cache_is_scoped_by_key_and_salt(locked: Served) -> None:
    locked.engine.salts.clear()
    body = {"model": "fake", "prompt": "x", "max_tokens": 1}
    for key, extra in (("secret", {}), ("secret", {}), ("other", {}), ("secret", {"cache_salt": "a"})):
        httpx.post(
            locked.url + "/v1/completions", json=body | extra, headers={"Authorization": f"Bearer {key}"}
        ).raise_for_status()
    first, again, other, salted = locked.engine.salts
    assert first == again != ""
    assert len({first, other, salted}) == 3
    assert "secret" not in first + other + salted


def test_keys_are_kept_as_hashes_only(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# comment\nplain\n\nsha256:{hashlib.sha256(b'hidden').hexdigest()}\n")
    keys = Keys.read(str(path))
    assert keys.find("Bearer plain")
    assert keys.find("bearer hidden")
    assert keys.find("Bearer sha256:") is None
    assert keys.find(None) is None
    assert "plain" not in repr(vars(keys))
    path.write_text("# nothing\n")
    with pytest.raises(UsageError, match="no key"):
        Keys.read(str(path))


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "", "a@localhost", "[::1", "localhost:99999999"]
)
def test_foreign_hosts_are_refused(s: Served, host: str) -> None:
    answer = s.client.get("/v1/models", headers={"Host": host})
    assert answer.status_code in (400, 421)


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1", "[::1]:8000", "LOCALHOST"])
def test_loopback_names_are_served(s: Served, host: str) -> None:
    assert s.client.get("/v1/models", headers={"Host": host}).status_code == 200


def test_other_origins_are_refused_and_cors_is_off(s: Served) -> None:
    body = {"model": "fake", "prompt": "x"}
    for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        assert s.client.post("/v1/completions", json=body, headers=headers).status_code == 403
    fine = s.client.post(
        "/v1/completions", json=body, headers={"Origin": s.url, "Sec-Fetch-Site": "same-origin"}
    )
    assert fine.status_code == 200
    preflight = s.client.options("/v1/completions", headers={"Origin": "https://evil.example"})
    assert preflight.status_code in (403, 405)
    assert not any(name.startswith("access-control") for name in [*fine.headers, *preflight.headers])


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_only_json_bodies(s: Served, kind: str) -> None:
    answer = s.client.post(
        "/v1/completions", content=b'{"model":"fake","prompt":"x"}', headers={"Content-Type": kind}
    )
    assert answer.status_code == 415
    assert "send the header Content-Type: application/json" in answer.text


BAD: list[tuple[str, dict[str, Any], str | None]] = [
    ("completions", {"prompt": "x", "bogus": 1}, "bogus"),
    ("completions", {"prompt": 5}, "prompt"),
    ("completions", {"prompt": []}, "prompt"),
    ("completions", {"prompt": ""}, None),
    ("completions", {"prompt": [[]]}, "prompt"),
    ("completions", {"prompt": [10**6]}, "prompt"),
    ("completions", {"prompt": [-1]}, "prompt.0"),
    ("completions", {"prompt": [2**40]}, "prompt.0"),
    ("completions", {"prompt": ["x"] * 65}, "prompt"),
    ("completions", {"prompt": ["x"] * 60, "n": 2}, "n"),
    ("completions", {"prompt": "x" * 600}, "prompt"),
    ("completions", {"prompt": "x", "suffix": "y"}, "suffix"),
    ("completions", {"prompt": "x", "best_of": 3}, "best_of"),
    ("completions", {"prompt": "x", "max_tokens": -2}, "max_tokens"),
    ("completions", {"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
    ("completions", {"prompt": "x", "max_tokens": "5"}, "max_tokens"),
    ("completions", {"prompt": "x", "max_tokens": True}, "max_tokens"),
    ("completions", {"prompt": "x", "logprobs": 21}, "logprobs"),
    ("completions", {"prompt": "x", "logprobs": -1}, "logprobs"),
    ("completions", {"prompt": "x", "stream_options": {}}, "stream_options"),
    ("completions", {"prompt": "x", "n": 17}, "n"),
    ("completions", {"prompt": "x", "n": 10**9}, "n"),
    ("completions", {"prompt": "x", "temperature": -1}, "temperature"),
    ("completions", {"prompt": "x", "top_p": -0.1}, "top_p"),
    ("completions", {"prompt": "x", "seed": 2**70}, "seed"),
    ("completions", {"prompt": "x", "stop": ["a"] * 65}, "stop"),
    ("completions", {"prompt": "x", "logprobs": True}, "logprobs"),
    ("completions", {"prompt": "x", "stop": "a" * 300}, "stop"),
    ("completions", {"prompt": "x", "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ("completions", {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
    ("completions", {"prompt": "x", "logit_bias": {"-1": 1}}, "logit_bias"),
    ("completions", {"prompt": "x", "logit_bias": {"999999": 1}}, "logit_bias"),
    ("completions", {"prompt": "x", "logit_bias": {"5": 1000}}, "logit_bias"),
    ("completions", {"prompt": "x", "stop_token_ids": [99999]}, "stop_token_ids"),
    ("completions", {"prompt": "x", "speculation": {"drafter": "eagle"}}, "speculation.drafter"),
    ("completions", {"prompt": "x", "speculation": {"draft_tokens": 17}}, "speculation.draft_tokens"),
    ("completions", {"prompt": "x", "speculation": {"verify": "lossy"}}, "speculation.verify"),
    ("completions", {"prompt": "x", "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ("completions", {"prompt": "x", "response_format": {"type": "regex"}}, "response_format.regex"),
    ("completions", {"prompt": "\ud800"}, "prompt"),
    ("chat/completions", {}, "messages"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
    ("chat/completions", {"messages": [{"role": "user", "content": "explode"}]}, "messages"),
    ("chat/completions", {"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    ("chat/completions", {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}]}, "messages.0.content.0.image_url"),
    ("chat/completions", {"messages": USER, "top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ("chat/completions", {"messages": USER, "top_logprobs": 2}, "top_logprobs"),
    ("chat/completions", {"messages": USER, "tool_choice": "required"}, "tool_choice"),
    ("chat/completions", {"messages": USER, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
     "chat_template_kwargs.chat_template"),
    ("chat/completions", {"messages": USER, "tools": [{"type": "function", "function": {"name": "../x"}}]},
     "tools.0.function.name"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "param"), BAD, ids=lambda v: json.dumps(v)[:50] if isinstance(v, dict) else ""
)
def test_bad_requests_name_their_field(s: Served, path: str, body: dict[str, Any], param: str | None) -> None:
    if param is None:
        s.engine.tokenizer.adds_bos, before = False, s.engine.tokenizer.adds_bos
    begin = time.perf_counter()
    text = json.dumps({"model": "fake"} | body)
    answer = s.client.post(f"/v1/{path}", content=text, headers={"Content-Type": "application/json"})
    assert time.perf_counter() - begin < 5
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    if param is None:
        s.engine.tokenizer.adds_bos = before
    else:
        assert error["param"] == param, error
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 500


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '"x"', "[" * 100_000, '{"model":"fake","prompt":' + "[" * 90_000, "\xff", '{"model":NaN}'],
)  # fmt: skip
def test_malformed_json(s: Served, text: str) -> None:
    answer = s.client.post(
        "/v1/completions", content=text.encode("latin-1"), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_deep_schemas_and_tools(s: Served) -> None:
    deep = '{"a":' * 500 + "{}" + "}" * 500
    for body, param in (
        (
            '"response_format":{"type":"json_schema","json_schema":{"schema":%s}}',
            "response_format.json_schema.schema",
        ),
        (
            '"tools":[{"type":"function","function":{"name":"f","parameters":%s}}]',
            "tools.0.function.parameters",
        ),
    ):
        text = '{"model":"fake","messages":[{"role":"user","content":"x"}],' + body % deep + "}"
        answer = s.client.post(
            "/v1/chat/completions", content=text, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param


def test_unknown_models_are_refused_and_no_path_is_read(s: Served) -> None:
    for name in ("other", "../../etc/passwd", "/etc/passwd", "fake/../fake", ""):
        answer = s.client.post("/v1/completions", json={"model": name, "prompt": "x"})
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"


def test_wrong_methods_and_paths_get_the_envelope(s: Served) -> None:
    for method, path, status in (("GET", "/v1/completions", 405), ("TRACE", "/health", 405), ("GET", "/x", 404),
                                 ("DELETE", "/v1/models", 405), ("PUT", "/v1/completions", 405)):  # fmt: skip
        answer = s.client.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["type"] in ("invalid_request_error", "not_found_error")
    assert "POST" in s.client.get("/v1/completions").headers["allow"]


def test_bodies_are_capped_with_and_without_a_length(s: Served) -> None:
    big = json.dumps({"model": "fake", "prompt": "x" * 300_000}).encode()
    kind = {"Content-Type": "application/json"}
    assert s.client.post("/v1/completions", content=big, headers=kind).status_code == 413

    def chunks() -> Iterator[bytes]:
        for start in range(0, len(big), 10_000):
            yield big[start : start + 10_000]

    assert s.client.post("/v1/completions", content=chunks(), headers=kind).status_code == 413
    assert s.client.get("/health").status_code == 200


@pytest.mark.parametrize(("length", "times"), [(1000, 0), (300_000, 1)])
def test_memory_of_a_large_body_is_given_back(
    length: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = threading.Semaphore(0)
    monkeypatch.setattr(security, "give_back_freed", given.release)
    with served(max_body=1_000_000) as s:
        body = {"model": "fake", "prompt": "x" * length, "max_tokens": 1}
        s.client.post("/v1/completions", json=body)
        assert given.acquire(timeout=30 if times else 0.2) == bool(times)


def head_of(more: str) -> bytes:
    """The head of a request for a completion."""
    lines = [
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        more,
        "",
        "",
    ]
    return "\r\n".join(lines).encode()


def raw(s: Served, data: bytes, wait: float = 5.0) -> bytes:
    with socket.create_connection(("127.0.0.1", s.port), timeout=wait) as connection:
        out = b""
        try:
            connection.sendall(data)
            while piece := connection.recv(65536):
                out += piece
        except (TimeoutError, ConnectionResetError, BrokenPipeError):
            return out
        return out


def test_big_headers_slow_heads_and_slow_bodies_end(s: Served) -> None:
    for size in (40_000, 100_000, 1_000_000):
        head = b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * size + b"\r\n\r\n"
        assert raw(s, head)[9:12] in (b"400", b"431", b"")  # or closed while it was being sent
    begin = time.monotonic()
    assert raw(s, b"GET / HTTP/1.1\r\nHost: loc") == b""
    assert raw(s, b"") == b""
    slow = head_of("Content-Length: 50") + b"{"
    assert b" 408 " in raw(s, slow)[:20]
    assert time.monotonic() - begin < 15
    assert b" 400 " in raw(s, b"GARBAGE\r\n\r\n")[:20]
    chunked = head_of("Transfer-Encoding: chunked")
    assert b" 400 " in raw(s, chunked + b"F" * 30 + b"\r\n")[:20]
    assert b" 408 " in raw(s, chunked + b"1\r\n{\r\n" * 50)[:20]
    assert s.client.get("/health").status_code == 200


def test_overload_is_answered_429_and_loading_503() -> None:
    with served(FakeEngine(make_tokenizer(), delay=0.02), max_texts=2) as s:
        body = {"model": "fake", "prompt": "x", "max_tokens": 400, "n": 2, "stream": True}
        with s.client.stream("POST", "/v1/completions", json=body) as one:
            assert one.status_code == 200
            assert s.worker.load().texts == 2
            full = httpx.post(s.url + "/v1/completions", json={"model": "fake", "prompt": "x"})
            assert full.status_code == 429
            assert full.headers["retry-after"]
            s.worker.drain()
            answer = httpx.post(s.url + "/v1/completions", json={"model": "fake", "prompt": "x"})
            assert answer.status_code == 503
            assert answer.headers["retry-after"]
            assert httpx.get(s.url + "/health").json()["status"] == "draining"
            assert one.read().endswith(b"data: [DONE]\n\n")


def test_one_connection_too_many_gets_the_envelope_and_a_seat_that_is_given_back() -> None:
    body = {"model": "fake", "prompt": "x", "max_tokens": 500, "stream": True}
    text = json.dumps(body | {"ignore_eos": True}).encode()
    short = {"model": "fake", "prompt": "x", "max_tokens": 1}
    with served(FakeEngine(make_tokenizer(), delay=0.02), max_connections=2) as s:
        seated = [socket.create_connection(("127.0.0.1", s.port)) for _ in range(2)]
        for connection in seated:
            connection.sendall(head_of(f"Content-Length: {len(text)}") + text)
        assert s.settled(lambda: len(s.engine.running) == 2)
        with httpx.Client(base_url=s.url) as late:
            still_sending = short | {"prompt": "x" * 3_000_000}
            for sent in (short, still_sending):
                refused = late.post("/v1/completions", json=sent)
                assert refused.status_code == 503
                assert refused.headers["retry-after"] == "1"
                assert refused.headers["x-content-type-options"] == "nosniff"
                assert refused.json()["error"]["code"] == "too_many_connections"
                assert refused.json()["error"]["type"] == "service_unavailable_error"
            assert late.get("/health").status_code == 200
            assert len(s.engine.running) == 2
            seated[0].close()
            assert s.settled(lambda: late.post("/v1/completions", json=short).status_code == 200)
            assert s.client.get("/metrics").status_code == 503
        seated[1].close()
        assert s.settled(lambda: s.client.get("/metrics").status_code == 200)
        assert 'path="/v1/completions",status="503"}' in s.client.get("/metrics").text


def test_what_was_written_until_the_deadline_is_the_answer() -> None:
    with served(FakeEngine(make_tokenizer(), delay=0.02), request_timeout=0.3) as s:
        whole = s.post("/v1/completions", prompt="x", max_tokens=400, n=2, ignore_eos=True)
        assert whole.status_code == 200
        found = whole.json()
        assert [choice["finish_reason"] for choice in found["choices"]] == ["length", "length"]
        assert all(choice["text"] for choice in found["choices"])
        assert 0 < found["usage"]["completion_tokens"] < 800
        assert "time limit" in found["warnings"][-1]
        streamed = s.post("/v1/completions", prompt="x", max_tokens=400, stream=True, ignore_eos=True)
        assert '"finish_reason":"length"' in streamed.text
        assert "error" not in streamed.text
        assert s.worker.load().texts == 0


def test_a_chat_without_a_limit_has_the_servers_own() -> None:
    with served(FakeEngine(make_tokenizer()), default_output=7) as s:
        talk = [{"role": "user", "content": "Hi"}]
        asked = s.post("/v1/chat/completions", messages=talk, ignore_eos=True).json()
        assert (asked["usage"]["completion_tokens"], asked["choices"][0]["finish_reason"]) == (7, "length")
        more = s.post("/v1/chat/completions", messages=talk, ignore_eos=True, max_tokens=-1).json()
        assert more["usage"]["completion_tokens"] > 100
        ollama = s.post("/api/chat", messages=talk, stream=False, options={"ignore_eos": True}).json()
        assert ollama["eval_count"] <= 7


def test_the_limit_of_a_chat_without_one_is_the_documented_one() -> None:
    table = Path(__file__).parents[2] / "docs" / "server-reference.md"
    assert f"| `default_output` | {ServerConfig().default_output} |" in table.read_text(encoding="utf-8")
    assert 0 < ServerConfig().default_output < 5000


def test_a_template_that_prints_megabytes_is_a_prompt_that_is_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoded: list[str] = []
    with served(chat=(lambda *_: "a" * 8_100_000, GEMMA)) as s:
        encode = s.service.room.tokenizer.encode

        def counted(text: str, *more: Any) -> list[int]:
            encoded.append(text)
            return encode(text, *more)

        monkeypatch.setattr(s.service.room.tokenizer, "encode", counted)
        answer = s.post("/v1/chat/completions", messages=USER)
        assert answer.status_code == 400
        assert "tokens" in answer.json()["error"]["message"]
    assert not [text for text in encoded if len(text) > 10_000]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("pause", [0.0, 0.05, 0.15])
def test_a_client_that_leaves_frees_everything(stream: bool, pause: float) -> None:
    with served(FakeEngine(make_tokenizer(), delay=0.01)) as s:
        body = json.dumps({"model": "fake", "prompt": "x", "max_tokens": 400, "stream": stream}).encode()
        connection = socket.create_connection(("127.0.0.1", s.port))
        connection.sendall(head_of(f"Content-Length: {len(body)}") + body)
        assert s.settled(lambda: bool(s.engine.running))
        time.sleep(pause)
        connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0"
        )  # closes with a reset
        connection.close()
        assert s.settled(lambda: not s.engine.running and s.worker.load().texts == 0, 2)
        assert 'outcome="disconnected"} 1.0' in s.client.get("/metrics").text


def test_a_slow_reader_is_given_up_and_others_go_on() -> None:
    with served(stream_buffer=3) as s:
        body = json.dumps(
            {"model": "fake", "prompt": "x" * 9, "max_tokens": 500, "n": 16, "stream": True, "logprobs": 20}
        ).encode()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.connect(("127.0.0.1", s.port))
            connection.sendall(head_of(f"Content-Length: {len(body)}") + body)
            assert s.settled(lambda: s.worker.counters.submitted == 1 and s.worker.load().texts == 0, 20)
            assert s.worker.counters.cancelled == 1
            assert s.client.get("/health").status_code == 200


def test_listening_on_a_network_needs_a_key_or_a_word() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(UsageError, match="api-key-file"):
            ServerConfig(host=host)
        ServerConfig(host=host, without_key=True)
        ServerConfig(host=host, api_key_file="keys")
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        ServerConfig(host=host)
