"""The files of `paceline generate`: lines of prompts, each checked by itself, and the answers that are there already.

A JSONL file is split at `\\n` only: other line separators may stand inside a JSON string. A line that cannot be used
becomes a record with its error, so that its neighbours are written.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.cli import openai_batch
from paceline.core import SamplingParams
from paceline.errors import UsageError
from paceline.soft_tokens import Kind

Record = dict[str, Any]
DONE = {"id", "text", "finish_reason", "tokens", "seed", "tokens_per_step"}  # every answer has these fields
MORE = {"texts", "error", "logprobs", "reasoning", "tool_calls", "warnings", "lossy"}  # some have these
REFUSED = {"id", "error", "line"}  # a line that could not be used
_WANTED = {
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "reasoning_effort",
    "chat_template_kwargs",
}  # of an answer, as chat/options.py has them
_MEDIA: Mapping[str, Kind] = {"images": "image", "audio": "audio"}  # fields of a line
BOM = b"\xef\xbb\xbf"
LONGEST_ERROR = 500  # characters: an error quotes what it is about


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the input. Without `said` it cannot be used: `error` says why."""

    number: int  # from 1
    id: str | int
    prompt: str | list[int] = ""
    params: Record | None = (
        None  # sampling parameters of the line and of the command; the rest is the model's own
    )
    error: str | None = None
    media: Mapping[Kind, list[str]] = field(default_factory=dict)  # paths, for the prompt's placeholders
    messages: list[Record] | None = None  # of a chat, in the place of a prompt
    wanted: Record = field(default_factory=dict)  # of an answer: response_format, tools, ...
    batch: bool = False  # a line of OpenAI's batch files, and so is its answer

    def refused(self, error: object) -> Line:
        return Line(self.number, self.id, error=_clean(str(error)), batch=self.batch)

    def record(self) -> Record:
        """What is written for a line that cannot be used."""
        if self.batch:
            return openai_batch.refused(self.id, self.number, self.error)
        return {"id": self.id, "error": self.error, "line": self.number}


def read_lines(source: str, defaults: Record) -> list[Line]:
    """All lines of a file, or of standard input for `-`, that are not blank, each with its own parameters over `said`.

    Raises UsageError without any.
    """
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {source} ({error.strerror}): give an existing JSONL file") from error
    lines = check_lines(data, defaults)
    if not lines:
        named = "standard input" if source == "-" else source
        raise UsageError(f'{named} has no prompts: write lines like {{"prompt": "def parse("}}')
    return lines


def check_lines(data: bytes, defaults: Record) -> list[Line]:
    """The lines of a JSONL text in UTF-8. Whatever is wrong with a line is in its `error`; nothing is raised."""
    lines: list[Line] = []
    seen: set[str] = set()
    for number, line_bytes in enumerate(data.split(b"\n"), 1):
        raw = line_bytes.removeprefix(BOM)  # also in the middle, where files were joined
        if not raw.strip():
            continue
        line = _line(number, raw, defaults)
        if str(line.id) in seen:
            line = line.refused(f"line {number}: the id {line.id!r} was used before: ids must be unique")
        seen.add(str(line.id))
        lines.append(line)
    return lines


def _line(number: int, raw: bytes, base: Record) -> Line:
    line = Line(number, number)
    try:
        record = _parse(raw)
        batch = openai_batch.is_batch(record)
        line = Line(number, _id(record["custom_id"] if batch else record.get("id", number)), batch=batch)
        if batch:
            record = openai_batch.request_of(record)
        messages = _messages(record)
        prompt = _prompt(record) if messages is None else ""
        wanted = {name: value for name, value in record.items() if name in _WANTED}
        if messages is None and (foreign := set(wanted) - {"response_format"}):
            raise UsageError(
                f"{min(foreign)} is for messages: give messages in the place of prompt, or leave it out"
            )
        params = _params(record, base)
        return Line(number, line.id, prompt, params, None, _media(record), messages, wanted, batch)
    except UsageError as error:
        return line.refused(f"line {number}: {error}")


def _parse(raw: bytes) -> Record:
    try:
        record = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError("it is not UTF-8 text: convert the file first") from error
    except RecursionError as error:
        raise UsageError("it is nested too deep: give an object with simple values") from error
    except ValueError as error:  # no JSON, or a number of thousands of digits
        raise UsageError(f"it is not valid JSON ({error}): correct it") from error
    if not isinstance(record, dict):
        raise UsageError('give an object with "prompt", a text or a list of token ids, or with "messages"')
    return record


def _id(value: object) -> str | int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise UsageError("id has to be a text or a whole number: change or remove it")
    if isinstance(value, str):
        _characters("id", value)
    return value


def _characters(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{name} has a lone surrogate, which is no character: remove it") from error


def _prompt(record: Record) -> str | list[int]:
    prompt = record.get("prompt")
    if isinstance(prompt, str):
        _characters("prompt", prompt)
        return prompt
    if isinstance(prompt, list) and all(isinstance(t, int) and not isinstance(t, bool) for t in prompt):
        return prompt
    raise UsageError('give an object with "prompt", a text or a list of token ids, or with "messages"')


def _messages(record: Record) -> list[Record] | None:
    """The conversation of a line; None for one with a prompt. Raises UsageError."""
    messages = record.get("messages")
    if messages is None:
        return None
    if "prompt" in record or any(record.get(name) for name in _MEDIA):
        raise UsageError(
            "messages stand in the place of prompt, images and audio: give pictures as parts of a message"
        )
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(message, dict) for message in messages)
    ):
        raise UsageError('messages has to be a list like [{"role": "user", "content": "..."}]')
    _characters("messages", json.dumps(messages, ensure_ascii=False))
    return messages


