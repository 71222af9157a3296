"""A conversation with a model, without any terminal: lines go in, pieces of text come out."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.attached import Attachment, attach, content, files_in, typed_path
from paceline.cli.turns import Message, Turns, checked
from paceline.cli.writing import LOSSY, Painter, Piece, clean, short_name, stats_lines, status_line, why
from paceline.core import SamplingParams
from paceline.errors import PacelineError, UsageError
from paceline.options import rows_of

if TYPE_CHECKING:
    from paceline.cli.loaded import Loaded
    from paceline.core import Delta, Stats
    from paceline.llm import LLM
    from paceline.soft_tokens import Kind

QUOTES = '"""'
SETTINGS = sorted({row.name for row in rows_of(SamplingParams, "run")} | {"drafter", "draft_tokens"})
_COMMAND = re.compile(r"/([a-z?]+)(?:\s+(.*))?", re.DOTALL)
_KIND = "paceline conversation"  # written into saved files, so that no other file is replaced or read as one

HELP = {
    "/new": "begin anew; the system prompt stays (also /clear)",
    "/system TEXT": 'set the system prompt; /system "" removes it, /system shows it',
    "/set NAME VALUE": "change a sampling setting, e.g. /set temperature 0.7; without VALUE the model's own",
    "/show": "the model, the settings, how full the context is",
    "/model NAME": "go on with another model; without NAME what there is",
    "/drafter NAME": "let another drafter draft, none or auto; without NAME what there is",
    "/stats": "how fast the last answer was; /stats on and /stats off: after every answer",
    "/image PATH": "show a picture with the next message; a path in a message does the same (also /audio PATH)",
    "/drop": "take back what is attached to the next message",
    "/drafts": "colour the tokens that were drafted, or no longer",
    "/save FILE": "write the conversation to a file",
    "/load FILE": "go on with a saved conversation",
    "/exit": "leave (also /bye, Ctrl-D, Ctrl-C twice)",
    QUOTES: f"begins a text of several lines, which ends with {QUOTES}",
}
ALSO = {"clear": "new", "bye": "exit", "quit": "exit", "?": "help"}


def unfinished(text: str) -> bool:
    """Whether the text has begun with three quotes and not ended with them."""
    begun = text.lstrip()
    return begun.startswith(QUOTES) and QUOTES not in begun[len(QUOTES) :]


def quoted(text: str) -> str:
    """What stands between the quotes, without the line breaks that only set them apart."""
    return text.strip().removeprefix(QUOTES).removesuffix(QUOTES).removeprefix("\n").removesuffix("\n")


