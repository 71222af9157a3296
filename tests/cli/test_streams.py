"""Standard streams that are closed, of another encoding, or with a byte order mark."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.options import read_text

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
