"""`paceline launch`: a coding agent on a model of one's own, in one command."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from paceline.cli.agents import PROGRAMS, Plan, Program, Target, planned
from paceline.cli.options import profile_dir
from paceline.errors import LoadError, UsageError

URL = "http://127.0.0.1:8000"  # where `paceline serve` listens if nothing else is said
SMALL = 16384  # tokens of context below which agents hardly have room for their own prompts
WRITTEN = "written.json"  # name of a file of ours -> SHA-256 of what was written
ARGUMENTS = "paceline.arguments"  # of a context: what the program is given
ANSWER_SECONDS = 10.0  # a server that is reading a long prompt answers late
READY_SECONDS = 3600.0  # a model may have to be downloaded first


@dataclass(frozen=True, slots=True)
class Served:
    """A server that answers: its address, the model to ask, and its context in tokens."""

    url: str
    model: str
    context: int


class Launch(click.Command):
    """A command that leaves what follows -- to another program."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[ARGUMENTS] = args[end + 1 :]
        return super().parse_args(ctx, args[:end])


@click.command(cls=Launch, options_metavar="[OPTIONS] [PROGRAM] [MODEL] [-- ARGUMENTS]")
@click.argument("program", required=False, type=click.Choice([*PROGRAMS]), metavar="")
@click.argument("model", required=False, metavar="")
@click.option(
    "--url", help=f"A server that runs already.  [default: {URL} if it answers, else one is started]"
)
@click.option(
    "--dry-run",
    "--print",
    "dry",
    is_flag=True,
    help="Show what would be written, set and started; do nothing.",
)
def command(program: str | None, model: str | None, url: str | None, dry: bool) -> None:
    """Start PROGRAM (codex, claude, aider, opencode, qwen, continue, pi, mini) on MODEL; without PROGRAM, list them.

    A server that runs is used, else one is started and ends with the program. The program's configuration is written into
    a folder of ours: its own files are not touched. What follows -- goes to the program.

    \b
    paceline launch codex Qwen/Qwen3-8B
    paceline launch aider --dry-run
    paceline launch opencode ./my-model -- run "explain this repository"
    """
    if program is None:
        width = max(map(len, PROGRAMS)) + 2
        click.echo("\n".join(f"{name:{width}}{_state(entry)}" for name, entry in PROGRAMS.items()))
        return
    arguments: list[str] = click.get_current_context().meta[ARGUMENTS]
    agent, folder = PROGRAMS[program], Path(profile_dir()) / "launch" / program
    if dry:
        served = _running(url or URL, model) or Served(url or URL, _name(model or _default()), SMALL)
        _show(
            agent, planned(agent, Target(served.url, served.model, served.context, folder)), folder, arguments
        )
        return
    if shutil.which(agent.command) is None:
        raise UsageError(
            f"{agent.command} is not installed: {agent.install} (it was tried in version {agent.tried})"
        )
    with _server(url, model, folder) as served:
        plan = planned(agent, Target(served.url, served.model, served.context, folder))
        for line in write(folder, plan.files):
            click.echo(line, err=True)
        if served.context < SMALL:
            short = f"{served.model} reads {served.context:,} tokens"
            click.echo(f"{short}: agents' own prompts take ten thousand and more", err=True)
        click.echo(_undo(folder), err=True)
        code = _run(plan, arguments)
    raise click.exceptions.Exit(code)


def _state(program: Program) -> str:
    there = "installed" if shutil.which(program.command) else program.install
    return f"{program.what} ({there})"


def _default() -> str:
    """The model where none is named: the chat model that is here."""
    from paceline.hub.resolve import smollm2

    try:
        smollm2()
    except LoadError:
        return "demo"
    return "smollm2"


def _name(model: str) -> str:
    from paceline.server.start import model_name

    return model_name(model)


@contextmanager
def _server(url: str | None, model: str | None, folder: Path) -> Iterator[Served]:
    """The server that runs, or one that is started and ends afterwards. Raises UsageError and LoadError."""
    served = _running(url or URL, model)
    if served is not None:
        click.echo(f"{served.model} on {served.url}", err=True)
        yield served
        return
    if url is not None:
        what = "serves no model" if model is None else f"does not serve {model}"
        raise UsageError(f"{url} does not answer or {what}: start `paceline serve`, or leave --url out")
    with _started(model or _default(), folder) as served:
        yield served


