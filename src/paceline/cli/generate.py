"""`paceline generate`: a file of prompts to a file of answers, resumable line by line."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import click

from paceline.cli import openai_batch
from paceline.cli.lines import Answers, Line, Record, read_answers, read_lines
from paceline.cli.options import (
    FROM_ENVIRONMENT,
    Command,
    apply,
    engine_options,
    need_ray,
    one_target,
    sampling_options,
    split,
)
from paceline.errors import RequestFailed, UsageError

if TYPE_CHECKING:
    from paceline.chat.road import Turn
    from paceline.core import Completion, SamplingParams
    from paceline.llm import LLM

Ready = tuple[Line, list[int]]  # a line and its prompt's token ids


@click.command(
    cls=Command,
    own="Files and replicas",
    first=("out", "target", "max_tokens", "temperature", "seed", "drafter", "max_batch", "max_model_len"),
    epilog=FROM_ENVIRONMENT,
)
@click.argument("places", nargs=-1, required=True, metavar="[TARGET] IN.jsonl")
@click.option(
    "-o",
    "--out",
    required=True,
    metavar="OUT.jsonl",
    help="Answers, one line for each prompt as it is done (- for standard output).",
)
@click.option("--target", help="The same as the argument TARGET.  [default: demo]")
@click.option(
    "--overwrite", is_flag=True, help="Replace OUT.jsonl, whatever it holds, instead of continuing it."
)
@click.option("--ray", "by_ray", is_flag=True, help="Write with several engines on a Ray cluster, in order.")
@click.option(
    "--replicas", type=click.IntRange(min=1), default=2, show_default=True, help="Engines with --ray."
)
@click.option("--ray-address", help="A Ray cluster to join, or auto.  [default: one of this machine alone]")
@apply(engine_options("generate"))
@apply(sampling_options("generate"))
def command(places: tuple[str, ...], out: str, target: str | None, overwrite: bool, **values: Any) -> None:
    """Write the answers to many prompts.

    Each line of IN.jsonl is an object with `prompt` (text or token ids), optionally `id`, `images` and `audio` (lists of
    paths, for the prompt's placeholders), and any sampling parameter for that line. With `messages` in the place of
    `prompt` it is a chat, which may have `tools` and `response_format`; a line of OpenAI's batch files is read, too, and
    its answer written as theirs. Every line is checked before the
    first token is written: one that cannot be used gives a record with its `id`, `error` and `line`, and the others are
    written. Lines that OUT.jsonl has answers to are not done again, so an interrupted run is continued by the same
    command, and so is one whose bad lines were corrected. A file that holds anything else is left alone.

    IN.jsonl and OUT.jsonl may be -, standard input and output: then nothing is continued.
    """
    if len(places) > 2 or (len(places) == 2 and target is not None):
        raise click.UsageError("give TARGET and IN.jsonl once each")
    source = places[-1]
    target = one_target(places[0] if len(places) == 2 else None, target)
    fleet = {name: values.pop(name) for name in ("by_ray", "replicas", "ray_address")}
    if fleet["ray_address"] is not None and not fleet["by_ray"]:
        raise click.UsageError("--ray-address is for --ray: add it")
    options, params = split("generate", values)
    lines = read_lines(source, params)
    if out != "-":
        read_answers(Path(out), Path(source), overwrite)  # what is no output is refused before it is opened
    try:
        with _opened(out) as sink:  # a place that cannot be written to shows before the model is loaded
            answers = Answers()
            if out != "-":
                _lock(sink, out)
                answers = read_answers(Path(out), Path(source), overwrite)
            todo = [line for line in lines if not answers.has(line)]
            if len(todo) < len(lines):
                click.echo(f"{len(lines) - len(todo)} of {len(lines)} are done already", err=True)
            failed = _answer(lambda: _engines(target, options, fleet), todo, _Sink(sink, answers))
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(
            f"cannot write {out} ({error.strerror}): check its folder and the disk, then run again; "
            "what was written is kept"
        ) from error
    refused = [line for line in lines if line.error is not None] + failed.refused
    if refused:
        raise UsageError(
            f"{len(refused)} of {len(lines)} lines of {source} cannot be used, correct them and run again: "
            f"{min(refused, key=lambda line: line.number).error}"
        )
    if failed.texts:
        raise RequestFailed(f"{failed.texts} of {len(lines)} texts ended in an error: see `error` in {out}")


def _opened(out: str) -> AbstractContextManager[BinaryIO]:
    return nullcontext(sys.stdout.buffer) if out == "-" else Path(out).open("ab")


def _lock(file: BinaryIO, out: str) -> None:
    """Raise UsageError if another run writes to the same file; the lock goes with the file, however this one ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(
            f"{out} is in use by another run: wait until it has ended, or give another --out"
        ) from error
    except OSError:
        return  # a place without locks, as some network file systems are


class _Sink:
    """The output. A file is cut to its whole lines when the first record is written."""

    def __init__(self, file: BinaryIO, answers: Answers) -> None:
        self._file, self._answers, self._begun = file, answers, False
        self._lasts = file is not sys.stdout.buffer  # a file is continued after an interruption

    def refuse(self, line: Line) -> None:
        if not self._answers.has(line):
            self.write(line.record())

    def write(self, record: Record) -> None:
        if not self._begun and self._lasts:
            self._file.truncate(self._answers.size)
            self._begun = True
            if self._answers.unfinished:
                self._file.write(b"\n")
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        if self._lasts:
            os.fsync(self._file.fileno())


class _Failed:
    """What did not go well."""

    def __init__(self) -> None:
        self.refused: list[Line] = []  # found by the model's own checks
        self.texts = 0


class _Engines(Protocol):
    """What writes the answers. `name`: of the model."""

    name: str

    def check(self, lines: list[Line]) -> list[list[int] | str]:
        """Each prompt's token ids, or why the model cannot run the line."""
        ...

    def write(self, todo: list[Ready]) -> Iterator[tuple[int, Completion]]:
        """(which, its answer) as each is finished."""
        ...

    def close(self) -> None: ...


class _Own:
    """An engine in this process."""

    def __init__(self, llm: LLM, name: str) -> None:
        self._llm, self.name = llm, name
        self._turns: dict[int, Turn] = {}  # lines with messages, ready to be answered
        self._params: dict[int, SamplingParams] = {}  # of the others

    def check(self, lines: list[Line]) -> list[list[int] | str]:
        return [self._check(line) for line in lines]

    def _check(self, line: Line) -> list[int] | str:
        assert line.params is not None
        try:
            if line.messages is not None:
                (turn,) = self._llm.turns([line.messages], None, line.params | line.wanted)
                self._llm.engine.check(turn.prompt.ids, turn.params)
                self._turns[line.number] = turn
                return turn.prompt.ids
            params = self._llm.params(**line.params)
            if (constraint := self._llm.held(line.wanted.get("response_format"))) is not None:
                params = replace(params, constraint=constraint)
            ((ids, _),) = self._llm.requests([line.prompt], params, {}, line.media)
            self._params[line.number] = params
        except UsageError as error:
            return str(error)
        return ids

    def write(self, todo: list[Ready]) -> Iterator[tuple[int, Completion]]:
        turns = [self._turns.get(line.number) for line, _ in todo]
        params = [self._params[line.number] if turn is None else turn.params
                  for (line, _), turn in zip(todo, turns, strict=True)]  # fmt: skip
        for written in self._llm.completions(
            [(ids, text) for (_, ids), text in zip(todo, params, strict=True)]
        ):
            if written is None:
                continue
            i, completion = written
            turn = turns[i]
            if turn is not None:
                for j, text in enumerate((completion, *completion.siblings)):
                    self._llm.settle(turn, text, j)
            yield i, completion

    def close(self) -> None:
        self._llm.close()


class _Cluster:
    """Engines on a Ray cluster."""

    def __init__(self, target: str, options: dict[str, Any], fleet: dict[str, Any]) -> None:
        from paceline.cluster.config import FleetConfig

        config = FleetConfig(replicas=fleet["replicas"], ray_address=fleet["ray_address"])
        from paceline.cluster.batch import Pool  # Ray, once nothing is wrong with the options

        self._pool, self.name = Pool(target, options, config), target

    def check(self, lines: list[Line]) -> list[list[int] | str]:
        checked = self._pool.check([(line.prompt, line.params or {}) for line in lines])
        alone = "pictures, messages and response_format are for one engine: leave --ray out"
        others = [bool(line.media or line.messages or line.wanted) for line in lines]
        return [alone if other else result for other, result in zip(others, checked, strict=True)]

    def write(self, todo: list[Ready]) -> Iterator[tuple[int, Completion]]:
        return enumerate(self._pool.write([(ids, line.params or {}) for line, ids in todo]))

    def close(self) -> None:
        self._pool.close()


def _engines(target: str, options: dict[str, Any], fleet: dict[str, Any]) -> _Engines:
    if not fleet["by_ray"]:
        from paceline.llm import LLM
        from paceline.memory import freeze_objects

        llm = LLM(target, say=lambda line: click.echo(line, err=True), **options)
        freeze_objects()
        return _Own(llm, target)
    need_ray()
    return _Cluster(target, options, fleet)


def _answer(make: Callable[[], _Engines], todo: list[Line], sink: _Sink) -> _Failed:
    failed = _Failed()
    usable = [line for line in todo if line.error is None]
    engines = make() if usable else None
    try:
        checked = {line.number: ids for line, ids in zip(usable, engines.check(usable))} if engines else {}
        good: list[Ready] = []
        for line in todo:
            ids = checked.get(line.number)
            if isinstance(ids, list):
                good.append((line, ids))
                continue
            if ids is not None:
                line = line.refused(f"line {line.number}: {ids}")  # noqa: PLW2901
                failed.refused.append(line)
            sink.refuse(line)
        if engines is not None and good:
            failed.texts = _generate(engines, good, sink)
    finally:
        if engines is not None:
            engines.close()
    return failed


def _generate(engines: _Engines, todo: list[Ready], sink: _Sink) -> int:
    """Write the answers; how many texts ended in an error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    tokens = failed = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("prompts", total=len(todo))
        for i, completion in engines.write(todo):
            sink.write(_record(todo[i][0], completion, engines.name))
            tokens += len(completion.token_ids)
            failed += completion.error is not None
            progress.update(task, advance=1, description=f"{tokens} tokens")
    return failed


def _record(asked: Line, completion: Completion, model: str) -> Record:
    if asked.batch:
        chat = asked.messages is not None
        return openai_batch.answered(asked.id, asked.number, completion, model, chat)
    texts = [completion, *completion.siblings]
    line: Record = {
        "id": asked.id,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "tokens": len(completion.token_ids),
        "seed": completion.seed,
        "tokens_per_step": round(completion.stats.tokens_per_step, 3),
    }
    if len(texts) > 1:
        line["texts"] = [c.text for c in texts]
    for field in ("reasoning", "tool_calls", "warnings"):
        if value := getattr(completion, field):
            line[field] = value
    if completion.stats.lossy:
        line["lossy"] = True
    if completion.error is not None:
        line["error"] = completion.error
    if completion.logprobs is not None:
        line["logprobs"] = [[p.token, p.raw, p.top] for p in completion.logprobs]
    return line
