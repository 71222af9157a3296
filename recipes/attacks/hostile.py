"""Send a server what stops others, and measure how long /health and a running stream stand still meanwhile.

    paceline serve smollm2 --port 8123 &
    python recipes/attacks/hostile.py http://127.0.0.1:8123 --pid $!

Each body is sent alone, while one client streams an answer and another asks for /health every 10 ms. The table has the
status, how long the answer took, the longest gaps, and what the process has more in memory than before the first.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER = [{"role": "user", "content": "hello"}]
MANY = 100_000


@dataclass(frozen=True)
class Body:
    name: str
    path: str
    data: bytes
    headers: dict[str, str] = field(default_factory=dict)
    chunk: int = 0  # bytes of each piece of a chunked body; 0: sent whole
    both: bool = False  # Content-Length beside Transfer-Encoding


def _of(name: str, path: str, **fields: Any) -> Body:
    return Body(name, path, json.dumps(fields).encode())


def _format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def _tools(schema: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}]


def _lists() -> Iterator[Body]:
    yield _of("prompt of wrong items", TEXT, prompt=[{}] * MANY)
    yield _of("prompt of wrong lists", TEXT, prompt=[["a"]] * 30_000)
    yield _of("token ids that are none", TEXT, prompt=["x", *[1] * MANY])
    yield _of("a million token ids", TEXT, prompt=[300] * 1_000_000)
    yield _of("tools of wrong items", CHAT, messages=USER, tools=[1] * MANY)
    yield _of(
        "tools, all right",
        CHAT,
        messages=USER,
        tools=[{"type": "function", "function": {"name": "f"}}] * 16_000,
    )
    yield _of("stop of wrong items", CHAT, messages=USER, stop=[1] * MANY)
    yield _of("stop, all right", CHAT, messages=USER, stop=["a"] * MANY)
    yield _of("stop_token_ids of wrong items", CHAT, messages=USER, stop_token_ids=["a"] * MANY)
    yield _of(
        "logit_bias of wrong values", CHAT, messages=USER, logit_bias={str(i): "a" for i in range(300_000)}
    )
    yield _of("logit_bias, all right", CHAT, messages=USER, logit_bias={str(i): 1 for i in range(300_000)})
    yield _of("guided_choice of wrong items", CHAT, messages=USER, guided_choice=[1] * MANY)
    yield _of("messages of wrong items", CHAT, messages=[1] * MANY)
    yield _of("messages without content", CHAT, messages=[{"role": "user"}] * 30_000)
    yield _of("parts of wrong items", CHAT, messages=[{"role": "user", "content": [{}] * MANY}])
    yield _of(
        "parts, all right",
        CHAT,
        messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 30_000}],
        max_tokens=1,
    )
    yield _of("input of wrong items", RESPONSES, input=[1] * MANY)
    yield _of("input, all right", RESPONSES, input=[{"role": "user", "content": "a"}] * 30_000)
    yield _of("input of unknown kinds", RESPONSES, input=[{"type": "x"}] * 30_000)
    yield _of("Ollama's messages of wrong items", "/api/chat", messages=[1] * MANY)
    yield _of("Ollama's stop of wrong items", "/api/chat", messages=USER, options={"stop": [1] * MANY})
    yield _of("messages to count", "/tokenize", messages=[1] * MANY)
    yield _of("tokens to decode", "/detokenize", tokens=["a"] * MANY)
    yield _of("tokens to decode, all right", "/detokenize", tokens=[300] * 260_000)
    yield _of("unknown fields", CHAT, messages=USER, **{f"x{i}": i for i in range(200_000)})
    yield Body("nested lists", TEXT, b'{"prompt":' + b"[" * 2_000_000)
    yield Body("nested objects", TEXT, b'{"a":' * 30_000)
    yield Body("a number of many digits", TEXT, b'{"prompt":"a","seed":' + b"9" * 4_000_000 + b"}")


def _schemas() -> Iterator[Body]:
    apart = {"oneOf": [{"const": f"k{i}"} for i in range(3000)]}
    alike = {"oneOf": [{"type": "object", "properties": {f"p{i}": {}}} for i in range(1000)]}
    yield _of("oneOf of 3000 constants", CHAT, messages=USER, max_tokens=4, response_format=_format(apart))
    yield _of("oneOf of 1000 objects", CHAT, messages=USER, max_tokens=4, response_format=_format(alike))
    yield _of("a tool with oneOf of 3000", CHAT, messages=USER, max_tokens=4, tools=_tools(
        {"type": "object", "properties": {"a": apart}}), tool_choice="required")  # fmt: skip
    many = {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "maxLength": 900} for i in range(800)},
    }
    yield _of("a schema of 800 properties", CHAT, messages=USER, max_tokens=4, response_format=_format(many))
    regex = "(" * 20 + "a{1,9}" + "){1,9}" * 20
    yield _of(
        "a regex that grows",
        CHAT,
        messages=USER,
        max_tokens=4,
        response_format={"type": "regex", "regex": regex},
    )


def _texts() -> Iterator[Body]:
    yield _of("4 MB of one letter", TEXT, prompt="a" * 4_000_000, max_tokens=1)
    yield _of("4 MB of blanks", TEXT, prompt=" " * 4_000_000, max_tokens=1)
    yield _of("600 kB of one letter", TEXT, prompt="a" * 600_000, max_tokens=1)
    yield _of(
        "4000 messages", CHAT, messages=[{"role": "user", "content": "word " * 180}] * 4000, max_tokens=1
    )
    yield _of(
        "4000 system messages",
        CHAT,
        messages=[{"role": "system", "content": "word " * 180}] * 4000,
        max_tokens=1,
    )
    yield _of("4 MB of tokens asked for", "/tokenize", prompt="a b " * 900_000, with_pieces=True)
    yield _of("4 MB of prediction", CHAT, messages=USER, max_tokens=1,
              prediction={"type": "content", "content": "a" * 4_000_000})  # fmt: skip


def _wire() -> Iterator[Body]:
    plain = json.dumps({"prompt": "a" * 150_000, "max_tokens": 1}).encode()
    yield Body("200,000 chunks of one byte", TEXT, plain + b" " * 50_000, chunk=1)
    yield Body("two lengths", TEXT, b'{"prompt":"a","max_tokens":1}', chunk=64, both=True)
    packed = gzip.compress(b'{"prompt":"' + b"a" * 200_000_000 + b'"}', 9)
    yield Body("a gzip bomb", TEXT, packed, {"Content-Encoding": "gzip"})
    yield Body("a broken gzip", TEXT, packed[:1000], {"Content-Encoding": "gzip"})
    yield Body("zstd", TEXT, b"\x28\xb5\x2f\xfd" + bytes(1000), {"Content-Encoding": "zstd"})


def bodies() -> list[Body]:
    return [*_lists(), *_schemas(), *_texts(), *_wire()]


def send(url: str, body: Body, timeout: float = 120) -> tuple[int, bytes]:
    """Status and body of the answer."""
    headers = {"Content-Type": "application/json", **body.headers}
    if body.chunk:
        return _send_chunks(url, body, timeout)
    request = urllib.request.Request(url + body.path, body.data, headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def _send_chunks(url: str, body: Body, timeout: float) -> tuple[int, bytes]:
    place = urlsplit(url)
    pieces = (body.data[i : i + body.chunk] for i in range(0, len(body.data), body.chunk))
    whole = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    head = f"POST {body.path} HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
    head += (
        "Transfer-Encoding: chunked\r\n" + (f"Content-Length: {len(whole)}\r\n" if body.both else "") + "\r\n"
    )
    with socket.create_connection((place.hostname or "", place.port or 80), timeout) as link:
        answer = b""
        with contextlib.suppress(OSError):  # refused before all was sent
            link.sendall(head.encode() + whole)
        with contextlib.suppress(OSError):
            while piece := link.recv(2**16):
                answer += piece
                if b"\r\n\r\n" in answer and answer.endswith(b"}"):
                    break
    return int(answer.split()[1]) if answer else 0, answer.partition(b"\r\n\r\n")[2]


class Watch:
    """The longest time without an answer of /health, and without news of a stream."""

    def __init__(self, url: str) -> None:
        self._url, self._end = url, threading.Event()
        self.health = self.stream = 0.0
        self.failed = ""  # why nothing is watched any more
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), daemon=True)
            for work in (self._ask, self._read)
        ]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        time.sleep(0.3)
        self.clear()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(30)

    def clear(self) -> None:
        self.health = self.stream = 0.0

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  a gap of 0 s would be a lie
            self.failed = f"{work.__name__[1:]}: {error!r}"

    def _ask(self) -> None:
        while not self._end.is_set():
            begin = time.monotonic()
            with urllib.request.urlopen(self._url + "/health", timeout=600) as answer:
                answer.read()
            self.health = max(self.health, time.monotonic() - begin)
            time.sleep(0.01)

    def _read(self) -> None:
        fields = {"prompt": "Once upon a time", "max_tokens": 400, "stream": True, "ignore_eos": True}
        while not self._end.is_set():
            request = urllib.request.Request(
                self._url + TEXT, json.dumps(fields).encode(), {"Content-Type": "application/json"}
            )
            last = 0.0
            with urllib.request.urlopen(request, timeout=600) as answer:
                for line in answer:
                    now = time.monotonic()
                    if line.startswith(b"data:"):
                        self.stream = max(self.stream, now - last if last else 0.0)
                        last = now
                    if self._end.is_set():
                        return


def wait_until_ready(url: str, seconds: float = 300) -> None:
    """A server that still loads answers 503."""
    end = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url + "/health", timeout=10):
                return
        except OSError as error:
            if time.monotonic() > end:
                sys.exit(f"{url} is not ready after {seconds:.0f} s ({error}): start `paceline serve` first")
        time.sleep(0.2)


def memory(pid: int) -> float:
    """MB of RAM that a process has."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(next(line for line in text.splitlines() if line.startswith("VmRSS")).split()[1]) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("--pid", type=int, help="of the server: its memory is measured")
    parser.add_argument(
        "--context", type=int, default=8000, help="tokens of a prompt that is sent before memory is read"
    )
    parser.add_argument("--only", help="bodies whose name holds this text")
    asked = parser.parse_args()
    url, worst = asked.url.rstrip("/"), [0.0, 0.0]
    wait_until_ready(url)
    # memory that any long prompt takes
    send(url, _of("long", TEXT, prompt=[300] * asked.context, max_tokens=1), 600)
    with Watch(url) as watch:
        time.sleep(2)
        send(url, _of("warm", CHAT, messages=USER, max_tokens=1, response_format=_format({"const": 1})))
        print(f"nothing sent: /health {watch.health:.2f} s, stream {watch.stream:.2f} s")
        before = memory(asked.pid) if asked.pid else 0.0
        print(f"{'body':34}{'MB':>6}{'status':>8}{'seconds':>9}{'/health':>9}{'stream':>8}{'RAM':>7}")
        for body in bodies():
            if asked.only and asked.only not in body.name:
                continue
            watch.clear()
            begin = time.monotonic()
            status, _ = send(url, body, 600)
            took = time.monotonic() - begin
            time.sleep(0.1)
            if watch.failed:
                sys.exit(f"the watch beside {body.name} ended, so no gap is known: {watch.failed}")
            worst = [max(worst[0], watch.health), max(worst[1], watch.stream)]
            size, more = len(body.data) / 1e6, memory(asked.pid) - before if asked.pid else 0.0
            print(
                f"{body.name:34}{size:6.1f}{status:8}{took:9.2f}{watch.health:9.2f}{watch.stream:8.2f}{more:+7.0f}",
                flush=True,
            )
    print(f"longest gap: /health {worst[0]:.2f} s, stream {worst[1]:.2f} s")
    if asked.pid:
        time.sleep(1)
        print(f"memory: {before:.0f} MB before, {memory(asked.pid) - before:+.0f} MB after")


if __name__ == "__main__":
    main()
