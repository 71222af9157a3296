"""The target as argument or option of every command; `quantize` writes a whole folder or none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cli.test_cli import call
from layouts import write
from paceline.convert import quantized

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
NEEDED = {
    "info": (), "serve": ("--port", "0"), "check": ("--quick",), "bench": ("--quick",),
    "train": ("--data", "x", "--out", "y"),
    "quantize": ("--to", "int8", "--out", "z"), "convert": ("--out", "z"),
}  # fmt: skip


@pytest.mark.parametrize("command", NEEDED)
def test_the_target_is_an_argument_or_an_option(command: str, monkeypatch: Patch, capsys: Capture) -> None:
    """U5: the same name in both places is looked for in the same way; both at once are refused."""
    said = []
    for given in (("no/such/folder",), ("--target", "no/such/folder")):
        assert call(monkeypatch, command, *given, *NEEDED[command]) == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1]
    assert "no/such/folder" in said[0]
    assert call(monkeypatch, command, "a", "--target", "b", *NEEDED[command]) == 2
    assert "the target is given twice, as a and as --target b: give it once" in capsys.readouterr().err


@pytest.mark.parametrize("command", [*NEEDED, "run"])
def test_an_empty_target_is_none_and_not_the_demo(command: str, monkeypatch: Patch, capsys: Capture) -> None:
    """What a script gives whose variable is not set."""
    assert call(monkeypatch, command, *NEEDED.get(command, ("x",)), "--target", "") == 2
    assert "'' is no target: give demo" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "quantize", "convert"])
def test_a_command_that_needs_a_target_says_so(command: str, monkeypatch: Patch, capsys: Capture) -> None:
    assert call(monkeypatch, command, *NEEDED[command]) == 2
    assert "no target is given: name a folder" in capsys.readouterr().err


def quantize(monkeypatch: Patch, out: Path, source: str = "demo") -> int:
    return call(
        monkeypatch, "quantize", "--target", source, "--to", "int8", "--out", str(out), "--tokens", "0"
    )


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        f"sys.argv = ['paceline', 'quantize', 'demo', '--to', 'int8', '--out', {str(tmp_path / 'new')!r}]\n"
        "from paceline.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 4, done.stderr
    assert f"paceline: cannot write {tmp_path / 'new'} (" in done.stderr
    assert "free space or name another folder; nothing is left there" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("exists", [False, True])
def test_ctrl_c_leaves_nothing(exists: bool, tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    """Pressed at the second of two files. A folder that was there stays, empty as it was."""
    out, save, calls = tmp_path / "new", quantized.save_file, []
    if exists:
        out.mkdir()

    def interrupted(tensors: object, path: Path, **more: object) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt
        save(tensors, path, **more)

    monkeypatch.setattr(quantized, "save_file", interrupted)
    assert quantize(monkeypatch, out) == 130
    assert capsys.readouterr().err.strip() == "paceline: interrupted"
    assert out.exists() == exists
    assert not list(tmp_path.rglob("*.*"))
    monkeypatch.setattr(quantized, "save_file", save)
    assert quantize(monkeypatch, out) == 0
    assert (out / "config.json").is_file()


def test_a_gguf_file_is_unpacked_and_quantized(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    """As `smollm2` is one, which the help lists. Nothing but the new folder is left."""
    file, out = tmp_path / "x.gguf", tmp_path / "new"
    assert call(monkeypatch, "convert", "demo", "-o", str(file)) == 0
    assert quantize(monkeypatch, out, str(file)) == 0
    assert "int8" in capsys.readouterr().out
    assert json.loads((out / "config.json").read_text())["paceline_quantization"]["kind"] == "int8"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "x.gguf"]
    assert quantize(monkeypatch, out, str(file)) == 2
    assert "is not empty: name a new folder" in capsys.readouterr().err
    broken = write(tmp_path / "broken.gguf", b"GGUF" + bytes(20))
    assert quantize(monkeypatch, tmp_path / "other", str(broken)) == 3
    assert not (tmp_path / "other").exists()
