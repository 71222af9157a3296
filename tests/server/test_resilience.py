"""What the server promises when things go wrong around it, and that what watches it looks at what exists."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import CapacityError
from paceline.server.run import bind
from paceline.server.settings import ServerConfig
from paceline.text import grammar
from server.fake_engine import FakeEngine, make_tokenizer
from server.grammars import grammars_of
from server.serving import Served, served

ROOT = Path(__file__).parents[2]
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_the_dashboard_uses_metrics_that_exist() -> None:
    with served() as s:
        s.post("/v1/completions", prompt="x", max_tokens=9, speculation={"draft_tokens": 3})
        s.post("/v1/completions", prompt="x", max_tokens=9, speculation={"drafter": "none"})
        s.worker.info = {"cache_use": {"full": 0.5}}
        shown = set(re.findall(r"^(paceline_\w+)", s.client.get("/metrics").text, re.MULTILINE))
    dashboard = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    wanted = set(re.findall(r"paceline_\w+", " ".join(expressions)))
    assert len(wanted) > 12
    assert wanted <= shown
    for name in ("drafted_tokens", "accepted_tokens", "draft_length", "steps_without_draft", "cache_use"):
        assert any(name in expression for expression in expressions)


def test_compiled_grammars_are_kept_in_bounded_memory() -> None:
    grammars = grammars_of(make_tokenizer())
    try:
        for i in range(grammar._KEPT + 3):
            grammars.compile("regex", f"a{{{i + 1}}}")
        assert len(grammars._kept) == grammar._KEPT
    finally:
        grammars.close()


@pytest.mark.parametrize("error", [MemoryError("no memory"), CapacityError("out of memory")])
def test_memory_that_runs_out_costs_one_request(error: Exception) -> None:
    engine = FakeEngine(make_tokenizer())
    with served(engine) as s:
        expected = s.post("/v1/completions", prompt="x", seed=1, max_tokens=20).json()["choices"]
        engine.fail = [error, error]
        assert s.post("/v1/completions", prompt="x", seed=1, max_tokens=20).status_code in (500, 503)
        assert s.post("/v1/completions", prompt="x", seed=1, max_tokens=20).json()["choices"] == expected
        assert s.worker.counters.step_errors == 1
        assert s.client.get("/health").status_code == 200


def raw(s: Served, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", s.port), timeout=10) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        out = b""
        try:
            while piece := connection.recv(65536):
                out += piece
        except ConnectionResetError:
            return out
        return out


def test_clients_that_die_in_the_middle_of_a_body_leave_nothing() -> None:
    with served() as s:
        for size in (0, 1, 20):
            raw(s, (HEAD + "Content-Length: 60\r\n\r\n" + '{"model":"fake","prompt":"x"}'[:size]).encode())
            raw(s, (HEAD + "Transfer-Encoding: chunked\r\n\r\n40\r\n" + "{" * size).encode())
        assert s.worker.counters.submitted == 0
        assert s.post("/v1/completions", prompt="x", max_tokens=2).status_code == 200


@pytest.mark.parametrize("seed", range(20))
def test_broken_chunks_are_refused(seed: int) -> None:
    """Chunk sizes that are negative, huge, signed, or no numbers; chunks cut or run together; extensions."""
    rng = random.Random(seed)
    sizes = [
        "-1",
        "+5",
        "0x5",
        "5_0",
        "FFFFFFFFFFFFFFFFFF",
        "99999999999999999999",
        "",
        " 5",
        "5;" + "x" * 300,
        "g",
    ]
    ends, body = ["\r\n", "\n", "\r", ""], ""
    for _ in range(rng.randrange(1, 6)):
        body += rng.choice(sizes) + rng.choice(ends[:3]) + "x" * rng.randrange(9) + rng.choice(ends)
    with served() as s:
        answer = raw(s, (HEAD + f"Transfer-Encoding: chunked\r\n\r\n{body}0\r\n\r\n").encode())
        assert not answer or answer.split(b" ")[1] in (b"400", b"413")
        assert s.worker.counters.submitted == 0
        assert s.client.get("/health").status_code == 200


def test_lengths_that_contradict_each_other_are_refused() -> None:
    """Request smuggling: two lengths, or a length and chunks."""
    body = '{"model":"fake","prompt":"x"}'
    with served() as s:
        for lengths in (f"Content-Length: {len(body)}\r\nContent-Length: 5\r\n", "Content-Length: +5\r\n"):
            answer = raw(s, (HEAD + lengths + "\r\n" + body).encode())
            assert answer.split(b" ")[1] == b"400"
        assert s.worker.counters.submitted == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_answers_do_not_wait_for_the_clients_acknowledgement(host: str) -> None:
    """Head and body are two pieces: the second would wait some 40 ms, on every connection that is kept."""

    async def delays() -> int:
        accepted: asyncio.Queue[asyncio.BaseTransport] = asyncio.Queue()

        class Noting(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                accepted.put_nowait(transport)

        listening = bind(ServerConfig(host=host, port=0))
        async with await asyncio.get_running_loop().create_server(Noting, sock=listening):
            _, writer = await asyncio.open_connection(*listening.getsockname()[:2])
            transport = await accepted.get()
            connection = transport.get_extra_info("socket")
            no_delay = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            transport.close()
            writer.close()
            await writer.wait_closed()
        return int(no_delay)

    if host == "::1" and not has_ipv6():
        pytest.skip("no IPv6 here")
    assert asyncio.run(delays())


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_report_comes_once_and_with_the_last_text(path: str) -> None:
    body: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    )
    with served() as s:
        answer = s.post(path, **body, n=5, seed=2, max_tokens=30, stream=True)
        chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
        done = [i for i, c in enumerate(chunks) if c["choices"][0]["finish_reason"]]
        assert len(done) == 5
        assert [i for i, c in enumerate(chunks) if "speculation" in c] == [done[-1]] == [len(chunks) - 1]


def test_more_texts_than_can_ever_run_are_a_bad_request() -> None:
    with served(max_texts=3) as s:
        for path, body in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": [
                {"role": "user", "content": "x"}]})):  # fmt: skip
            answer = s.post(f"/v1/{path}", **body, n=4)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "n"


def test_only_the_drafter_that_reads_a_prediction_counts_it() -> None:
    with served() as s:
        ask: dict[str, Any] = {"prompt": "x", "max_tokens": 40, "seed": 4}
        text = s.post("/v1/completions", **ask).json()["choices"][0]["text"]
        for drafter, counted in ((None, True), ("ngram", True), ("mtp", False)):
            body: dict[str, Any] = {"speculation": {"drafter": drafter}} if drafter else {}
            answer = s.post(
                "/v1/completions", **ask, prediction={"type": "content", "content": text}, **body
            ).json()
            details, report = answer["usage"]["completion_tokens_details"], answer["speculation"]
            assert details["accepted_prediction_tokens"] == (report["accepted"] if counted else 0)
            assert details["rejected_prediction_tokens"] == 0, "what was not kept is not of the prediction"


@pytest.mark.parametrize("offer", ["h2c", "websocket"])
def test_an_offer_to_upgrade_is_passed_over_in_silence(offer: str, caplog: pytest.LogCaptureFixture) -> None:
    """Java's HttpClient and `curl --http2` offer HTTP/2 with each request; RFC 9110, 7.8 lets a server ignore it."""
    headers = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": offer, "HTTP2-Settings": "AAMAAABk"}
    body = {"model": "fake", "prompt": "x", "max_tokens": 5, "seed": 1}
    with served() as s:
        plain = s.client.post("/v1/completions", json=body)
        answers = [s.client.post("/v1/completions", json=body, headers=headers) for _ in range(2)]
    for answer in answers:
        assert answer.json()["choices"] == plain.json()["choices"]
    assert not caplog.records


def test_bad_http_is_answered_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    with served() as s, socket.create_connection(("127.0.0.1", s.port), timeout=10) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")  # TLS on a plain port
        assert connection.recv(12) == b"HTTP/1.1 400"
    assert not caplog.records
