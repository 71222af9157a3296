"""Ask every engine the same questions, with drafts and without: one command, goes on where it was stopped.

    python recipes/engines/run.py setup                       # a venv for each engine, below --work
    python recipes/engines/run.py ask [--only llama.cpp,paceline] [--questions 200] [--tokens 256] [--drafts 1,2,3,4,8]
    python recipes/engines/judge.py && python recipes/engines/page.py

Every cell (engine, mode, model, number of drafts, requests at once, temperature) is a process of its own and a file
of JSON lines: a header, then an answer a line. A cell that is complete is not asked again; one that was stopped
goes on with the questions that are missing. An engine that does not install, does not start or dies is a cell with
its last line, never a gap.

Models: `smollm2` with a draft model made of it (weights rounded to 4 bits, `draft.py`), and `coder`,
Qwen2.5-Coder-1.5B with its 0.5B sibling, where `recipes/real/fetch.py` has put them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draft import Files, prepare
from engines import ENGINES, PLAIN, Engine, Mode
from questions import Asked, questions

from paceline import LLM

HERE = Path(__file__).resolve().parent
DEFAULT_WORK = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "paceline" / "engines"
CONTEXT = 2048  # tokens: prompt and answer of the longest question


@dataclass(frozen=True)
class Cell:
    """One way to ask: what a file of results holds."""

    engine: str
    mode: str
    model: str
    drafts: int
    parallel: int
    temperature: float
    repeat: int = 0  # plain decoding is asked twice: is the engine itself deterministic?

    @property
    def file_name(self) -> str:
        parts = (
            self.engine,
            self.mode,
            self.model,
            f"k{self.drafts}",
            f"b{self.parallel}",
            f"t{self.temperature}",
        )
        return (
            "_".join(p.replace(" ", "-") for p in parts)
            + (f"_again{self.repeat}" if self.repeat else "")
            + ".jsonl"
        )


def cells(engine: Engine, given: argparse.Namespace, model: str) -> Iterator[Cell]:
    """All cells of an engine and a model: plain decoding first, since everything is compared with it."""
    batches = given.parallel if engine.batches else [1]
    for temperature in given.temperatures:
        for repeat in (0, 1):
            yield Cell(engine.name, PLAIN, model, 0, 1, temperature, repeat)
        yield from (Cell(engine.name, PLAIN, model, 0, many, temperature) for many in batches if many > 1)
        for mode in engine.modes:
            for drafts in given.drafts if mode.drafts else [0]:
                yield from (
                    Cell(engine.name, mode.name, model, drafts, many, temperature) for many in batches
                )


class Died(Exception):
    """An engine's process ended early; the text is the last line that it wrote."""


class Process:
    """A runner in the engine's own environment. It is ended on leaving, whatever happened between."""

    def __init__(self, python: Path, engine: Engine, setup: dict[str, Any], log: Path) -> None:
        self._log = log
        environment = {**os.environ, "OMP_NUM_THREADS": str(setup["threads"])}
        if engine.packages:
            environment.pop("PYTHONPATH", None)
        command = [str(python), str(HERE / "runners" / engine.runner), json.dumps(setup)]
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                env=environment,
            )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        with suppress(BrokenPipeError):
            self._process.communicate()

    def read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Died(self._last_line())
        value: dict[str, Any] = json.loads(line)
        return value

    def write(self, values: Sequence[dict[str, Any]]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.writelines(json.dumps(value) + "\n" for value in values)
            self._process.stdin.write("\n")  # the batch is whole
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Died(self._last_line()) from None

    def _last_line(self) -> str:
        code = self._process.wait()
        lines = [
            line
            for line in self._log.read_text(encoding="utf-8", errors="replace").split("\n")
            if line.strip()
        ]
        return f"exit status {code}: {lines[-1][:300] if lines else 'it wrote nothing'}"


def ask(
    cell: Cell, engine: Engine, files: Files, given: argparse.Namespace, asked: list[tuple[Asked, list[int]]]
) -> None:
    """Fill one cell's file. A question that was answered before is not asked again."""
    path = given.work / "results" / cell.file_name
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    )
    if lines and "failed" in lines[0] and not given.again:
        return
    lines = [] if lines and "failed" in lines[0] else lines
    done = {line["id"] for line in lines if "id" in line}
    left = [(a, ids) for a, ids in asked if a.id not in done]
    if not left:
        return
    mode = next((m for m in engine.modes if m.name == cell.mode), Mode(PLAIN))
    setup = {
        "model": str(files.target(engine.files)),
        "draft": draft_of(mode, engine, files),
        "mode": cell.mode,
        "drafts": cell.drafts,
        "threads": given.threads,
        "parallel": cell.parallel,
        "context": CONTEXT,
    }
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            with Process(python_of(engine, given.work), engine, setup, Path(folder) / "log") as process:
                header = {
                    "cell": asdict(cell),
                    **process.read(),
                    "tokens": given.tokens,
                    "threads": given.threads,
                }
                with path.open("a" if lines else "w", encoding="utf-8") as sink:
                    if not lines:
                        sink.write(json.dumps(header) + "\n")
                    for start in range(0, len(left), cell.parallel):
                        batch = left[start : start + cell.parallel]
                        process.write([question(a, ids, given.tokens, cell.temperature) for a, ids in batch])
                        sink.writelines(json.dumps(process.read()) + "\n" for _ in batch)
                        sink.flush()
        except Died as error:
            if not done and not path.exists():
                path.write_text(
                    json.dumps({"cell": asdict(cell), "failed": str(error)}) + "\n", encoding="utf-8"
                )
            print(f"  {cell.file_name}: {error}", flush=True)
            return
    print(f"  {cell.file_name}: {len(left)} questions in {time.monotonic() - begin:.0f} s", flush=True)


