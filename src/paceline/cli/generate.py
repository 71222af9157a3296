"""`paceline generate`: a file of prompts to a file of answers, resumable line by line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from paceline.cli.options import ENGINE, SAMPLING, apply, split
from paceline.core import SamplingParams
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.core import Completion
    from paceline.llm import LLM

Record = dict[str, Any]


@click.command()
@click.argument("source", metavar="IN.jsonl")
@click.option(
    "-o", "--out", required=True, metavar="OUT.jsonl", help="Answers, one line for each prompt as it is done."
)
@click.option(
    "--target", default="demo", show_default=True, help="demo, a folder in Hugging Face layout, or a hub id."
)
@click.option("--overwrite", is_flag=True, help="Begin anew instead of continuing an interrupted OUT.jsonl.")
@apply(ENGINE)
@apply(SAMPLING)
def command(source: str, out: str, target: str, overwrite: bool, **values: Any) -> None:
    """Write the answers to many prompts.

    Each line of IN.jsonl is an object with `prompt` (text or token ids), optionally `id`, and any sampling parameter for
    that line. Lines already in OUT.jsonl are not done again, so an interrupted run is continued by the same command.
    """
    options, params = split(values)
    records = read_prompts(Path(source), params)
    done = set() if overwrite else read_done(Path(out))
    todo = [(record, one) for record, one in records if record["id"] not in done]
    if done:
        click.echo(f"{len(records) - len(todo)} of {len(records)} are done already", err=True)
    if not todo:
        return
    from paceline.llm import LLM
    from paceline.memory import freeze_objects

    llm = LLM(target, say=lambda line: click.echo(line, err=True), **options)
    freeze_objects()
    try:
        with Path(out).open("w" if overwrite else "a", encoding="utf-8") as sink:
            _generate(llm, todo, sink)
    except OSError as error:
        raise UsageError(
            f"cannot write {out} ({error.strerror}): what was written is kept; run again to continue"
        ) from error


def read_prompts(path: Path, params: SamplingParams) -> list[tuple[Record, SamplingParams]]:
    """Records with an id each, and their own parameters. Raises UsageError naming the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror}): give an existing JSONL file") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: convert it first") from error
    names = set(SamplingParams.names()) - {"constraint"}
    base = {name: getattr(params, name) for name in names}
    records: list[tuple[Record, SamplingParams]] = []
    ids: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        record = _parse(line, where)
        record.setdefault("id", number)
        if str(record["id"]) in ids:
            raise UsageError(f"{where}: the id {record['id']!r} was used before: ids must be unique")
        ids.add(str(record["id"]))
        unknown = set(record) - names - {"id", "prompt"}
        if unknown:
            raise UsageError(
                f"{where}: unknown field {sorted(unknown)[0]!r}: use id, prompt and sampling parameters"
            )
        try:
            one = SamplingParams(**(base | {k: v for k, v in record.items() if k in names}))
        except (UsageError, TypeError) as error:
            raise UsageError(f"{where}: {error}") from error
        records.append((record, one))
    if not records:
        raise UsageError(f'{path} has no prompts: write lines like {{"prompt": "def parse("}}')
    return records


def _parse(line: str, where: str) -> Record:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where} is not valid JSON: {error}") from error
    prompt = record.get("prompt") if isinstance(record, dict) else None
    ids = isinstance(prompt, list) and all(isinstance(t, int) for t in prompt)
    if not isinstance(prompt, str) and not ids:
        raise UsageError(f'{where}: give an object with "prompt", a text or a list of token ids')
    bias = record.get("logit_bias")
    if isinstance(bias, dict):
        record["logit_bias"] = {int(k): v for k, v in bias.items() if str(k).lstrip("-").isdigit()}
    return dict(record)


def read_done(path: Path) -> set[Any]:
    """Ids of finished lines. A line cut short by an interruption is removed from the file."""
    if not path.exists():
        return set()
    done: set[Any] = set()
    good = 0
    with path.open("rb+") as file:
        for line in file:
            try:
                done.add(json.loads(line)["id"])
            except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
                if line.endswith(b"\n"):
                    raise UsageError(
                        f"{path} is not an output of this command: name another, or add --overwrite"
                    ) from error
                break
            good += len(line)
        file.truncate(good)
        if good:
            file.seek(good - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")
    return done


def _generate(llm: LLM, todo: list[tuple[Record, SamplingParams]], sink: TextIO) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    tokens = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    from rich.console import Console

    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("prompts", total=len(todo))

        def write(i: int, completion: Completion) -> None:
            nonlocal tokens
            sink.write(json.dumps(_line(todo[i][0], completion), ensure_ascii=False) + "\n")
            sink.flush()
            os.fsync(sink.fileno())
            tokens += len(completion.token_ids)
            progress.update(task, advance=1, description=f"{tokens} tokens")

        llm.generate([record["prompt"] for record, _ in todo], [params for _, params in todo], on_done=write)


def _line(record: Record, completion: Completion) -> Record:
    texts = [completion, *completion.siblings]
    line: Record = {
        "id": record["id"],
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "tokens": len(completion.token_ids),
        "seed": completion.seed,
        "tokens_per_step": round(completion.stats.tokens_per_step, 3),
    }
    if len(texts) > 1:
        line["texts"] = [c.text for c in texts]
    if completion.error is not None:
        line["error"] = completion.error
    if completion.logprobs is not None:
        line["logprobs"] = [[p.token, p.raw, p.top] for p in completion.logprobs]
    return line
