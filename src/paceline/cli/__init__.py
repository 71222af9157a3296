"""The command line: options -> config -> one call. The only room that reads the environment.

Commands are modules that are imported when they are called, so that `paceline --help` needs no torch.

Here belongs how options and answers look. What a command does belongs to the room that it calls.
"""

from __future__ import annotations

import codecs
import importlib
import io
import os
import signal
import sys
from types import FrameType

import click

from paceline import __version__
from paceline.errors import PacelineError

COMMANDS = {
    "run": "Write a text, or talk in an interactive session.",
    "generate": "Write the answers to a file of prompts.",
    "serve": "Serve an OpenAI-compatible endpoint and a page to play with.",
    "launch": "Start a coding agent (codex, claude, aider, ...) on a model of yours.",
    "bench": "Measure what speculation brings on this machine.",
    "check": "Prove on this machine that speculation changes no token.",
    "audit": "Ask any server whether its speculation changes the text.",
    "list": "List the models that are on this machine, and well-known ones that fit.",
    "pull": "Download a model and the drafter that was published for it.",
    "rm": "Remove models from the cache of downloads.",
    "info": "Say what a model is, what it needs and what would be used; without one, what is installed.",
    "self-test": "Test this installation: kernels, losslessness, an answer.",
    "quantize": "Store a model with int8 or int4 weights.",
    "convert": "Write a model as GGUF, or a GGUF model as safetensors.",
    "train": "Train or adapt a drafter for a target.",
}
INTERRUPTED = 130


class Commands(click.Group):
    """A group whose commands live in modules of the same name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"paceline.cli.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        import difflib

        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], COMMANDS, 1)
            hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(COMMANDS)}"
            raise click.UsageError(f"no such command {args[0]!r}: {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])  # `list` is a module here


@click.command(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="paceline")
@click.option("--traceback", is_flag=True, help="On an error, show where in the code it happened.")
@click.pass_context
def group(ctx: click.Context, traceback: bool) -> None:
    """Language models that answer faster without changing a single token, with the proof on your own machine.

    \b
    Start here:
      paceline                    asks which model, fetches it, and talks
      paceline run smollm2        a conversation with a small model
      paceline check --quick      the proof that speculation changes nothing
      paceline bench --quick      what it brings on this machine
      paceline info MODEL         whether a model will run here, and how fast
    """
    ctx.obj = {"traceback": traceback}
    if ctx.invoked_subcommand is not None:
        return
    choose = importlib.import_module("paceline.cli.choose")
    if choose.interactive():
        choose.start(ctx)
    else:
        click.echo(ctx.get_help())
        ctx.exit(2)


def _fit_streams() -> None:
    """Streams that are closed, and terminals that cannot show every character."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        _exit(4, "standard output is closed: send it to a file or to /dev/null")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="replace")


def main() -> None:
    """Entry point: a deliberate error becomes one line and its exit code."""
    show = "--traceback" in sys.argv[1:] or bool(os.environ.get("PACELINE_TRACEBACK"))
    _fit_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        code = group.main(standalone_mode=False)
    except click.exceptions.Abort:
        _exit(INTERRUPTED, "interrupted")
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except KeyboardInterrupt:
        _exit(INTERRUPTED, "interrupted")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone: nothing to say
        sys.exit(0)
    except PacelineError as error:
        if show:
            raise
        _exit(error.exit_code, str(error))
    except OSError as error:
        if show:
            raise
        place = f"{str(error.filename)[:200]}: " if error.filename else ""
        _exit(4, f"{place}{error.strerror or error}: check the path, its permissions and the free space")
    except MemoryError:
        if show:
            raise
        _exit(
            4, "out of memory: use a smaller model, --quantize int8, or lower --max-batch and --max-model-len"
        )
    except RuntimeError as error:
        if show or type(error).__name__ != "OutOfMemoryError":  # torch's, which is not imported here
            raise
        _exit(
            4, "out of GPU memory: use --quantize int8, or lower --max-batch, --step-tokens or --cache-memory"
        )
    sys.exit(code if isinstance(code, int) else 0)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """As Python's own handler. But torch imports numpy from C and drops what that raises: while it does, end at once."""
    torch = sys.modules.get("torch")
    if torch is not None and getattr(torch.__spec__, "_initializing", False):
        os.write(2, b"paceline: interrupted\n")
        os._exit(INTERRUPTED)
    raise KeyboardInterrupt


def _exit(code: int, message: str) -> None:
    click.echo(f"paceline: {message}", err=True)
    sys.exit(code)
