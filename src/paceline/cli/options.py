"""Options that several commands share, and how they become an `EngineConfig`."""

from __future__ import annotations

import codecs
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from paceline.config import EngineConfig
from paceline.core import SamplingParams
from paceline.errors import UsageError
from paceline.options import (
    ENVIRONMENT,
    GROUPS,
    Choice,
    Flag,
    Kind,
    Length,
    Named,
    Number,
    Option,
    Several,
    Size,
    Text,
    rows_of,
)

F = TypeVar("F", bound=Callable[..., Any])
Decorator = Callable[[F], F]
MOST_USED = "Most used"
_FILE_TARGET = "paceline.target"  # of a context
OFFERED = "paceline.offered"  # of a context: whether a conversation begins with a question that is offered
FROM_ENVIRONMENT = (
    "What is not given is read from the environment, too: PACELINE_ and the option's name, for instance "
    "PACELINE_MAX_BATCH for --max-batch."
)


class Value(click.ParamType):  # type: ignore[type-arg]  # generic only in newer click
    """A value of a row that click has no type for."""

    def __init__(self, row: Option, name: str) -> None:
        self.name, self._row = name, row

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._row.take(self._row.kind.read(value) if isinstance(value, str) else value)
        except ValueError:
            self.fail(f"{value!r} is not possible: {self._row.kind.wanted()}", param, ctx)
        except UsageError as error:
            self.fail(str(error), param, ctx)

    def split_envvar_value(self, rv: str) -> list[str]:
        return [rv]  # spaces may stand in a path


