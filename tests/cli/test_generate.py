"""`paceline generate`: nobody's file is harmed, and a line that is wrong harms no other."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.test_cli import call
from paceline.cli.lines import LONGEST_ERROR, _begun, check_lines
from paceline.core import SamplingParams

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
GOOD = '{"prompt": "def f(", "max_tokens": 3}\n'
ANSWER = {"id": 7, "text": "x", "finish_reason": "length", "tokens": 3, "seed": 1, "tokens_per_step": 1.0}


def generate(monkeypatch: Patch, source: Path, out: Path, *more: str) -> int:
    return call(monkeypatch, "generate", str(source), "-o", str(out), "--drafter", "none", "-n", "3", *more)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


FOREIGN = {
    "one line without an end": b"my diary",
    "one line": b"my diary\n",
    "JSON of another kind": b'{"id": 1, "prompt": "x"}\n',
    "the same without an end": b'{"id": 1, "prompt": "x"}',
    "cut short": b'{"id": 1, "prompt": "x',
    "an id and no more": b'{"id": 1',
    "ours, then another's": json.dumps(ANSWER).encode() + b"\nmy diary",
    "a line separator within": json.dumps(ANSWER).encode() + b"\n\n\n",
    "a list": b"[1]\n",
    "bytes": bytes(range(256)),
    "nested": b"[" * 100_000,
}


def test_a_folder_that_is_not_there(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(GOOD, encoding="utf-8")
    assert generate(monkeypatch, source, tmp_path / "no" / "out.jsonl") == 2
    assert "check its folder and the disk, then run again" in capsys.readouterr().err


@pytest.mark.parametrize("data", FOREIGN.values(), ids=FOREIGN)
def test_a_file_of_another_kind_is_left_alone(
    data: bytes, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(GOOD, encoding="utf-8")
    out.write_bytes(data)
    assert generate(monkeypatch, source, out) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert out.read_bytes() == data


def test_a_file_of_another_kind_is_replaced_when_told_so(tmp_path: Path, monkeypatch: Patch) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(GOOD, encoding="utf-8")
    out.write_text("my diary", encoding="utf-8")
    assert generate(monkeypatch, source, out, "--overwrite") == 0
    assert [r["id"] for r in records(out)] == [1]


@pytest.mark.parametrize("more", [(), ("--overwrite",)], ids=["", "overwrite"])
@pytest.mark.parametrize("kind", ["same", "symlink", "hard link", "relative"])
def test_the_input_is_never_the_output(
    kind: str, more: tuple[str, ...], tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    source = out = tmp_path / "in.jsonl"
    source.write_text(GOOD, encoding="utf-8")
    if kind == "relative":
        monkeypatch.chdir(tmp_path)
        out = Path("../" + tmp_path.name + "/in.jsonl")
    elif kind != "same":
        out = tmp_path / "other.jsonl"
        out.symlink_to(source) if kind == "symlink" else out.hardlink_to(source)
    assert generate(monkeypatch, source, out, *more) == 2
    assert "the input itself" in capsys.readouterr().err
    assert source.read_text(encoding="utf-8") == GOOD


def test_an_output_cut_short_anywhere_is_continued() -> None:
    line = json.dumps(ANSWER | {"id": 'a "b"'}).encode()
    assert all(_begun(line[:i], True) for i in range(len(line)))
    sure = line.index(b'"text": "') + len(b'"text": "')
    assert all(_begun(line[:i], False) for i in range(sure, len(line)))
    assert not any(_begun(b'{"id": 1, "prompt": "x'[:i], False) for i in range(1, 22))


BAD_OUT = {
    "a folder": "ordinary file",
    "a pipe": "ordinary file",
    "in no folder": "cannot",
    "too long": "cannot",
}


@pytest.mark.parametrize(("kind", "message"), BAD_OUT.items(), ids=BAD_OUT)
def test_an_output_that_is_no_file_is_one_line(
    kind: str, message: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text(GOOD, encoding="utf-8")
    if kind == "a folder":
        out.mkdir()
    elif kind == "a pipe":
        os.mkfifo(out)
    else:
        out = out / "out" if kind == "in no folder" else tmp_path / ("x" * 300)
    assert generate(monkeypatch, source, out) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


BAD_LINES = {
    "{": "line 2: it is not valid JSON",
    '{"text": "x"}': "line 2: give an object",
    "[1]": "line 2: give an object",
    '{"prompt": "x", "temprature": 1}': "unknown field 'temprature'",
    '{"prompt": "x", "temperature": -1}': "line 2: temperature",
    '{"prompt": "x", "temperature": NaN}': "line 2: temperature",
    '{"prompt": "x", "top_k": ' + "9" * 5000 + "}": "line 2: it is not valid JSON",
    '{"prompt": "x", "top_k": 1e400}': "line 2: top_k",
    '{"prompt": "x", "logit_bias": {"' + "9" * 5000 + '": 1}}': "logit_bias has the key",
    '{"prompt": "x", "logit_bias": {"five": 1}}': "logit_bias has the key 'five'",
    '{"prompt": "x", "logit_bias": {"5": "1"}}': "logit_bias[5]",
    '{"prompt": "x", "logit_bias": [5]}': "logit_bias has to be",
    '{"prompt": "x", "logit_bias": {"99999999": 1}}': "logit_bias has token id",
    '{"prompt": "x", "ignore_eos": "no"}': "ignore_eos='no'",
    '{"prompt": "x", "stop": 5}': "stop=5",
    '{"prompt": "x", "stop": [5]}': "stop=[5]",
    '{"prompt": "x", "stop": "\\ud800"}': "lone surrogate",
    '{"prompt": "x", "reference": "\\ud800"}': "lone surrogate",
    '{"prompt": "x", "reference": [[1]]}': "reference=",
    '{"prompt": "x", "allowed_token_ids": [[1]]}': "allowed_token_ids=",
    '{"prompt": "x", "stop_token_ids": "ab"}': "stop_token_ids=",
    '{"prompt": "x", "seed": "1"}': "seed='1'",
    '{"prompt": "x", "drafter": ["ngram"]}': "drafter=",
    '{"prompt": "x", "drafter": "theirs"}': "is not loaded",
    '{"prompt": "\\ud800"}': "prompt has a lone surrogate",
    '{"prompt": [true]}': "give an object",
    '{"prompt": [99999999]}': "token id 99999999",
    '{"prompt": []}': "the prompt is empty",
    '{"prompt": "x", "id": "\\ud800"}': "id has a lone surrogate",
    '{"prompt": "x", "id": [1]}': "id has to be",
    '{"prompt": "x", "id": null}': "id has to be",
    '{"prompt": "x", "id": "first"}': "'first' was used before",
    '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}": "nested too deep",
    '{"prompt": "' + "def " * 600 + '"}': "context holds 256",
}  # fmt: skip


def test_bad_lines_give_records_and_their_neighbours_are_written(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """All of them at once, so that the model is loaded once."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    first = '{"id": "first", "prompt": "def f("}'
    lines = [first, *BAD_LINES, '{"prompt": "last\u2028line", "id": "l\u2028st"}']
    source.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode() + b"\n\xff\n")
    assert generate(monkeypatch, source, out, "--max-model-len", "256") == 2
    err = capsys.readouterr().err
    assert f"{len(BAD_LINES) + 1} of {len(lines) + 1} lines" in err
    assert "Traceback" not in err
    done = records(out)
    assert sorted(r["id"] for r in done if "text" in r) == ["first", "l\u2028st"]
    errors = {r["line"]: r["error"] for r in done if "text" not in r}
    for number, message in enumerate(BAD_LINES.values(), 2):
        assert message.replace("line 2", f"line {number}") in errors.pop(number)
    assert "not UTF-8" in errors.pop(len(lines) + 1)
    assert not errors

    before = out.read_bytes()
    assert generate(monkeypatch, source, out, "--max-model-len", "256") == 2
    capsys.readouterr()
    kept = out.read_bytes()
    assert kept == before, "nothing is said or written twice"

    lines[1] = '{"prompt": "mended"}'
    source.write_text("\n".join(lines), encoding="utf-8")
    assert generate(monkeypatch, source, out, "--max-model-len", "256") == 2
    assert out.read_bytes().startswith(before)
    assert [r["id"] for r in records(out)[len(done) :]] == [2], "the line that was corrected, and no other"


