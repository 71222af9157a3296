"""The command as a process: refusals with exit code 2, and SIGTERM that drains."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

import paceline

DEMO = Path(paceline.__file__).parent / "demo"
COMMAND = [sys.executable, "-c", "from paceline.cli import main; main()", "serve"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(paceline.__file__).parents[1])}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [*COMMAND, *arguments], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as started:
        try:
            yield started
        finally:
            started.kill()


def test_refusals_are_one_line_and_exit_code_2(tmp_path: Path) -> None:
    bad = tmp_path / "c.toml"
    bad.write_text("[server]\nprot = 1\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, message in (
            (["--port", port], "choose another --port"),
            (["--api-key-file", str(tmp_path / "none")], "cannot be read"),
            (["--config", str(bad)], "did you mean port"),
            (["--host", "0.0.0.0"], "--api-key-file"),
        ):
            done = subprocess.run(
                [*COMMAND, *arguments],
                env=ENVIRONMENT,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == 2, done.stderr
            assert message in done.stderr
            assert "Traceback" not in done.stderr
            assert len(done.stderr.strip().splitlines()) == 1


def test_a_model_that_cannot_be_loaded_ends_the_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, str(tmp_path), "--port", "0"],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not (DEMO / "target" / "config.json").is_file(), reason="the demo pair is not here")
def test_sigterm_finishes_open_requests_and_refuses_new_ones() -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    body: dict[str, Any] = {
        "model": "demo",
        "prompt": "def f(",
        "max_tokens": 300,
        "ignore_eos": True,
        "stream": True,
    }
    with process("demo", "--port", str(port), "--threads", "1") as server:
        early = wait_for(url)
        assert early[0] in ("loading", "ready")
        assert early[-1] == "ready"
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            while httpx.get(f"{url}/health").json()["status"] == "ready":
                time.sleep(0.01)
            refused = httpx.post(f"{url}/v1/completions", json=body)
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert server.wait(20) == 0


def wait_for(url: str) -> list[str]:
    """The states that /health went through until it was ready."""
    seen: list[str] = []
    end = time.monotonic() + 120
    while time.monotonic() < end:
        try:
            state = httpx.get(f"{url}/health").json()["status"]
        except httpx.TransportError:
            state = ""
        if state and state not in seen:
            seen.append(state)
        if state == "ready":
            return seen
        time.sleep(0.05)
    raise AssertionError(f"never ready: {seen}")


def test_a_draft_length_out_of_range_is_told_as_the_command_line_does() -> None:
    done = subprocess.run(
        [*COMMAND, "--draft-tokens", "99"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.strip().endswith("draft_tokens=99 is not possible: give 0..16 or 'auto'")
