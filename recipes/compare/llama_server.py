"""A llama-server process on a free loopback port, asked for one greedy completion at a time."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.errors import LoadError, RequestFailed

HOST = "127.0.0.1"
START_SECONDS = 60.0
REPLY_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Reply:
    """One text. `decode_seconds`: from the first token to the last, as the server measured it."""

    token_ids: list[int]
    seconds: float  # of the whole request, as its client saw it
    decode_seconds: float
    drafted: int = 0
    accepted: int = 0

    @property
    def steps(self) -> int:
        """Target forwards that gave these tokens; exact where every draft that was checked was counted."""
        return len(self.token_ids) - self.accepted


class LlamaServer:
    """Starts on entering, is stopped on leaving, whatever happened between.

    `flags` go to llama-server as they are. Raises LoadError if it does not come up, with the last lines of `log`.
    """

    def __init__(self, binary: Path, flags: Seq[str], log: Path) -> None:
        self.flags = list(flags)
        self._binary = binary
        self._log = log
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LlamaServer:
        self._port = free_port()
        command = [str(self._binary), *self.flags, "--host", HOST, "--port", str(self._port)]
        with self._log.open("wb") as sink:
            try:
                self._process = subprocess.Popen(
                    command, stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
                )
            except OSError as error:
                raise LoadError(
                    f"{self._binary} cannot be started ({error}): build it for this machine"
                ) from error
        try:
            self._wait(self._process)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the process; safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def complete(self, prompt: Seq[int], tokens: int) -> Reply:
        """Exactly `tokens` greedy tokens after `prompt`, nothing kept from earlier requests."""
        body = {
            "prompt": list(prompt), "n_predict": tokens, "ignore_eos": True, "stream": False, "cache_prompt": False,
            "return_tokens": True, "temperature": 0.0, "top_k": 1, "samplers": ["top_k"],
        }  # fmt: skip
        begin = time.perf_counter()
        status, text = self._ask("POST", "/completion", json.dumps(body))
        seconds = time.perf_counter() - begin
        if status != http.HTTPStatus.OK:
            raise RequestFailed(f"llama-server answered {status}: {text[:300]}")
        answer: dict[str, Any] = json.loads(text)
        timings = answer["timings"]
        if len(answer["tokens"]) != tokens:
            raise RequestFailed(
                f"llama-server wrote {len(answer['tokens'])} tokens where {tokens} were asked: give it a longer context"
            )
        return Reply(
            answer["tokens"],
            seconds,
            timings["predicted_ms"] / 1e3,
            timings.get("draft_n", 0),
            timings.get("draft_n_accepted", 0),
        )

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if process.poll() is not None:
                raise LoadError(f"llama-server ended with {process.returncode}: {self._last_words()}")
            try:
                if self._ask("GET", "/health")[0] == http.HTTPStatus.OK:
                    return
            except OSError:  # not listening yet
                pass
            time.sleep(0.05)
        raise LoadError(f"llama-server was not ready within {START_SECONDS:.0f} s: {self._last_words()}")

    def _ask(self, method: str, path: str, body: str | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=REPLY_SECONDS)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            return reply.status, reply.read().decode("utf-8", "replace")
        finally:
            connection.close()

    def _last_words(self, lines: int = 8) -> str:
        said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return "\n  ".join(["", *said[-lines:]]) if said else "it said nothing"


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