def test_files_that_were_joined_have_marks_within() -> None:
    """`cat a.jsonl b.jsonl` of files with a byte order mark."""
    line = b'\xef\xbb\xbf{"prompt": "x"}\r\n'
    assert [one.error for one in check_lines(line + line + b"\xef\xbb\xbf\n", {})] == [None, None]


def test_a_file_of_bad_lines_needs_no_model(tmp_path: Path, monkeypatch: Patch) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("{\n", encoding="utf-8")
    assert generate(monkeypatch, source, out, "--target", "no/such/model") == 2
    assert [r["line"] for r in records(out)] == [1]


def test_the_target_may_stand_first(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(GOOD, encoding="utf-8")
    more = ("-o", str(out), "--drafter", "none")
    assert call(monkeypatch, "generate", "demo", str(source), *more) == 0
    assert [r["id"] for r in records(out)] == [1]
    assert call(monkeypatch, "generate", "demo", str(source), "--target", "demo", *more) == 2
    assert "once each" in capsys.readouterr().err


@pytest.mark.parametrize("data", [b"", b"\xef\xbb\xbf", b" \n\r\n\t"])
def test_a_file_without_lines_is_refused(
    data: bytes, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    (tmp_path / "in.jsonl").write_bytes(data)
    assert generate(monkeypatch, tmp_path / "in.jsonl", tmp_path / "out.jsonl") == 2
    assert "has no prompts" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from([*SamplingParams.names(), "id", "prompt", "else"])


@settings(max_examples=400, deadline=5000)
@given(st.lists(st.binary(max_size=40) | st.dictionaries(FIELDS, VALUES, max_size=6) | VALUES, max_size=4))
def test_whatever_a_line_holds_is_a_line_or_an_error(values: list[Any]) -> None:
    data = b"\n".join(v if isinstance(v, bytes) else json.dumps(v).encode() for v in values)
    lines = check_lines(data, {})
    assert len(lines) == sum(bool(raw.removeprefix(b"\xef\xbb\xbf").strip()) for raw in data.split(b"\n"))
    for line in lines:
        assert (line.params is None) == (line.error is not None)
        assert len(line.error or "") <= LONGEST_ERROR
        json.dumps(line.record(), ensure_ascii=False).encode()
        assert f"line {line.number}: " in (line.error or f"line {line.number}: ")


TALK = [{"role": "user", "content": "x = 1"}]
AGE = {
    "type": "object",
    "properties": {"age": {"enum": [7]}},
    "required": ["age"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "age", "schema": AGE}}


def batch(name: str, **body: Any) -> dict[str, Any]:
    url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "any", **body}}


