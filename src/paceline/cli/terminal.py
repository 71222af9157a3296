"""The terminal's side of a conversation: editing, history, paste, colours, and Ctrl-C."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import click

from paceline.cli.conversation import unfinished
from paceline.cli.wrapping import Wrapping
from paceline.cli.writing import Piece, clean, harmless

if TYPE_CHECKING:
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    from paceline.cli.conversation import Conversation

MOST_HISTORY = 2**20  # bytes of the history file; of a larger one the newer half is kept
KEYBOARD = 0  # the file of standard input
_KEYS = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.|.)?")  # arrows and other keys that are no text
STYLES: dict[str, dict[str, Any]] = {
    "draft": {"fg": "green"}, "thought": {"dim": True}, "prompt": {"dim": True}, "note": {"dim": True},
    "error": {"fg": "red"},
}  # fmt: skip


def colours() -> bool:
    """Whether standard output shows colours: a terminal that can, and nobody who objects (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Screen:
    """Shows pieces: the model's text on standard output, lines of ours on standard error."""

    def __init__(self, coloured: bool | None = None) -> None:
        self._coloured = colours() if coloured is None else coloured
        self._terminal = sys.stdout.isatty()
        self._words = Wrapping(lambda: shutil.get_terminal_size().columns, self._painted)
        self._open = False  # the line on standard output is not ended

    def show(self, piece: Piece) -> None:
        if piece.kind in ("note", "error"):
            self.end_line()
            click.echo(self._painted(harmless(piece.text), piece.kind), err=True, color=self._coloured)
            return
        text = harmless(piece.text) if self._terminal else piece.text  # a file gets what the model wrote
        shown = self._words.push(text, piece.kind) if self._terminal else self._painted(text, piece.kind)
        click.echo(shown, nl=False, color=self._coloured)
        sys.stdout.flush()
        self._open = not text.endswith("\n") if text else self._open

    def show_all(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self.show(piece)
        self.end_line()

    def flush(self) -> None:
        """Show the word that waits for its end."""
        click.echo(self._words.end(), nl=False, color=self._coloured)

    def end_line(self) -> None:
        self.flush()
        if self._open:
            click.echo()
        self._open = False

    def _painted(self, text: str, kind: str) -> str:
        style = STYLES.get(kind)
        return click.style(text, **style) if style is not None and self._coloured else text


class Reader(Protocol):
    """Where lines come from."""

    def read(self, offered: str = "") -> str:
        """The next text; `offered` stands there to be edited. EOFError: the input has ended. KeyboardInterrupt: Ctrl-C
        with nothing typed."""
        ...


class PlainReader:
    """Lines as they come, without editing: for dumb terminals, and where the answers go to a file."""

    def read(self, offered: str = "") -> str:
        """Where nothing can be edited, Enter alone takes what is offered."""
        if offered:
            click.echo(f"{offered}\n(Enter takes that)", err=True)
        text = self._line(">>> ") or offered
        while unfinished(text):
            text += "\n" + self._line("... ")
        return text

    def _line(self, prompt: str) -> str:
        click.echo(prompt, nl=False, err=True)
        return input("")


class EditingReader:
    """Editing and history by prompt_toolkit. A paste of several lines is one text, and Enter inside quotes a newline."""

    def __init__(self, history: Path, commands: list[str], status: Callable[[], str]) -> None:
        """`status`: what stands at the foot of the screen."""
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.output import ColorDepth
        from prompt_toolkit.styles import Style

        self._session: PromptSession[str] = PromptSession(
            history=open_history(history),
            key_bindings=_bindings(),
            multiline=True,
            prompt_continuation="... ",
            completer=WordCompleter(commands, sentence=True),
            complete_while_typing=False,
            bottom_toolbar=lambda: harmless(status())[: os.get_terminal_size().columns - 1],
            style=Style([("bottom-toolbar", "noreverse")]),
            color_depth=None if colours() else ColorDepth.DEPTH_1_BIT,
        )

    def read(self, offered: str = "") -> str:
        return self._session.prompt(">>> ", default=offered)


def open_history(path: Path) -> FileHistory:
    """What was entered before, in a file of the user's own. A file that cannot be used is left alone."""
    from prompt_toolkit.history import FileHistory

    class History(FileHistory):
        def load_history_strings(self) -> Iterable[str]:
            try:
                _shorten(path)
                yield from map(clean, super().load_history_strings())
            except OSError:
                return  # a folder, or not ours to read: the session has a history of its own

        def store_string(self, string: str) -> None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(path, os.O_CREAT | os.O_APPEND, 0o600))  # what is asked may be private
                super().store_string(string)
            except OSError:
                return

    return History(str(path))


def _shorten(path: Path) -> None:
    if path.is_file() and path.stat().st_size > MOST_HISTORY:
        data = path.read_bytes()[-MOST_HISTORY // 2 :]
        path.write_bytes(data[data.find(b"\n#") + 1 :])


def _bindings() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.keys import Keys

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if unfinished(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    @keys.add(Keys.BracketedPaste)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text(clean(event.data))

    return keys


def choose_reader(history: Path, conversation: Conversation) -> Reader:
    if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown", ""):
        return PlainReader()
    return EditingReader(history, conversation.commands, lambda: conversation.status)


def converse(conversation: Conversation, reader: Reader, screen: Screen, offered: str = "") -> None:
    """Read and answer until the conversation is left: by its command, Ctrl-D, or Ctrl-C twice with nothing typed.

    `offered` stands in the first line, to be edited; in the later ones what was typed during an answer.
    """
    interrupts = 0
    while not conversation.done:
        try:
            line = reader.read(offered)
        except EOFError:
            return
        except OSError:
            return  # the terminal has gone away
        except KeyboardInterrupt:
            interrupts += 1
            if interrupts > 1:
                return
            screen.show(Piece("Ctrl-C again or Ctrl-D leaves", "note"))
            continue
        interrupts = 0
        with interruptible(conversation), TypedAhead() as typed:
            screen.show_all(conversation.take(line))
        offered = typed.text


class TypedAhead:
    """What is typed during an answer is not mixed into it, and not sent by an Enter in it: afterwards it is `text`."""

    def __init__(self) -> None:
        self.text = ""
        self._before: list[Any] | None = None

    def __enter__(self) -> TypedAhead:
        if os.isatty(KEYBOARD) and find_spec("termios") is not None:
            import termios

            self._before = termios.tcgetattr(KEYBOARD)
            quiet = self._before.copy()
            quiet[3] &= ~(termios.ECHO | termios.ICANON)  # Ctrl-C stays a signal,
            quiet[3] |= termios.NOFLSH  # which throws nothing away
            termios.tcsetattr(KEYBOARD, termios.TCSADRAIN, quiet)
        return self

    def __exit__(self, *what: object) -> None:
        if self._before is None:
            return
        import select
        import termios

        typed = b""
        while select.select([KEYBOARD], [], [], 0)[0] and (more := os.read(KEYBOARD, 4096)):
            typed += more
        self.text = clean(_KEYS.sub("", typed.decode(errors="replace"))).rstrip("\n")
        termios.tcsetattr(KEYBOARD, termios.TCSADRAIN, self._before)


@contextmanager
def interruptible(conversation: Conversation) -> Iterator[None]:
    """Ctrl-C ends the answer after the step that is running; once more, if that does not come, is an exception."""
    asked = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        conversation.stop()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    except KeyboardInterrupt:
        return
    finally:
        signal.signal(signal.SIGINT, before)
