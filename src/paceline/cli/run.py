"""`paceline run`: one text, or an interactive session."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import ENGINE, SAMPLING, apply, read_text, split
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.core import Delta, Stats
    from paceline.llm import LLM


@click.command()
@click.argument("words", nargs=-1, metavar="[TARGET] [PROMPT]")
@click.option("--target", help="demo, a folder in Hugging Face layout, or a hub id.  [default: demo]")
@click.option("--file", "-f", "file", help="Read the prompt from a file (- for standard input).")
@click.option("--chat/--no-chat", default=False, help="Put the prompt into the model's chat template.")
@click.option("--stats", is_flag=True, help="Afterwards: tokens/s, tokens per step, acceptance by position.")
@click.option(
    "--show-drafts",
    is_flag=True,
    help="Colour each token: green was drafted and kept, plain is the target's own.",
)
@apply(ENGINE)
@apply(SAMPLING)
def command(
    words: tuple[str, ...],
    target: str | None,
    file: str | None,
    chat: bool,
    stats: bool,
    show_drafts: bool,
    **values: Any,
) -> None:
    """Continue PROMPT with the target, speculated by its drafter. Without one: an interactive session.

    What is piped into it is one prompt, all of it, unless PROMPT or -f FILE is given.

    \b
    paceline run "def parse(" --stats --show-drafts
    paceline run ./gemma-4-E2B-it --chat "Why is the sky blue?" -t 0.8
    git diff | paceline run --drafter ngram
    """
    options, said = split(values)
    target, prompt = _target_and_prompt(words, target)
    if prompt is not None and file is not None:
        raise click.UsageError("give either PROMPT or --file, not both")
    if file is not None:
        prompt = read_text(file)
    elif prompt is None and not sys.stdin.isatty():
        prompt = read_text("-")
        if not prompt:
            raise UsageError("standard input is empty: give PROMPT or -f FILE, or start it in a terminal")
    from paceline.llm import LLM

    llm = LLM(target, say=lambda line: click.echo(line, err=True), **options)
    if prompt is not None:
        _write(llm, _wrap(llm, prompt, chat), said, (stats, show_drafts, True))
        return
    click.echo("Type a prompt and press Enter; an empty line or Ctrl-D ends the session.", err=True)
    while True:
        try:
            line = input("\n> ")
        except EOFError:
            return
        if not line.strip():
            return
        _write(llm, _wrap(llm, line, chat), said, (stats, show_drafts, False))


def _target_and_prompt(words: tuple[str, ...], target: str | None) -> tuple[str, str | None]:
    """One word is the prompt, two are the target and the prompt. Raises UsageError for more."""
    if len(words) > 2 or (len(words) == 2 and target is not None):
        raise click.UsageError("give TARGET and PROMPT once each, and a prompt of several words in quotes")
    if len(words) == 2:
        return words[0], words[1]
    return target or "demo", words[0] if words else None


def _wrap(llm: LLM, prompt: str, chat: bool) -> str | list[int]:
    if not chat:
        return prompt
    from paceline.text.chat import ChatTemplate

    template = ChatTemplate.of(llm.tokenizer)
    return llm.tokenizer.encode(template.render([{"role": "user", "content": prompt}]), add_bos=False)


def _write(llm: LLM, prompt: str | list[int], said: dict[str, Any], show: tuple[bool, bool, bool]) -> None:
    """Stream one text to standard output; Ctrl-C ends it cleanly. A chat (token ids) may be as long as the context."""
    stats, drafts, echo = show
    ids = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    room = max(llm.engine.max_len - len(ids), 1)
    params = llm.params(**(({} if isinstance(prompt, str) else {"max_tokens": room}) | said))
    if echo and isinstance(prompt, str):
        click.echo(click.style(prompt, dim=True) if drafts else prompt, nl=False)
    last: Delta | None = None
    stream = llm.stream(ids, params)
    try:
        for delta in stream:
            last = delta
            click.echo(_coloured(llm, delta) if drafts else delta.text, nl=False)
            sys.stdout.flush()
    finally:
        stream.close()  # type: ignore[attr-defined]
        click.echo()
    if last is not None and last.error is not None:
        from paceline.errors import RequestFailed

        raise RequestFailed(last.error)
    if last is not None and last.finish_reason == "length":
        click.echo(_why(llm, params.max_tokens, room), err=True)
    if stats and last is not None and last.stats is not None:
        _report(last.stats)


def _why(llm: LLM, asked: int, room: int) -> str:
    """A text that breaks off looks like a fault unless the reason is said."""
    if asked >= room:
        return f"stopped: the context of {llm.engine.max_len} tokens is full (--max-model-len)"
    return f"stopped at max_tokens={asked} (-n gives more)"


def _coloured(llm: LLM, delta: Delta) -> str:
    """Each token in the colour of its origin. Tokens are shown one by one, so odd bytes may look odd."""
    parts = []
    for token, origin in zip(delta.token_ids, delta.origins, strict=True):
        if token not in llm.tokenizer.special_ids:
            text = llm.tokenizer.token_text(token)
            parts.append(click.style(text, fg="green") if origin == "draft" else text)
    return "".join(parts)


def _report(stats: Stats) -> None:
    seconds = max(stats.seconds, 1e-9)
    lines = [
        f"{stats.emitted} tokens in {stats.seconds:.2f} s: {stats.emitted / seconds:.1f} tokens/s, "
        f"first after {stats.first_token_seconds * 1000:.0f} ms",
        f"{stats.tokens_per_step:.2f} tokens per step ({stats.steps} steps; "
        f"kept {stats.accepted} of {stats.drafted} drafted)",
    ]
    if stats.drafted:
        kept = zip(stats.accepted_by_position + [0] * 16, stats.drafted_by_position, strict=False)
        lines.append("kept by position: " + " ".join(f"{a / d:.0%}" for a, d in kept))
    if stats.drafters:
        lines.append("drafted by: " + ", ".join(f"{name} {n}" for name, n in stats.drafters.items()))
    if stats.reasons:
        lines.append("steps without a draft: " + ", ".join(f"{why} {n}" for why, n in stats.reasons.items()))
    click.echo("\n".join(["", *lines]), err=True)