def test_chats_forms_and_lines_of_openais_batches(tmp_path: Path, monkeypatch: Patch) -> None:
    """REPORTS4, D9: `messages`, `response_format`, and batch files, answered in their own form."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"id": "talk", "messages": TALK},
        {"id": "form", "prompt": "age: ", "response_format": FORM, "max_tokens": 40},
        {"id": "both", "messages": TALK, "response_format": FORM, "max_tokens": 40},
        batch("b-talk", messages=TALK, max_completion_tokens=4, n=2),
        batch("b-form", messages=TALK, max_tokens=40, response_format=FORM),
        batch("b-text", prompt="def f(", max_tokens=4, user="me", stop=None),
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert generate(monkeypatch, source, out) == 0
    done = {one.get("custom_id", one["id"]): one for one in records(out)}
    assert len(done) == len(lines)
    assert done["talk"]["tokens"] == 3
    assert json.loads(done["form"]["text"]) == json.loads(done["both"]["text"]) == {"age": 7}
    told = done["b-talk"]["response"]
    assert (told["status_code"], done["b-talk"]["error"]) == (200, None)
    body = told["body"]
    assert (body["object"], len(body["choices"])) == ("chat.completion", 2)
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert body["usage"]["completion_tokens"] == 8
    assert json.loads(done["b-form"]["response"]["body"]["choices"][0]["message"]["content"]) == {"age": 7}
    assert done["b-text"]["response"]["body"]["object"] == "text_completion"
    before = out.read_bytes()
    assert generate(monkeypatch, source, out) == 0
    assert out.read_bytes() == before, "an answer that is there was written again"
    out.write_bytes(before[:-20])
    assert generate(monkeypatch, source, out) == 0
    assert len(records(out)) == len(lines)


BAD_CHATS = [
    ({"messages": TALK, "prompt": "x"}, "stand in the place of prompt"),
    ({"messages": []}, "messages has to be a list"),
    ({"messages": [{"role": "user"}]}, "is no message"),
    ({"prompt": "x", "tools": []}, "tools is for messages"),
    ({"messages": TALK, "response_format": {"type": "json_schema"}}, "json_schema: is missing"),
    ({"messages": TALK, "tool_choice": "required"}, "needs tools"),
    (batch("a"), "body has no prompt"),
    (batch("a", messages=TALK, stream=True), "stream"),
    (batch("a", messages=TALK, magic=1), "unknown field 'magic'"),
    (batch("a", messages=TALK) | {"url": "/v1/embeddings"}, "/v1/embeddings"),
    (batch("a", messages=TALK) | {"more": 1}, "unknown field 'more'"),
]


def test_what_is_wrong_with_a_chat_is_its_own_error(tmp_path: Path, monkeypatch: Patch) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [(record | {"custom_id": f"c{i}"} if "body" in record else record | {"id": f"l{i}"})
             for i, (record, _) in enumerate(BAD_CHATS)]  # fmt: skip
    source.write_text("".join(json.dumps(line) + "\n" for line in lines) + GOOD, encoding="utf-8")
    assert generate(monkeypatch, source, out) == 2
    found = {one.get("custom_id", one["id"]): one for one in records(out)}
    assert len(found) == len(BAD_CHATS) + 1
    for i, (record, said) in enumerate(BAD_CHATS):
        if "body" in record:
            assert said in found[f"c{i}"]["error"]["message"]
        else:
            assert said in found[f"l{i}"]["error"]


def test_standard_input_and_output_may_be_the_files(
    tmp_path: Path, monkeypatch: Patch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Nothing is written to a file called -, and what is said goes to standard error."""
    monkeypatch.chdir(tmp_path)
    lines = GOOD + '{"prompt": "class A", "max_tokens": 2, "id": "a"}\n' + "no JSON\n"

    def piped(*args: str) -> int:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
        with open(1, "w", encoding="utf-8", closefd=False) as out:
            monkeypatch.setattr(sys, "stdout", out)
            return call(monkeypatch, "generate", *args, "--drafter", "none")

    assert piped("-", "-o", "-") == 2  # a line is wrong
    shown = capfdbinary.readouterr()
    texts = [json.loads(line) for line in shown.out.splitlines()]
    assert {(line["id"], line.get("tokens")) for line in texts} == {(3, None), (1, 3), ("a", 2)}
    assert b"1 of 3 lines of - cannot be used" in shown.err
    assert not list(tmp_path.iterdir())
    (tmp_path / "in.jsonl").write_text(GOOD)
    assert piped("in.jsonl", "-o", "-") == 0
    assert json.loads(capfdbinary.readouterr().out)["tokens"] == 3
    assert piped("-", "-o", "out.jsonl") == 2
    assert len(records(tmp_path / "out.jsonl")) == 3
    lines = ""
    assert piped("-", "-o", "-") == 2
    assert b"standard input has no prompts" in capfdbinary.readouterr().err
