"""The conversation in a real terminal (tmux): keys, pastes and Ctrl-C as a person presses them. And its history file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.cli.terminal import MOST_HISTORY, open_history
from terminals import SECONDS, Terminal, needs_tmux


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    made = Terminal(tmp_path)
    yield made
    made.stop()


CHAT = ("demo", "--chat", "-n", "6", "--max-model-len", "512")


@needs_tmux
def test_a_line_is_edited_with_the_arrows_and_commands_completed(terminal: Terminal) -> None:
    terminal.start(*CHAT)
    terminal.type("/sew temperature 0.5")
    terminal.keys("Home", "Right", "Right", "Right", "DC")
    terminal.type("t")
    terminal.keys("End", "BSpace")
    terminal.type("7")
    terminal.keys("Enter")
    assert "^[[" not in terminal.wait("temperature = 0.7")
    terminal.keys("Enter", "Enter")  # empty lines do nothing
    terminal.wait(">>>", 4)  # what is typed between two prompts is echoed by the terminal itself
    terminal.type("/bo")
    terminal.keys("BSpace")
    terminal.type("y")
    terminal.keys("Tab")
    terminal.wait("/bye")
    terminal.keys("Enter")
    assert terminal.wait("left with 0")


@needs_tmux
def test_a_paste_of_several_lines_is_one_text(terminal: Terminal) -> None:
    terminal.start(*CHAT)
    terminal.paste("def f(x):\n    return x\n\x1b[31m\x07\nprint(f(1))")
    terminal.wait("print(f(1))")
    terminal.keys("Enter")
    terminal.wait("stopped at max_tokens=6")
    terminal.wait(">>>", 2)  # what is typed before it would be offered, and wait for an Enter of its own
    terminal.type('"""one')
    terminal.keys("Enter")
    terminal.wait("... ")
    terminal.type('two"""')
    terminal.keys("Enter")
    terminal.wait("stopped at max_tokens=6", 2)
    terminal.wait(">>>", 3)
    saved = terminal.folder / "talk.json"
    terminal.type(f"/save {saved}")
    terminal.keys("Enter")
    terminal.wait("4 messages are in")
    text = saved.read_text(encoding="utf-8")
    assert r"def f(x):\n    return x\n[31m\n" in text
    assert r'"one\ntwo"' in text


@needs_tmux
def test_ctrl_c_ends_the_answer_only_and_twice_at_the_prompt_leaves(terminal: Terminal) -> None:
    terminal.start("demo", "--chat", "--ignore-eos", "--drafter", "none")
    terminal.type("x = 1")
    terminal.keys("Enter")
    terminal.wait_for(lambda screen: bool(screen.partition(">>> x = 1")[2].strip()))  # the answer has begun
    terminal.keys("C-c")
    screen = terminal.wait("stopped")
    assert "Traceback" not in screen
    terminal.wait(">>>", 2)
    terminal.type("/show")
    terminal.keys("Enter")
    assert "2 messages" in terminal.wait("messages; ")
    terminal.wait(">>>", 3)
    terminal.type("half a line")
    terminal.keys("C-c")  # clears the line
    terminal.keys("C-c")
    terminal.wait("Ctrl-C again or Ctrl-D leaves")
    terminal.type("/stats")
    terminal.keys("Enter")
    terminal.wait("no answer has been written")
    terminal.wait(">>>", 5)
    terminal.keys("C-c")
    terminal.wait("Ctrl-C again or Ctrl-D leaves", 2)
    terminal.keys("C-c")
    assert "Traceback" not in terminal.wait("left with 0")


@needs_tmux
def test_what_is_typed_during_an_answer_is_offered_and_not_sent(terminal: Terminal) -> None:
    terminal.start("demo", "--chat", "--ignore-eos", "--drafter", "none")
    terminal.type("x = 1")
    terminal.keys("Enter")
    terminal.wait_for(lambda screen: bool(screen.partition(">>> x = 1")[2].strip()))
    terminal.type("/show")
    terminal.keys("Enter", "Left")  # an arrow is no text
    terminal.keys("C-c")
    screen = terminal.wait(">>> /show")
    assert "messages; " not in screen
    terminal.keys("Enter")
    terminal.wait("2 messages; ")


@needs_tmux
def test_history_is_there_at_the_next_start(terminal: Terminal) -> None:
    terminal.start(*CHAT)
    terminal.type("/set top_k 17")
    terminal.keys("Enter")
    terminal.wait("top_k = 17")
    terminal.wait(">>>", 2)
    terminal.keys("C-d")
    terminal.wait("left with 0")
    terminal.stop()
    assert (terminal.folder / "paceline" / "history").stat().st_mode & 0o077 == 0
    terminal.start(*CHAT)
    terminal.keys("Up")
    terminal.wait("/set top_k 17")
    terminal.keys("Enter")
    terminal.wait("top_k = 17")


@needs_tmux
@pytest.mark.parametrize(
    "variable", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {}], ids=["no colour", "dumb", "colours"]
)
def test_narrow_dumb_and_colourless_terminals(variable: dict[str, str], terminal: Terminal) -> None:
    terminal.start("demo", "--show-drafts", "-n", "40", "--draft-tokens", "4", size=(24, 60), **variable)
    terminal.type("def parse(text, more):")  # longer than the line
    terminal.keys("Enter")
    terminal.wait(">>>", 2)
    assert ("\x1b[32m" in terminal.screen(colours=True)) == (not variable)
    assert ("Colours are off" in terminal.screen().replace("\n", "")) == bool(variable)
    terminal.keys("C-d")
    terminal.wait("left with 0")


@needs_tmux
def test_a_terminal_that_goes_away_ends_the_program(terminal: Terminal) -> None:
    terminal.start(*CHAT)
    pid = int(terminal.tmux("display-message", "-p", "#{pane_pid}"))
    children = Path(f"/proc/{pid}/task/{pid}/children")
    if not children.exists():
        pytest.skip("needs /proc")
    (child,) = map(int, children.read_text(encoding="ascii").split())
    terminal.stop()
    end = time.monotonic() + SECONDS
    while Path(f"/proc/{child}").exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert not Path(f"/proc/{child}").exists()


@pytest.mark.parametrize("what", ["absent", "garbage", "folder", "unreadable", "huge"])
def test_a_broken_history_file_does_no_harm(what: str, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "history"
    if what != "absent":
        path.parent.mkdir()
    if what == "garbage":
        path.write_bytes(bytes(range(256)) * 50 + b"\n+\x1b[2Jls\xff\n")
    elif what == "folder":
        path.mkdir()
    elif what == "unreadable":
        path.symlink_to(path)
    elif what == "huge":
        path.write_text("\n# now\n+line\n" * (MOST_HISTORY // 10), encoding="utf-8")
    history = open_history(path)
    before = list(history.load_history_strings())
    assert all("\x1b" not in line for line in before)
    history.append_string("new")
    assert history.get_strings()[-1] == "new"
    if what in ("absent", "garbage", "huge"):
        assert next(iter(open_history(path).load_history_strings())) == "new"
    if what == "huge":
        assert path.stat().st_size < MOST_HISTORY
        assert before[0] == "line"
