"""A process that compiles grammars, so that one that takes too long, or too much memory, can be killed.

Run as a module it is that process: one JSON object per line in, one per line out.
"""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.text.grammar import Vocabulary

MEMORY = 4 * 2**30  # bytes of address space
START_TIMEOUT = 60.0  # seconds to load a vocabulary


class CompilerProcess:
    """Started at the first use, and again after it was killed. One grammar at a time."""

    def __init__(self, vocabulary: Vocabulary, timeout: float) -> None:
        self._vocabulary, self._timeout = vocabulary, timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def check(self, grammar: str) -> None:
        """Raise UsageError unless `grammar` compiles within the time limit."""
        with self._lock:
            process = self._running()
            answer = self._talk(process, {"grammar": grammar}, self._timeout)
        if answer is None:
            raise UsageError(
                f"the grammar takes longer than {self._timeout:g} s or too much memory: make it simpler"
            )
        if answer["error"]:
            raise UsageError(f"the grammar cannot be compiled: {answer['error'][:300]}")

    def close(self) -> None:
        with self._lock:
            self._kill()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        command = [sys.executable, "-m", "paceline.text.compiler_process"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        v = self._vocabulary
        hello = {"tokenizer": v.tokenizer_json, "size": v.size, "end_ids": v.end_ids}
        if self._talk(self._process, hello, START_TIMEOUT) is None:
            raise UsageError("grammars cannot be used: the process that compiles them does not start")
        return self._process

    def _talk(self, process: subprocess.Popen[bytes], message: dict[str, Any], timeout: float) -> Any:
        """The answer, or None if none came in time: then the process is gone."""
        assert process.stdin is not None
        assert process.stdout is not None
        end = time.monotonic() + timeout
        line = b""
        try:
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()
            while not line.endswith(b"\n"):
                ready = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))[0]
                piece = os.read(process.stdout.fileno(), 65536) if ready else b""
                if not piece:
                    self._kill()
                    return None
                line += piece
        except BrokenPipeError:
            self._kill()
            return None
        return json.loads(line)

    def _kill(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue  # what was still to be written is of no use any more
        self._process = None


def main() -> None:
    import llguidance

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    hello = json.loads(sys.stdin.readline())
    tokenizer = llguidance.LLTokenizer(hello["tokenizer"], n_vocab=hello["size"], eos_token=hello["end_ids"])
    print("{}", flush=True)
    for line in sys.stdin:
        matcher = llguidance.LLMatcher(tokenizer, json.loads(line)["grammar"], log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        error = matcher.get_error().partition("\n<state>")[0]  # behind it stands a dump of the matcher
        print(json.dumps({"error": error.replace("NoExtensionBias", "nothing can fit it")}), flush=True)


if __name__ == "__main__":
    main()
