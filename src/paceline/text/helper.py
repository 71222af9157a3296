"""A process of our own that does what third parties may make endless or huge, so that it can be killed.

It is started at the first use and kept; after it was killed the next use starts another. One JSON object per line
goes in, one comes out; the first one in is a greeting that says what the process is to know.
"""

from __future__ import annotations

import json
import select
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from paceline import child

START_TIMEOUT = 60.0  # seconds from the start to the answer to the greeting
_PIECE = 2**18  # bytes read at a time


class Helper:
    """Thread-safe; one question at a time. The process ends with this object, or with ours."""

    def __init__(self, module: str, greeting: Callable[[], dict[str, Any]], timeout: float) -> None:
        """`module` is run as by `python -m`; `timeout`: seconds for each answer."""
        self._module, self._greeting, self._timeout = module, greeting, timeout
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def greet(self) -> Any:
        """Start the process if it does not run: its answer to the greeting, None if there was none or it runs."""
        with self._lock:
            return self._start() if self._gone() else {}

    def ask(self, question: dict[str, Any]) -> Any:
        """The answer; None if none came in time, or the process died of it. Raises what `json.dumps` raises."""
        line = json.dumps(question).encode() + b"\n"
        with self._lock:
            if self._gone() and self._start() is None:
                return None
            return self._talk(line, self._timeout)

    def close(self) -> None:
        with self._lock:
            self._kill()

    def _gone(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def _start(self) -> Any:
        self._kill()
        process = subprocess.Popen(  # in a group of its own: Ctrl-C in a terminal is for us, not for it
            child.command(self._module), stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
        )
        self._process, self._end = process, weakref.finalize(self, _end, process)
        return self._talk(json.dumps(self._greeting()).encode() + b"\n", START_TIMEOUT)

    def _talk(self, line: bytes, timeout: float) -> Any:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        end = time.monotonic() + timeout
        answer = bytearray()
        waiting = select.poll()  # select() takes no descriptor above 1023, and a server may have many
        waiting.register(process.stdout, select.POLLIN)
        try:
            process.stdin.write(line)
            process.stdin.flush()
            while not answer.endswith(b"\n"):
                left = end - time.monotonic()
                piece = process.stdout.read1(_PIECE) if left > 0 and waiting.poll(left * 1000) else b""  # type: ignore[attr-defined]
                if not piece:
                    self._kill()
                    return None
                answer += piece
        except BrokenPipeError:
            self._kill()
            return None
        return json.loads(answer)

    def _kill(self) -> None:
        self._end()
        self._process = None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # what was still to be written is of no use any more
