"""Every example runs as it stands."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))
CLIENTS = ("openai_client",)  # need a server
CLUSTERS = ("ray_data",)  # need Ray, with the packages of Ray Data


def run(example: Path, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, str(example), *args], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "example", [e for e in EXAMPLES if e.stem not in CLIENTS + CLUSTERS], ids=lambda e: e.stem
)
def test_it_runs_and_says_something(example: Path) -> None:
    assert run(example).strip()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    command = "import sys; from paceline.cli import main; sys.argv = ['paceline', 'serve', 'demo', '--port', '0']; main()"
    with subprocess.Popen(
        [sys.executable, "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        assert server.stdout is not None
        try:
            yield next(line.split()[-1] for line in server.stdout if "is ready on" in line)
        finally:
            server.terminate()
            server.communicate(timeout=30)


@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.stem in CLIENTS], ids=lambda e: e.stem)
def test_a_client_gets_the_same_text_with_and_without_drafts(example: Path, address: str) -> None:
    drafted, plain = run(example, address).split("\n---\n")
    assert drafted.strip() == plain.strip() != ""


def test_ray_data_writes_every_prompt(tmp_path: Path) -> None:
    for package in ("ray", "pyarrow", "pandas"):
        pytest.importorskip(package, reason="Ray Data is not installed: pip install ray[data]")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"def f{i}("}) + "\n" for i in range(20)))
    run(next(e for e in EXAMPLES if e.stem == "ray_data"), str(prompts), str(tmp_path / "out"))
    lines = [line for file in (tmp_path / "out").iterdir() for line in file.read_text().splitlines()]
    assert sorted(json.loads(line)["prompt"] for line in lines) == sorted(f"def f{i}(" for i in range(20))
    assert all(json.loads(line)["text"] for line in lines)


def test_there_are_as_many_as_promised_and_they_are_short() -> None:
    assert {e.stem for e in EXAMPLES} >= {
        "generate",
        "stream",
        "batch",
        "constrained",
        "own_drafter",
        "openai_client",
    }
    assert all(len(e.read_text(encoding="utf-8").splitlines()) <= 50 for e in EXAMPLES)