def _media(record: Record) -> dict[Kind, list[str]]:
    """Paths of pictures and sound. Raises UsageError."""
    by_kind: dict[Kind, list[str]] = {}
    for name, kind in _MEDIA.items():
        paths = record.get(name)
        if paths is None:
            continue
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise UsageError(f'{name} has to be a list of paths: write "{name}": ["file"]')
        by_kind[kind] = paths
    return by_kind


def _params(record: Record, base: Record) -> Record:
    """What the line and the command say of sampling, checked. Raises UsageError."""
    names = set(SamplingParams.names()) - {"constraint"}
    unknown = sorted(set(record) - names - {"id", "prompt", "messages", *_MEDIA} - _WANTED)
    if unknown:
        raise UsageError(f"unknown field {unknown[0]!r}: use id, prompt or messages, and sampling parameters")
    own = {name: value for name, value in record.items() if name in names}
    if "logit_bias" in own:
        own["logit_bias"] = _bias(own["logit_bias"])
    SamplingParams(**(base | own))
    return base | own


def _bias(value: object) -> Mapping[int, Any]:
    """JSON's keys are texts: token ids again."""
    if not isinstance(value, dict):
        raise UsageError("logit_bias has to be an object of token ids and numbers")
    for key in value:
        if not re.fullmatch(r"[0-9]{1,18}", key):
            raise UsageError(f"logit_bias has the key {key[:40]!r}: give token ids")
    return {int(key): bias for key, bias in value.items()}


def _clean(text: str) -> str:
    """An error as it can be written into a UTF-8 file."""
    return text[:LONGEST_ERROR].encode("utf-8", "backslashreplace").decode("utf-8")


@dataclass(slots=True)
class Answers:
    """What an output holds: the ids that are done, the lines that were refused, and how many bytes are whole lines."""

    done: set[str | int] = field(default_factory=set)
    refused: set[tuple[int, str | int]] = field(default_factory=set)  # (line, id)
    size: int = 0
    unfinished: bool = False  # the last line lacks its line break

    def has(self, line: Line) -> bool:
        """Whether nothing is left to do for a line."""
        return line.id in self.done if line.error is None else (line.number, line.id) in self.refused


def read_answers(path: Path, source: Path, overwrite: bool) -> Answers:
    """What is in the output already; nothing is written. Raises UsageError for a file that is not an output of `source`.

    With `overwrite` only the input itself and what is no ordinary file are refused.
    """
    try:
        mode = path.stat().st_mode
        if source.exists() and os.path.samefile(path, source):
            raise UsageError(f"{path} is the input itself: name another file for the answers")
        if not stat.S_ISREG(mode):
            raise UsageError(f"{path} is not an ordinary file: name a file for the answers")
        return Answers() if overwrite else _answers(path, path.read_bytes())
    except FileNotFoundError:
        return Answers()
    except OSError as error:
        raise UsageError(
            f"cannot read {path} ({error.strerror}): name another file for the answers"
        ) from error


def _answers(path: Path, data: bytes) -> Answers:
    answers = Answers()
    for raw in _split(data):
        record = _own(raw)
        if record is None:
            if raw.endswith(b"\n") or not _begun(raw, bool(answers.size)):
                raise UsageError(
                    f"{path} is not an output of this command: name another, or add --overwrite to replace it"
                )
            break
        if "custom_id" in record:
            if record["error"] is None:
                answers.done.add(record["custom_id"])
            else:
                answers.refused.add((record["error"]["line"], record["custom_id"]))
        elif "finish_reason" in record:
            answers.done.add(record["id"])
        else:
            answers.refused.add((record["line"], record["id"]))
        answers.size += len(raw)
        answers.unfinished = not raw.endswith(b"\n")
    return answers


def _split(data: bytes) -> list[bytes]:
    lines = data.split(b"\n")
    return [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def _own(raw: bytes) -> Record | None:
    """The record of a whole line that this command has written; None for any other."""
    try:
        record = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or isinstance(record.get("id"), bool):
        return None
    names = set(record)
    answer = names >= DONE and names <= DONE | MORE and isinstance(record["text"], str)
    known = answer or (names == REFUSED and isinstance(record["line"], int)) or openai_batch.is_answer(record)
    return record if known and isinstance(record.get("custom_id", record["id"]), str | int) else None


def _begun(raw: bytes, after_others: bool) -> bool:
    """Whether a line without an end is the beginning of one of ours, cut short by an interruption."""
    text = raw.decode("utf-8", "ignore")
    if not text.startswith('{"id": '):
        return after_others and '{"id": '.startswith(text)
    match = re.match(r'\{"id": (?:-?\d+|"(?:[^"\\]|\\.)*")', text)
    if match is None or match.end() == len(text):
        return after_others  # cut within the id
    rest = text[match.end() :]
    return any(
        rest.startswith(key) or (after_others and key.startswith(rest))
        for key in (', "text": "', ', "error": "', ', "custom_id": ')
    )