@contextmanager
def _started(model: str, folder: Path) -> Iterator[Served]:
    from paceline.child import command as child

    port, log = _free_port(), folder / "server.log"
    folder.mkdir(parents=True, exist_ok=True)
    click.echo(f"starting paceline serve {model} on port {port} (what it says is in {log})", err=True)
    with log.open("wb") as out:
        # a session of its own: Ctrl-C in the program is not for the server
        server = subprocess.Popen(
            child("paceline", "serve", model, "--port", str(port)),
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    try:
        yield _ready(server, f"http://127.0.0.1:{port}", log)
    finally:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(20)
        server.kill()


def _ready(server: subprocess.Popen[bytes], url: str, log: Path) -> Served:
    """Wait until it answers. Raises LoadError with its last line if it ends before."""
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end:
        known = _models(url)
        if known and all(known.values()):
            return Served(url, *next(iter(known.items())))
        if server.poll() is not None:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise LoadError(
                f"the server ended: {lines[-1].removeprefix('paceline: ') if lines else f'see {log}'}"
            )
        time.sleep(0.2)
    raise LoadError(f"the server was not ready after {READY_SECONDS:.0f} s: see {log}")


def _running(url: str, model: str | None) -> Served | None:
    """A paceline server at an address, once it has loaded the model; None for anything else that is there, or nothing."""
    url = url.rstrip("/").removesuffix("/v1")
    while 0 in (known := _models(url)).values():
        time.sleep(0.2)  # it loads
    wanted = next(iter(known), None) if model is None else model if model in known else _name(model)
    return Served(url, wanted, known[wanted]) if wanted in known else None


def _models(url: str) -> dict[str, int]:
    """What a paceline server serves: a model -> its context, 0 while it loads. Nothing where there is none."""
    import httpx2

    try:
        answer = httpx2.get(
            f"{url}/v1/models", timeout=httpx2.Timeout(ANSWER_SECONDS, connect=2.0), trust_env=False
        )
        cards = answer.json()["data"] if answer.status_code == 200 else []
        own = [card for card in cards if card.get("owned_by") == "paceline"]
        return {str(card["id"]): int(card.get("max_model_len") or 0) for card in own}
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write(folder: Path, files: Mapping[str, str]) -> list[str]:
    """Write files of ours, and say so. One that somebody has changed, or that was there before, is left as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    known, lines = _known(folder), []
    for name, text in files.items():
        path = folder / name
        old = path.read_bytes() if path.exists() else None
        if old is not None and old != text.encode() and known.get(name) != hashlib.sha256(old).hexdigest():
            lines.append(
                f"{path} was changed by hand and is left as it is: remove it to have it written again"
            )
            continue
        path.write_text(text, encoding="utf-8")
        known[name] = hashlib.sha256(text.encode()).hexdigest()
        lines.append(f"written: {path}")
    if files:
        (folder / WRITTEN).write_text(json.dumps(known), encoding="utf-8")
    return lines


def _known(folder: Path) -> dict[str, Any]:
    try:
        written = json.loads((folder / WRITTEN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return written if isinstance(written, dict) else {}


def _undo(folder: Path) -> str:
    return f"nothing else was changed; to undo it: rm -r {shlex.quote(str(folder))}"


def _show(program: Program, plan: Plan, folder: Path, arguments: list[str]) -> None:
    for name, text in plan.files.items():
        click.echo(f"# would be written: {folder / name}\n{text}")
    click.echo("# the environment, and what would be started")
    settings = [f"{name}={shlex.quote(value)}" for name, value in plan.environment.items()]
    click.echo(" \\\n  ".join([*settings, shlex.join([*plan.command, *arguments])]))
    click.echo(f"\n# {program.command}: {_state(program)}\n# {_undo(folder)}")


def _run(plan: Plan, arguments: list[str]) -> int:
    """The program in this terminal; its exit code. Ctrl-C is its own."""
    before = signal.signal(signal.SIGINT, lambda number, frame: None)  # a program does not inherit a function
    try:
        with subprocess.Popen([*plan.command, *arguments], env=os.environ | plan.environment) as program:
            return program.wait()
    finally:
        signal.signal(signal.SIGINT, before)