def draft_of(mode: Mode, engine: Engine, files: Files) -> str | None:
    if mode.foreign:
        return str(files.foreign)
    return str(files.draft(engine.files)) if mode.draft else None


def question(asked: Asked, ids: list[int], tokens: int, temperature: float) -> dict[str, Any]:
    seed = int.from_bytes(asked.id.encode(), "big") % 2**31
    return {"id": asked.id, "prompt": ids, "max_tokens": tokens, "temperature": temperature, "seed": seed}


def python_of(engine: Engine, work: Path) -> Path:
    return (
        work / "venvs" / engine.name.replace(" ", "-") / "bin" / "python"
        if engine.packages
        else Path(sys.executable)
    )


def setup(given: argparse.Namespace) -> None:
    """A venv for each engine. One that cannot be made is said and left out: its cells say why."""
    for engine in chosen(given):
        if not engine.packages:
            continue
        python = python_of(engine, given.work)
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(python.parent.parent)], check=True)
        print(f"{engine.name}: {' '.join(engine.packages)}", flush=True)
        made = subprocess.run([str(python), "-m", "pip", "install", "--quiet", *engine.packages], check=False)
        if made.returncode:
            print(f"{engine.name} could not be installed; its cells will say so", flush=True)


def chosen(given: argparse.Namespace) -> list[Engine]:
    names = given.only or [e.name for e in ENGINES]
    if unknown := set(names) - {e.name for e in ENGINES}:
        sys.exit(f"--only {','.join(sorted(unknown))}: the engines are {', '.join(e.name for e in ENGINES)}")
    return [e for e in ENGINES if e.name in names]


def prompts(files: Files, given: argparse.Namespace) -> list[tuple[Asked, list[int]]]:
    """The questions as tokens: made once by the model's own template and tokenizer, the same for all engines."""
    llm = LLM(str(files.gguf), drafter="none", native=False)
    made = [(a, [*llm.render([{"role": "user", "content": a.text}])[0]]) for a in questions(given.questions)]
    return [(a, ids) for a, ids in made if len(ids) + given.tokens < CONTEXT]


def everything(given: argparse.Namespace) -> None:
    if shutil.disk_usage(given.work).free < 4 << 30:
        sys.exit(f"{given.work} has less than 4 GiB free: name another place with --work")
    for model in given.models:
        files = prepare(model, given.work)
        if files is None:
            print(
                f"{model}: its files are not here; python recipes/real/fetch.py puts them together",
                flush=True,
            )
            continue
        asked = prompts(files, given)
        for engine in chosen(given):
            print(f"{model}, {engine.name}", flush=True)
            for cell in cells(engine, given, model):
                ask(cell, engine, files, given, asked)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["setup", "ask"])
    parser.add_argument(
        "--work", type=Path, default=DEFAULT_WORK, help=f"venvs, files and results ({DEFAULT_WORK})"
    )
    parser.add_argument("--only", type=lambda s: s.split(","), help="these engines, with commas between them")
    parser.add_argument("--models", type=lambda s: s.split(","), default=["smollm2", "coder"])
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--drafts", type=numbers, default=[1, 2, 3, 4, 8])
    parser.add_argument(
        "--parallel", type=numbers, default=[1, 4, 16], help="requests at once, where an engine can"
    )
    parser.add_argument("--temperatures", type=lambda s: [float(t) for t in s.split(",")], default=[0.0])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--again", action="store_true", help="ask cells again that failed")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    try:
        setup(given) if given.what == "setup" else everything(given)
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on from here")


if __name__ == "__main__":
    main()
