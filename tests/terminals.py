"""A command of paceline in a window of tmux: keys go in, the screen comes out."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
SECONDS = 300  # for anything to appear: machines of CI are slow


class Terminal:
    """A command in a window of a tmux server of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = str(folder / "tmux")

    def tmux(self, *args: str, text: str | None = None) -> str:
        command = ["tmux", "-S", self.socket, "-f", os.devnull, *args]
        done = subprocess.run(command, capture_output=True, text=True, input=text, check=True)
        return done.stdout

    def start(self, *args: str, size: tuple[int, int] = (100, 40), **environment: str) -> None:
        """`paceline run` with `args`, until it asks."""
        self.launch("run", *args, size=size, **environment)
        self.wait(">>>")

    def launch(self, *args: str, size: tuple[int, int] = (100, 40), **environment: str) -> None:
        said = {
            "OMP_NUM_THREADS": "2", "XDG_CACHE_HOME": str(self.folder),
            "PACELINE_PROFILE_DIR": os.environ["PACELINE_PROFILE_DIR"],
        } | environment  # fmt: skip
        words = [f"{name}={value}" for name, value in said.items()]
        program = [sys.executable, "-c", "from paceline.cli import main; main()", *args]
        shell = shlex.join(["env", *words, *program]) + "; echo left with $?; sleep 1000"
        width, height = size
        self.socket += "."  # a server that has just been stopped may still hold its own
        self.tmux("new-session", "-d", "-x", str(width), "-y", str(height), shell)

    def keys(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)

    def type(self, text: str) -> None:
        self.tmux("send-keys", "-l", text)

    def paste(self, text: str) -> None:
        self.tmux("load-buffer", "-", text=text)
        self.tmux("paste-buffer", "-p", "-r")  # bracketed, as terminals do it

    def screen(self, colours: bool = False) -> str:
        return self.tmux("capture-pane", "-p", "-J", "-S", "-200", *(["-e"] if colours else []))

    def wait(self, text: str, count: int = 1) -> str:
        """The screen, once `text` stands on it `count` times."""
        return self.wait_for(
            lambda screen: screen.count(text) >= count, f"{text!r} is not there {count} times"
        )

    def wait_for(self, seen: Callable[[str], bool], otherwise: str = "it is not seen") -> str:
        end = time.monotonic() + SECONDS
        while not seen(screen := self.screen()):
            assert time.monotonic() < end, f"{otherwise}: {screen[-2000:]}"
            time.sleep(0.1)
        return screen

    def stop(self) -> None:
        subprocess.run(["tmux", "-S", self.socket, "kill-server"], capture_output=True, check=False)
