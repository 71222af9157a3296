"""Training texts from files: JSONL of chats or texts, or plain files.

A JSONL line is {"messages": [{"role", "content"}, ...]}, {"conversations": [{"from", "value"}, ...]},
{"prompt": ..., "response" or "completion": ...}, {"text": ...}, or a plain string. In a chat only what the
model wrote counts in the loss and in acceptance, since only that is ever drafted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import UsageError
from paceline.train.windows import Text

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant",
         "system": "system", "developer": "system"}  # fmt: skip
JSON_ENDINGS = (".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class Record:
    """A chat (`messages`) or a text. A `document` came from a plain file: it is divided, never cut."""

    messages: tuple[dict[str, str], ...] = ()
    text: str = ""
    document: bool = False


class Encoder(Protocol):
    """The target's tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain text, with the tokens that a prompt begins with (bos)."""
        ...

    def encode_chat(self, messages: Seq[dict[str, str]], *, generation_prompt: bool) -> list[int]:
        """Token ids of a rendered chat."""
        ...


@dataclass(slots=True)
class DataReport:
    """What was read, and what could not be used."""

    files: dict[str, str] = field(default_factory=dict)  # file -> fingerprint
    records: int = 0
    texts: int = 0
    cut: int = 0  # longer than a window: the rest of them was left out
    cut_tokens: int = 0
    empty: int = 0
    skipped: dict[str, int] = field(default_factory=dict)  # why -> lines
    own: int = 0  # texts that the target wrote itself

    def line(self) -> str:
        parts = [f"{self.records} records, {self.texts} texts"] if self.records or not self.own else []
        parts += [f"{self.own} texts by the target itself" for _ in range(bool(self.own))]
        if self.cut:
            parts.append(
                f"{self.cut} too long (cut, {self.cut_tokens} tokens left out; raise --length to keep them)"
            )
        parts += [f"{count} empty" for count in (self.empty,) if count]
        parts += [f"{count} skipped ({why})" for why, count in self.skipped.items()]
        return ", ".join(parts)


def find_files(paths: Seq[Path]) -> list[Path]:
    """Files under `paths`, sorted; hidden ones are left out. UsageError for a path that is not there."""
    out: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UsageError(f"--data {path} does not exist")
        if path.is_dir():
            files = (p for p in path.rglob("*") if p.is_file())
            out += sorted(
                p for p in files if not any(part.startswith(".") for part in p.relative_to(path).parts)
            )
        else:
            out.append(path)
    return out


def read_records(paths: Seq[Path], report: DataReport) -> list[Record]:
    """All usable records; UsageError when there is none, saying what was found instead."""
    out: list[Record] = []
    for path in find_files(paths):
        try:
            raw = path.read_bytes()
            content = raw.decode("utf-8-sig")
        except UnicodeDecodeError:
            _skip(report, "not UTF-8 text")
            continue
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
        report.files[path.name] = hashlib.sha256(raw).hexdigest()[:16]
        out += (
            _json_records(content, report) if path.suffix in JSON_ENDINGS else _plain_record(content, report)
        )
    if not out:
        raise UsageError(
            f"no usable text in --data: {report.line()}; give JSONL with messages, prompt or text, or plain "
            "files"
        )
    return out


def _skip(report: DataReport, why: str) -> None:
    report.skipped[why] = report.skipped.get(why, 0) + 1


def _plain_record(content: str, report: DataReport) -> list[Record]:
    report.records += 1
    if not content.strip():
        report.empty += 1
        return []
    return [Record(text=content, document=True)]


def _json_records(content: str, report: DataReport) -> Iterator[Record]:
    for line in content.split("\n"):  # not splitlines: a JSON string may hold U+2028
        if not line.strip():
            continue
        report.records += 1
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            _skip(report, "not JSON")
            continue
        record = parse_record(value)
        if record is None:
            _skip(report, "no messages, prompt or text")
        elif not record.messages and not record.text.strip():
            report.empty += 1
        else:
            yield record


def parse_record(value: Any) -> Record | None:
    """A record of one JSON value, None if it has no known shape."""
    if isinstance(value, str):
        return Record(text=value)
    if not isinstance(value, dict):
        return None
    turns = value.get("messages", value.get("conversations"))
    if isinstance(turns, list):
        return _parse_chat(turns)
    if isinstance(value.get("text"), str):
        return Record(text=value["text"])
    answer = value.get("response", value.get("completion"))
    if isinstance(value.get("prompt"), str) and isinstance(answer, (str, type(None))):
        asked = {"role": "user", "content": value["prompt"]}
        return Record(messages=(asked, {"role": "assistant", "content": answer}) if answer else (asked,))
    return None


def _parse_chat(turns: list[Any]) -> Record | None:
    messages: list[dict[str, str]] = []
    for turn in turns:
        if not isinstance(turn, dict):
            return None
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if role not in ROLES or not isinstance(content, str):
            return None
        messages.append({"role": ROLES[role], "content": content})
    return Record(messages=tuple(messages)) if messages else None


def encode_records(records: Seq[Record], encoder: Encoder, length: int, report: DataReport) -> list[Text]:
    """Token texts of at most `length`; records that are longer are cut and counted, documents are divided."""
    out: list[Text] = []
    for record in records:
        if record.document:
            tokens = encoder.encode(record.text)
            out += [whole_text(tokens[i : i + length]) for i in range(0, len(tokens), length)]
            continue
        text = _encode_chat(record, encoder) if record.messages else whole_text(encoder.encode(record.text))
        over = len(text.tokens) - length
        if over > 0:
            report.cut += 1
            report.cut_tokens += over
            spans = tuple((a, min(b, length)) for a, b in text.counted if a < length)
            text = Text(text.tokens[:length], spans)
        out.append(text)
    out = [text for text in out if len(text.tokens) > 2 and text.counted]
    report.texts = len(out)
    if not out:
        raise UsageError(
            f"no usable text in --data: {report.line()}; a text needs an answer or more than two tokens"
        )
    return out


def whole_text(tokens: Seq[int]) -> Text:
    """A text whose every token counts."""
    return Text(tokens, ((0, len(tokens)),))


def _encode_chat(record: Record, encoder: Encoder) -> Text:
    """The rendered chat; what lies between each generation prompt and the end of its answer counts."""
    tokens = encoder.encode_chat(record.messages, generation_prompt=False)
    spans = []
    for i, message in enumerate(record.messages):
        if message["role"] == "assistant" and i:
            before = _common(tokens, encoder.encode_chat(record.messages[:i], generation_prompt=True))
            after = _common(tokens, encoder.encode_chat(record.messages[: i + 1], generation_prompt=False))
            if after > before:
                spans.append((before, after))
    return Text(tokens, tuple(spans))


def _common(a: Seq[int], b: Seq[int]) -> int:
    """Length of the common beginning: templates may render a turn otherwise once others follow."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
