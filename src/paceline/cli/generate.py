"""`paceline generate`: a file of prompts to a file of answers, resumable line by line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from paceline.cli.lines import Answers, Line, Record, read_answers, read_lines
from paceline.cli.options import ENGINE, SAMPLING, apply, split
from paceline.errors import RequestFailed, UsageError

if TYPE_CHECKING:
    from paceline.core import Completion
    from paceline.llm import LLM


@click.command()
@click.argument("places", nargs=-1, required=True, metavar="[TARGET] IN.jsonl")
@click.option(
    "-o", "--out", required=True, metavar="OUT.jsonl", help="Answers, one line for each prompt as it is done."
)
@click.option("--target", help="demo, a folder in Hugging Face layout, or a hub id.  [default: demo]")
@click.option(
    "--overwrite", is_flag=True, help="Replace OUT.jsonl, whatever it holds, instead of continuing it."
)
@apply(ENGINE)
@apply(SAMPLING)
def command(places: tuple[str, ...], out: str, target: str | None, overwrite: bool, **values: Any) -> None:
    """Write the answers to many prompts.

    Each line of IN.jsonl is an object with `prompt` (text or token ids), optionally `id`, and any sampling parameter for
    that line. Every line is checked before the first token is written: one that cannot be used gives a record with its
    `id`, `error` and `line`, and the others are written. Lines that OUT.jsonl has answers to are not done again, so an
    interrupted run is continued by the same command, and so is one whose bad lines were corrected. A file that holds
    anything else is left alone.
    """
    if len(places) > 2 or (len(places) == 2 and target is not None):
        raise click.UsageError("give TARGET and IN.jsonl once each")
    source, target = places[-1], target or (places[0] if len(places) == 2 else "demo")
    options, said = split(values)
    lines = read_lines(Path(source), said)
    answers = read_answers(Path(out), Path(source), overwrite)
    todo = [line for line in lines if not answers.has(line)]
    if len(todo) < len(lines):
        click.echo(f"{len(lines) - len(todo)} of {len(lines)} are done already", err=True)
    try:
        with Path(out).open(
            "ab"
        ) as sink:  # a place that cannot be written to shows before the model is loaded
            failed = _answer(target, options, todo, _Sink(sink, answers))
    except OSError as error:
        raise UsageError(
            f"cannot write {out} ({error.strerror}): what was written is kept; run again to continue"
        ) from error
    refused = [line for line in lines if line.error is not None] + failed.refused
    if refused:
        raise UsageError(
            f"{len(refused)} of {len(lines)} lines of {source} cannot be used, correct them and run again: "
            f"{min(refused, key=lambda line: line.number).error}"
        )
    if failed.texts:
        raise RequestFailed(f"{failed.texts} of {len(lines)} texts ended in an error: see `error` in {out}")


class _Sink:
    """The output, cut to its whole lines when the first record is written."""

    def __init__(self, file: BinaryIO, answers: Answers) -> None:
        self._file, self._answers, self._begun = file, answers, False

    def refuse(self, line: Line) -> None:
        if not self._answers.has(line):
            self.write(line.record())

    def write(self, record: Record) -> None:
        if not self._begun:
            self._file.truncate(self._answers.size)
            self._begun = True
            if self._answers.unfinished:
                self._file.write(b"\n")
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


class _Failed:
    """What did not go well."""

    def __init__(self) -> None:
        self.refused: list[Line] = []  # found by the model's own checks
        self.texts = 0


def _answer(target: str, options: dict[str, Any], todo: list[Line], sink: _Sink) -> _Failed:
    failed = _Failed()
    llm = None
    if any(line.error is None for line in todo):
        from paceline.llm import LLM
        from paceline.memory import freeze_objects

        llm = LLM(target, say=lambda line: click.echo(line, err=True), **options)
        freeze_objects()
    good: list[tuple[Line, list[int]]] = []
    for line in todo:
        if line.error is None and llm is not None:
            try:
                good.append((line, _checked(llm, line)))
                continue
            except UsageError as error:
                failed.refused.append(line.refused(f"line {line.number}: {error}"))
                sink.refuse(failed.refused[-1])
                continue
        sink.refuse(line)
    if llm is not None and good:
        failed.texts = _generate(llm, good, sink)
    return failed


def _checked(llm: LLM, line: Line) -> list[int]:
    """The prompt's token ids. Raises UsageError if the model cannot run the line."""
    assert line.said is not None
    ids = llm.tokenizer.encode(line.prompt) if isinstance(line.prompt, str) else line.prompt
    llm.engine.check(ids, llm.params(**line.said))
    return ids


def _generate(llm: LLM, todo: list[tuple[Line, list[int]]], sink: _Sink) -> int:
    """Write the answers; how many texts ended in an error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    tokens = failed = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("prompts", total=len(todo))

        def write(i: int, completion: Completion) -> None:
            nonlocal tokens, failed
            sink.write(_record(todo[i][0].id, completion))
            tokens += len(completion.token_ids)
            failed += completion.error is not None
            progress.update(task, advance=1, description=f"{tokens} tokens")

        params = [llm.params(**line.said) for line, _ in todo if line.said is not None]
        llm.generate([ids for _, ids in todo], params, on_done=write)
    return failed


def _record(name: str | int, completion: Completion) -> Record:
    texts = [completion, *completion.siblings]
    line: Record = {
        "id": name,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "tokens": len(completion.token_ids),
        "seed": completion.seed,
        "tokens_per_step": round(completion.stats.tokens_per_step, 3),
    }
    if len(texts) > 1:
        line["texts"] = [c.text for c in texts]
    if completion.stats.lossy:
        line["lossy"] = True
    if completion.error is not None:
        line["error"] = completion.error
    if completion.logprobs is not None:
        line["logprobs"] = [[p.token, p.raw, p.top] for p in completion.logprobs]
    return line