class Conversation:
    """What is entered goes to `take`. `chat`: turns by the model's template; else each text is continued on its own."""

    def __init__(
        self, llm: LLM, options: dict[str, Any], *, chat: bool, system: str | None = None, drafts: bool = False,
        refuse: bool = False, loaded: Loaded | None = None,
    ) -> None:  # fmt: skip
        """`said`: sampling settings of the command line. `loaded`: what can load another model in the place of `llm`.
        Raises UsageError for a system prompt that cannot be."""
        self.llm, self.options, self.chat, self.drafts = llm, dict(options), chat, drafts
        self.done = self.always_stats = False
        self.stats: Stats | None = None
        self._loaded, self._refuse = loaded, refuse
        self.turns = Turns(llm, refuse=refuse)
        self.attached: list[Attachment] = []  # to the next message
        self._stop = False
        self._file: Path | None = None  # what this conversation was saved to or loaded from
        self._asked: Path | None = None  # what /save has asked about
        self._commands: dict[str, Callable[[str], Iterator[Piece]]] = {
            "help": self._help, "new": self._new, "system": self._system, "set": self._set, "show": self._show,
            "stats": self._stats, "drafts": self._drafts, "save": self._save, "load": self._load, "exit": self._exit,
            "image": self._image, "audio": self._audio, "drop": self._drop, "model": self._model,
            "drafter": self._drafter,
        }  # fmt: skip
        if system:
            self._use_system(system)

    @property
    def commands(self) -> list[str]:
        return [f"/{name}" for name in (*self._commands, *ALSO) if name != "?"]

    @property
    def status(self) -> str:
        """One line for the foot of the screen: the model, and what the last answer was like."""
        model = f"{short_name(str(self.llm.info['target']))}, {self.llm.info['drafter']}"
        used = f"{self.turns.used} of {self.llm.engine.max_len} tokens" if self.chat else ""
        parts = [model, None if self.stats is None else status_line(self.stats), used]
        return " · ".join(part for part in parts if part)

    def stop(self) -> None:
        """End the answer that is being written, after the step that is running. From any thread or a signal handler."""
        self._stop = True

    def take(self, line: str) -> Iterator[Piece]:
        """What an entered text brings: an answer as it is written, or what a command says. Errors are pieces, too."""
        text = clean(line)
        match = _COMMAND.fullmatch(text.strip())
        if text.lstrip().startswith(QUOTES):
            text, match = quoted(text), None
        try:
            if match is not None:
                yield from self._command(match[1], (match[2] or "").strip())
            elif text.strip():
                text = yield from self._taken(text)
                if text:
                    with closing(self._answer(text)) as pieces:
                        yield from pieces
        except PacelineError as error:
            yield Piece(str(error), "error")

    def _command(self, name: str, rest: str) -> Iterator[Piece]:
        run = self._commands.get(ALSO.get(name, name))
        if run is not None:
            return run(rest)
        near = difflib.get_close_matches(name, [*self._commands, *ALSO], 1)
        hint = f"did you mean /{near[0]}?" if near else "/help says what there is"
        raise UsageError(f"no such command /{name}: {hint}")

    def _taken(self, text: str) -> Generator[Piece, None, str]:
        """The text without the paths in it, whose files are attached. Files alone wait for the next message."""
        rest, files, missing = files_in(text) if self.chat else (text, [], [])
        if files and self.llm.reader is None:
            yield Piece(f"{Path(files[0]).name} stays text: this model reads text only", "note")
            return text
        for path in files:
            yield self.attach(path)
        for path in missing:
            yield Piece(f"there is no file {path}: it stays text", "note")
        return rest

    def attach(self, path: str, kind: Kind | None = None) -> Piece:
        """Show a file with the next message. Raises UsageError for one that cannot be read."""
        self._need_chat("a picture")
        self.attached.append(attach(self.llm.reader, path, kind))
        return Piece(str(self.attached[-1]), "note")

    def _answer(self, text: str) -> Generator[Piece]:
        self._stop = False
        context, turn, ids = self.llm.engine.max_len, None, list[int]()
        if self.chat:
            question = content(text, self.attached)
            asked = self.turns.prompt(question, self.options.get("max_tokens"))
            if asked.dropped:
                yield Piece(
                    f"the context of {context} tokens is full: the model no longer sees the oldest {asked.dropped} "
                    "messages",
                    "note",
                )
            yield from (Piece(change, "note") for change in asked.prompt.changes)
            ids = asked.prompt.ids
        else:
            ids = self.llm.tokenizer.encode(text)
        room = max(context - len(ids), 1)
        params = self.llm.params(**(({"max_tokens": room} if self.chat else {}) | self.options))
        if self.chat:
            turn = self.llm.chats.turn(asked.asked, asked.prompt, params, self.llm.grammars)
            params = turn.params
        painter = Painter(self.llm, params, turn, drafts=self.drafts)
        tokens: list[int] = []
        last: Delta | None = None
        try:
            with closing(self.llm.stream(ids, params)) as stream:  # type: ignore[type-var]
                for last in stream:
                    tokens += last.token_ids
                    yield from painter.push(last)
                    if self._stop:
                        break
        finally:
            if self.chat and tokens:
                self.turns.add(question, painter.answered, asked.prompt, tokens)
                self.attached = []
        yield from self._end(
            last,
            why(
                None if last is None else last.finish_reason,
                params.max_tokens,
                room,
                context,
                "/set max_tokens",
            ),
        )

    def _end(self, last: Delta | None, cut: str | None) -> Iterator[Piece]:
        """Why an answer ended, if not by itself, and what it took."""
        if last is not None and last.error is not None:
            yield Piece(last.error, "error")
        elif last is None or last.finish_reason is None:
            cut = "stopped"
        if cut is not None:
            yield Piece(cut, "note")
        self.stats = None if last is None else last.stats
        if self.stats is not None and self.stats.lossy:
            yield Piece(LOSSY, "note")
        if self.always_stats and self.stats is not None:
            yield Piece("\n".join(stats_lines(self.stats)), "note")

    def _need_chat(self, what: str) -> None:
        """Raises UsageError."""
        if not self.chat:
            raise UsageError(f"{what} needs a chat model, or --chat: here every text is continued on its own")

    # Commands

    def _help(self, rest: str) -> Iterator[Piece]:
        width = max(map(len, HELP)) + 2
        yield Piece("\n".join(f"{name:{width}}{what}" for name, what in HELP.items()), "note")

    def _image(self, rest: str) -> Iterator[Piece]:
        yield self.attach(typed_path(rest, "/image"), "image")

    def _audio(self, rest: str) -> Iterator[Piece]:
        yield self.attach(typed_path(rest, "/audio"), "audio")

    def _drop(self, rest: str) -> Iterator[Piece]:
        count, self.attached = len(self.attached), []
        yield Piece(f"{count} files are taken back" if count else "nothing is attached", "note")

    def _new(self, rest: str) -> Iterator[Piece]:
        self.turns.clear()
        self.attached, self._file = [], None
        yield Piece("a new conversation", "note")

    def _system(self, rest: str) -> Iterator[Piece]:
        if rest:
            self._use_system(rest)
        shown = self.turns.system
        yield Piece(f"system prompt: {shown}" if shown else "there is no system prompt", "note")

    def _use_system(self, text: str) -> None:
        self._need_chat("a system prompt")
        text = clean(text).strip().removeprefix(QUOTES).removesuffix(QUOTES).strip()
        wanted = None if text in ('""', "''", "") else text
        self.turns.check(wanted)
        self.turns.system = wanted

    def _set(self, rest: str) -> Iterator[Piece]:
        name, _, value = rest.partition(" ")
        name = name.replace("-", "_")
        if name and name not in SETTINGS:
            near = difflib.get_close_matches(name, SETTINGS, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(SETTINGS)}"
            raise UsageError(f"unknown setting {name!r}: {hint}")
        if name:
            others = {key: old for key, old in self.options.items() if key != name}
            if value.strip():
                others[name] = _value(value.strip(), name)
            self.llm.engine.check([0], self.llm.params(**({"max_tokens": 1} | others)))
            self.options = others
        yield Piece(self._settings(), "note")

    def _settings(self) -> str:
        own = dict(self.llm.info.get("sampling", {}))
        lines = [f"{name} = {value}" for name, value in self.options.items()]
        lines += [
            f"{name} = {value} (the model's own)" for name, value in own.items() if name not in self.options
        ]
        return "\n".join(lines) or "greedy: the most likely token each time; no setting is changed"

    def _show(self, rest: str) -> Iterator[Piece]:
        turns = self.turns
        lines = [repr(self.llm), self._settings()]
        if self.chat:
            lines.append(f"system prompt: {turns.system}" if turns.system else "there is no system prompt")
            left_out = f", the oldest {turns.first} no longer seen" if turns.first else ""
            lines.append(
                f"{len(turns.messages)} messages{left_out}; {turns.used} of {self.llm.engine.max_len} tokens used"
            )
        yield Piece("\n".join(lines), "note")

    def _stats(self, rest: str) -> Iterator[Piece]:
        if rest in ("on", "off"):
            self.always_stats = rest == "on"
            yield Piece(f"statistics after every answer: {rest}", "note")
        elif rest:
            raise UsageError(f"/stats {rest} means nothing: type /stats, /stats on or /stats off")
        else:
            lines = None if self.stats is None else stats_lines(self.stats)
            yield Piece("\n".join(lines or ["no answer has been written to its end yet"]), "note")

    def _drafts(self, rest: str) -> Iterator[Piece]:
        self.drafts = not self.drafts
        yield Piece(
            f"tokens that were drafted are {'coloured' if self.drafts else 'shown as the others'}", "note"
        )

    def _save(self, rest: str) -> Iterator[Piece]:
        path = _path(rest, "/save")
        if path.exists() and _read(path) is None:
            raise UsageError(f"{path} exists and is no saved conversation: choose another name")
        if path.exists() and path.resolve() not in (self._file, self._asked):
            self._asked = path.resolve()
            yield Piece(f"{path} holds another conversation: the same command once more replaces it", "note")
            return
        saved = {
            "kind": _KIND, "target": self.llm.info["target"], "system": self.turns.system, "settings": self.options,
            "messages": self.turns.messages,
        }  # fmt: skip
        beside = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            beside.write_text(json.dumps(saved, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
            beside.replace(path)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise UsageError(f"cannot write {path} ({error.strerror}): choose another place") from error
        self._file, self._asked = path.resolve(), None
        yield Piece(f"{len(self.turns.messages)} messages are in {path}", "note")

    def _load(self, rest: str) -> Iterator[Piece]:
        path = _path(rest, "/load")
        if not path.exists():
            raise UsageError(f"there is no file {path}: give one that /save has written")
        saved = _read(path)
        messages = None if saved is None else checked(saved.get("messages"))
        system = None if saved is None else saved.get("system")
        if saved is None or messages is None or not isinstance(system, str | None):
            raise UsageError(f"{path} is no saved conversation: give a file that /save has written")
        self._need_chat("a conversation")
        settings = saved.get("settings")
        options = {k: v for k, v in settings.items() if k in SETTINGS} if isinstance(settings, dict) else {}
        self.llm.params(**options)
        self.turns.check(system)
        self.turns.replace(system, messages)
        self.options, self._file = options, path.resolve()
        yield from (Piece(_shown(message), "note") for message in messages)
        yield Piece(f"{len(messages)} messages are read from {path}", "note")

    def _model(self, rest: str) -> Iterator[Piece]:
        if not rest:
            from paceline.cli.models_here import found_here

            named = [entry.target for entry in found_here() if entry.role == "target" and entry.why is None]
            yield Piece(f"now {self._now()}; here are {', '.join(named)}, or any folder or hub id", "note")
            return
        yield from self._change(rest, None)

    def _drafter(self, rest: str) -> Iterator[Piece]:
        there = self.llm.engine.drafter_names
        if not rest:
            yield Piece(
                f"now {self.options.get('drafter', self.llm.info['drafter'])}; loaded are {', '.join(there)}; "
                "/drafter auto "
                "is the one that fits, and a folder or hub id is loaded",
                "note",
            )
        elif rest in there:  # loaded already: a setting of the next answers
            self.options = self.options | {"drafter": rest}
            yield Piece(f"the next answers are drafted by {rest}", "note")
        else:
            yield from self._change(None, None if rest == "auto" else rest)

    def _now(self) -> str:
        return short_name(str(self.llm.info["target"]))

    def _change(self, target: str | None, drafter: str | None) -> Iterator[Piece]:
        """Go on with another model, or another drafter of this one; the messages stay. Raises what loading raises, and
        then all is as before."""
        if self._loaded is None:
            raise UsageError("this conversation cannot load another model: start `paceline run` with it")
        try:
            self._loaded.change(target or self._loaded.target, drafter)
        finally:
            before, self.llm = self.turns, self._loaded.llm
            self.turns = Turns(self.llm, refuse=self._refuse)
            self.turns.replace(before.system, before.messages)
            self.options = {name: value for name, value in self.options.items() if name != "drafter"}
            self.attached, self.stats = [], None
        if target is not None:
            self.chat = bool(self.llm.info["chat"])
        what = "" if self.chat else "; it does not chat: each text is continued on its own"
        yield Piece(f"now {self._now()}, drafted by {self.llm.info['drafter']}{what}", "note")

    def _exit(self, rest: str) -> Iterator[Piece]:
        self.done = True
        return iter(())


def _value(text: str, name: str) -> Any:
    """A setting as it is typed: a number, true or false, JSON, else the text itself."""
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    except RecursionError as error:
        raise UsageError(f"{name} cannot be nested like that: give a plain value") from error
    return (
        value
        if name != "stop" or isinstance(value, list)
        else (text if isinstance(value, int | float) else value)
    )


def _shown(message: Message) -> str:
    """A message of a saved conversation for a reader; of pictures and sound their kind."""
    text, mark = message["content"], ">>> " if message["role"] == "user" else ""
    parts = [text] if isinstance(text, str) else [part.get("text", f"[{part['type']}]") for part in text]
    return mark + " ".join(parts)


def _path(text: str, command: str) -> Path:
    if not text:
        raise UsageError(f"{command} needs the name of a file: {command} talk.json")
    return Path(os.path.expanduser(text))


def _read(path: Path) -> dict[str, Any] | None:
    """A saved conversation, None if the file is something else. Raises UsageError if it cannot be read."""
    from paceline.files import read_json

    try:
        content = read_json(path)
    except PacelineError as error:
        if path.is_file():
            return None
        raise UsageError(f"cannot read {path}: {error}") from error
    return content if isinstance(content, dict) and content.get("kind") == _KIND else None
