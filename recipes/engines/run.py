"""Ask every engine the same questions, with drafts and without: one command, goes on where it was stopped.

    python recipes/engines/run.py setup                       # a venv for each engine, below --work
    python recipes/engines/run.py ask [--only llama.cpp,paceline] [--questions 200] [--tokens 256] [--drafts 1,2,3,4,8]
    python recipes/engines/run.py ask --speeds --questions 4   # alone on the machine: tokens a second
    python recipes/engines/judge.py && python recipes/engines/page.py

Every cell (engine, mode, model, number of drafts, requests at once, temperature) is a process of its own and a file
of JSON lines: a header, then an answer a line. A cell that is complete is not asked again; one that was stopped
goes on with the questions that are missing. All cells get a few questions first, then more. An engine that does not
install, does not start, dies or has too little memory is a cell with its last line, never a gap.

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
from functools import partial
from pathlib import Path
from typing import Any

from draft import Files, Talk, prepare
from engines import ENGINES, PLAIN, Engine, Mode
from questions import Asked, questions

from paceline.machine import free_memory

HERE = Path(__file__).resolve().parent
DEFAULT_WORK = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "paceline" / "engines"
CONTEXT = 2048  # tokens: prompt and answer of the longest question
FIRST = 8  # questions that every cell gets before any cell gets more


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
    speeds: bool = False  # nothing else ran on the machine: its seconds may be told

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
            + ("_speeds" if self.speeds else "")
            + ".jsonl"
        )


def cells(engine: Engine, given: argparse.Namespace, model: str) -> Iterator[Cell]:
    """All cells of an engine and a model: plain decoding first, since everything is compared with it."""
    batches = given.parallel if engine.batches else [1]
    make = partial(Cell, engine.name, model=model, speeds=given.speeds)
    for temperature in given.temperatures:
        for repeat in (0,) if given.speeds else (0, 1):
            yield make(PLAIN, drafts=0, parallel=1, temperature=temperature, repeat=repeat)
        for many in batches:
            if many > 1:
                yield make(PLAIN, drafts=0, parallel=many, temperature=temperature)
        for mode in engine.modes:
            for drafts in given.drafts if mode.drafts else [0]:
                for many in batches:
                    yield make(mode.name, drafts=drafts, parallel=many, temperature=temperature)


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


Questions = list[tuple[Asked, list[int]]]  # with their prompts as tokens


@dataclass(frozen=True)
class File:
    """A cell's file of results: a header, then answers; or one line that says why there are none."""

    path: Path

    def lines(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]

    def failed(self, cell: Cell, why: str) -> None:
        """Note why the cell is empty, or why it goes no further."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as sink:
            line = {"died": why} if self.path.stat().st_size else {"cell": asdict(cell), "failed": why}
            sink.write(json.dumps(line) + "\n")


def ask(cell: Cell, engine: Engine, files: Files, given: argparse.Namespace, asked: Questions) -> None:
    """Fill one cell's file. A question that was answered before is not asked again."""
    file = File(given.work / "results" / cell.file_name)
    lines = file.lines()
    if any("failed" in line or "died" in line for line in lines):
        if not given.again:
            return
        if "failed" in lines[0]:
            file.path.unlink()
            lines = []
    done = {line["id"] for line in lines if "id" in line}
    left = [(a, ids) for a, ids in asked if a.id not in done]
    if not left:
        return
    if lack := memory_lacks(cell, engine, files):
        file.failed(cell, lack)
        return
    begin = time.monotonic()
    try:
        fill(cell, engine, files, given, left)
    except Died as error:
        file.failed(cell, str(error))
        print(f"  {cell.file_name}: {error}", flush=True)
    else:
        print(f"  {cell.file_name}: {len(left)} questions in {time.monotonic() - begin:.0f} s", flush=True)


def fill(cell: Cell, engine: Engine, files: Files, given: argparse.Namespace, left: Questions) -> None:
    """Start the engine and ask what is left, batch by batch. Raises Died."""
    path = given.work / "results" / cell.file_name
    path.parent.mkdir(parents=True, exist_ok=True)
    setup = setup_of(cell, engine, files, given.threads)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with Process(python_of(engine, given.work), engine, setup, log) as process:
            said = {"tokens": given.tokens, "threads": given.threads}
            header = {"cell": asdict(cell), **process.read(), **said}
            with path.open("a", encoding="utf-8") as sink:
                if not path.stat().st_size:
                    sink.write(json.dumps(header) + "\n")
                for start in range(0, len(left), cell.parallel):
                    batch = left[start : start + cell.parallel]
                    process.write([question(a, ids, given.tokens, cell.temperature) for a, ids in batch])
                    sink.writelines(json.dumps(process.read()) + "\n" for _ in batch)
                    sink.flush()


def setup_of(cell: Cell, engine: Engine, files: Files, threads: int) -> dict[str, Any]:
    """What a runner is told, see `runners/exchange.py`."""
    mode = next((m for m in engine.modes if m.name == cell.mode), Mode(PLAIN))
    return {
        "model": str(files.target(engine.files)),
        "draft": draft_of(mode, engine, files),
        "mode": cell.mode,
        "drafts": cell.drafts,
        "threads": threads,
        "parallel": cell.parallel,
        "context": CONTEXT,
    }


def memory_lacks(cell: Cell, engine: Engine, files: Files) -> str:
    """Why the machine has too little memory for a cell; empty if it has enough."""
    mode = next((m for m in engine.modes if m.name == cell.mode), Mode(PLAIN))
    paths = [files.target(engine.files)] + ([files.draft(engine.files)] if mode.draft else [])
    weights = sum(size_of(path) for path in paths)
    need = engine.times * weights + (1 << 30)
    free = free_memory()
    if need <= free:
        return ""
    return f"left out: it needs about {need / 2**30:.1f} GiB of memory, {free / 2**30:.1f} are free"


def size_of(path: Path) -> int:
    """Bytes of a file, or of a folder's weights."""
    return sum(
        p.stat().st_size for p in (path.glob("*.safetensors") if path.is_dir() else [path]) if p.exists()
    )


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


def prompts(files: Files, given: argparse.Namespace) -> Questions:
    """The questions as tokens: made once by the model's own template and tokenizer, the same for all engines."""
    talk = Talk(files.gguf)
    made = [(a, talk.prompt(a.text)) for a in questions(given.questions, given.kinds)]
    return [(a, ids) for a, ids in made if len(ids) + given.tokens < CONTEXT]


def portions(asked: Questions) -> Iterator[Questions]:
    """A few questions, then four times as many: a run that is stopped has something of every cell."""
    count = FIRST
    while count < len(asked):
        yield asked[:count]
        count *= 4
    yield asked


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
        for asked in portions(prompts(files, given)):
            print(f"{model}, up to {len(asked)} questions of each cell", flush=True)
            for engine in chosen(given):
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
    parser.add_argument(
        "--kinds",
        type=lambda s: s.split(","),
        help="only these kinds of questions, e.g. copy: opaque identifiers",
    )
    parser.add_argument(
        "--speeds", action="store_true", help="nothing else runs: cells whose seconds are told"
    )
    parser.add_argument("--again", action="store_true", help="ask cells again that failed")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    try:
        setup(given) if given.what == "setup" else everything(given)
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on from here")


if __name__ == "__main__":
    main()
