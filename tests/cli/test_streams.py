"""Standard streams that are closed, of another encoding, or with a byte order mark."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.audit import _key
from paceline.cli.lines import check_lines
from paceline.cli.options import json_line, read_text
from paceline.server.security import Keys
from paceline.server.settings import read_config
from paceline.train.data import DataReport, read_records

MAIN = "import sys; sys.argv[0] = 'paceline'; from paceline.cli import main; main()"
SAYS = "import paceline.cli as c, click; c._fit_streams(); click.echo('# 日本 😀'); click.echo('é', err=True)"


def shell(code: str, end: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    command = f'"{sys.executable}" -c "$CODE" {end}'
    return subprocess.run(
        ["sh", "-c", command], capture_output=True, env={**os.environ, "CODE": code, **env}, check=False
    )


def test_an_encoding_without_the_character_shows_a_question_mark() -> None:
    done = shell(SAYS, "", PYTHONIOENCODING="cp1252")
    assert (done.returncode, done.stdout.strip(), done.stderr.strip()) == (0, b"# ?? ?", b"\xe9")
    done = shell(SAYS, "", PYTHONIOENCODING="utf-8")
    assert done.stdout.decode().strip() == "# 日本 😀"


@pytest.mark.parametrize(
    ("end", "says"),
    [("run demo <&-", b"standard input is empty"), ("run demo hi >&-", b"standard output is closed")],
)
def test_a_closed_stream_is_one_line(end: str, says: bytes) -> None:
    done = shell(MAIN, end)
    assert done.returncode not in (0, 1)
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert b"Traceback" not in done.stderr


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbfhello \xef\xbb\xbf")
    assert read_text(str(file)) == "hello \ufeff"
    with file.open(encoding="utf-8") as stream:
        monkeypatch.setattr("sys.stdin", stream)
        assert read_text("-") == "hello \ufeff"


def test_json_loses_no_character_to_an_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding, written in (("cp1252", '{"text": "\\u65e5\\ud83d\\ude00"}'), ("utf-8", '{"text": "日😀"}')):
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding))
        assert json_line({"text": "日😀"}) == written


def test_a_byte_order_mark_is_no_part_of_any_file_that_a_command_reads(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    keys = tmp_path / "keys"
    keys.write_bytes(mark + b"sk-1\n")
    assert _key(None, str(keys)) == "sk-1"
    assert Keys.read(str(keys)).find("Bearer sk-1") is not None
    config = tmp_path / "paceline.toml"
    config.write_bytes(mark + b"[server]\nport = 8123\n")
    assert read_config(config) == ({"port": 8123}, {})
    for name, content in (("a.jsonl", b'{"text": "abc"}\n'), ("b.txt", b"abc")):
        (tmp_path / name).write_bytes(mark + content)
        (record,) = read_records([tmp_path / name], DataReport())
        assert record.text == "abc"
    prompts = mark + b'{"prompt": "a"}\n' + mark + b'{"prompt": "b"}\n'
    assert [(one.error, one.prompt) for one in check_lines(prompts, {})] == [(None, "a"), (None, "b")]