class Row(click.Option):
    """An option that stands in a group of its command's help."""

    def __init__(self, *args: Any, group: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class Command(click.Command):
    """A command whose help has its options in groups: those that are `first` used, its `own`, and those of the table."""

    def __init__(self, *args: Any, own: str = "Options", first: tuple[str, ...] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.own, self.first = own, first

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {name: [] for name in (MOST_USED, self.own, *GROUPS)}
        params = self.get_params(ctx)
        params.sort(
            key=lambda param: self.first.index(param.name) if param.name in self.first else len(self.first)
        )
        for param in params:
            record = param.get_help_record(ctx)
            if record is not None:
                group = param.group if isinstance(param, Row) and param.group else self.own
                groups[MOST_USED if param.name in self.first else group].append(record)
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


def click_option(row: Option) -> Decorator[Any]:
    """The row as a command's option. What is not given is None, so that a file or the model can say it."""
    kind, names = row.kind, [row.flag, *([row.look.short] if row.look.short else [])]
    made: dict[str, Any] = {"default": None, "metavar": row.look.metavar}
    if isinstance(kind, Flag):
        names = [f"{row.flag}/--no-{row.flag.removeprefix('--')}"]
    elif isinstance(kind, Choice):
        made |= {
            "type": click.Choice([*map(str, kind.names)]),
            "callback": lambda ctx, param, text: _chosen(row, text),
        }
    elif _repeats(kind):
        made |= {"multiple": True, "type": _OneText()}
    elif not isinstance(kind, Text):
        made["type"] = Value(row, _shape(row))
    return click.option(
        *names, row.name, cls=Row, group=row.group, help=_help(row),
        envvar=row.variable if row.doors >= ENVIRONMENT else None, **made,
    )  # fmt: skip


class _OneText(click.types.StringParamType):
    def split_envvar_value(self, rv: str) -> list[str]:
        return [rv]  # spaces may stand in a path or a stop string


def _repeats(kind: Kind) -> bool:
    return isinstance(kind, Several | Named) or (isinstance(kind, Text) and bool(kind.several))


def _chosen(row: Option, text: str | None) -> Any:
    return None if text is None else row.kind.read(text)


def _shape(row: Option) -> str:
    """What a value looks like, for the help."""
    kind = row.kind
    if isinstance(kind, Length):
        return f"0..{kind.high}|auto"
    return "size" if isinstance(kind, Size) else "float" if isinstance(kind, Number) else "integer"


def _help(row: Option) -> str:
    default = row.look.default
    if default is None and isinstance(row.kind, Flag):
        default = "on" if row.default else "off"
    if default is None and row.default not in (None, ()):
        default = f"{row.default:g}" if isinstance(row.default, float) else str(row.default)
    return row.help if default is None else f"{row.help}  [default: {default}]"


def _from_file(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
    """What a file says holds where neither flag nor environment do. Raises UsageError."""
    if path is None:
        return
    from paceline.server.settings import read_config

    server, engine = read_config(path)
    ctx.meta[_FILE_TARGET] = engine.pop("target", None)
    values = {**engine, **server.get("sampling", {})}
    kinds = {row.name: row.kind for table in (EngineConfig, SamplingParams) for row in rows_of(table)}
    ctx.default_map = {
        name: str(value)
        if isinstance(kinds[name], Choice)
        else _each(value)
        if _repeats(kinds[name])
        else value
        for name, value in values.items()
    }


def _each(value: Any) -> list[Any]:
    """A value of a file as the flags that would say it, of pairs NAME=PATH."""
    listed = value if isinstance(value, tuple) else [value]
    return [item if isinstance(item, str) else "=".join(item) for item in listed]


def default_target() -> str | None:
    """The target that the file of --config names."""
    ctx = click.get_current_context(silent=True)
    return None if ctx is None else ctx.meta.get(_FILE_TARGET)


FILE = click.option(
    "--config", is_eager=True, expose_value=False, callback=_from_file, metavar="FILE", envvar="PACELINE_CONFIG",
    help="TOML file with tables [engine] and [sampling], as of `paceline serve`; flags win.",
)  # fmt: skip


def engine_options(door: str) -> list[Decorator[Any]]:
    """The engine's options of one command, and the file that may hold them."""
    return [*([] if door == "serve" else [FILE]), *(click_option(row) for row in rows_of(EngineConfig, door))]


def sampling_options(door: str) -> list[Decorator[Any]]:
    """The sampling options of one command."""
    return [click_option(row) for row in rows_of(SamplingParams, door)]


def profile_dir() -> str:
    """The user's cache folder for paceline, by the conventions of the platform."""
    home = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return str(Path(os.environ.get("XDG_CACHE_HOME") or home) / "paceline")


TARGET = [
    click.argument("target", required=False),
    click.option("--target", "named", metavar="TARGET", help="The same as the argument TARGET."),
]


def apply(options: list[Callable[[F], F]]) -> Callable[[F], F]:
    """All of `options` as one decorator."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """What of a command's values was given."""
    return {name: value for name, value in values.items() if value is not None and value != ()}


def split(door: str, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(engine options, what is given of sampling) of a command's keyword arguments. Raises UsageError for bad values.

    What is not given is the model's own: see `LLM.params`.
    """
    names = {row.name for row in rows_of(SamplingParams, door)}
    sampling = {name: value for name, value in given(values).items() if name in names}
    SamplingParams(**sampling)  # bad values are refused before a model is loaded
    return engine_values({name: value for name, value in values.items() if name not in names}), sampling


def engine_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The engine options that were given. What start-up measures is kept in the user's cache if nothing else is said."""
    return {"profile_dir": profile_dir()} | given(values)


def need_ray() -> None:
    """Raise UsageError where Ray is not installed. Nothing of how it is used is sent to its makers."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError("ray is missing: install it with `pip install paceline[ray]`")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def one_target(argument: str | None, option: str | None, default: str | None = "demo") -> str:
    """The target, an argument or --target. Raises UsageError for both, and for neither without a default."""
    if argument is not None and option is not None:
        raise UsageError(f"the target is given twice, as {argument} and as --target {option}: give it once")
    named = (argument, option, default_target(), default)
    target = next((name for name in named if name is not None), None)
    if target is None:
        raise UsageError("no target is given: name a folder, a GGUF file or a hub id, first or with --target")
    return target


def read_text(path: str) -> str:
    """A prompt from a file, or from standard input for `-`."""
    try:
        with click.open_file(path, encoding="utf-8") as file:
            return str(file.read()).removeprefix("\ufeff")  # a byte order mark is no part of the text
    except OSError as error:
        raise UsageError(
            f"cannot read {path} ({error.strerror}): give a file, or - for standard input"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: convert it first") from error


def json_line(record: dict[str, Any]) -> str:
    """JSON on one line; what standard output cannot write is escaped, where other text has a question mark."""
    encoding = codecs.lookup(sys.stdout.encoding or "utf-8").name
    return json.dumps(record, ensure_ascii=encoding != "utf-8")
