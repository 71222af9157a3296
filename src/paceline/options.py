"""How an option is declared: once, as a row beside its field in `EngineConfig` (config.py) or `SamplingParams` (core.py).

A row says what values there are, the default, the help, its group, what other engines call it, and at which doors it
can be given. Checks, the commands' options and help, config files, the environment, bounds of requests and the page's
settings are made of rows, so a new option is one row.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, cast

from paceline.errors import UsageError, shown
from paceline.tree import MOST_DEEP, MOST_WIDE, Shape

INFINITE = float("inf")
MOST_NUMBER = 2**62  # the kernels count in 64 bits
MOST_NAME = 128  # characters of an adapter's name
NAME = re.compile(r"[A-Za-z0-9][\w.:/@-]{0,127}", re.ASCII)
NAMED = re.compile(rf"({NAME.pattern})=.+", re.ASCII | re.DOTALL)

COMMANDS = frozenset({"run", "generate", "serve", "check", "bench"})  # those that load an engine
LIBRARY = frozenset({"library"})
FILE = frozenset({"file"})  # the tables [engine] and [sampling] of a TOML file
ENVIRONMENT = frozenset({"environment"})  # PACELINE_<NAME>, for commands that have the option
REQUEST = frozenset({"request"})  # a field of HTTP requests
PAGE = frozenset({"page"})  # a setting of the server's page
NO_DOORS: frozenset[str] = frozenset()

MODEL, SPECULATION, SAMPLING = "Model", "Speculation", "Sampling"
MEMORY, MEDIA = "Memory and context", "Pictures and sound"
MACHINE, START = "This machine", "Start-up"
GROUPS = (SAMPLING, SPECULATION, MODEL, MEMORY, MEDIA, MACHINE, START)  # in the order of the help


class Kind:
    """What values an option can have."""

    wrong = "is not possible"

    def wanted(self) -> str:
        """What to give instead."""
        raise NotImplementedError

    def accepts(self, value: Any) -> bool:
        raise NotImplementedError

    def normal(self, value: Any) -> Any:
        """An accepted value as it is stored."""
        return value

    def read(self, text: str) -> Any:
        """The value that a text of the command line or the environment stands for; ValueError for none."""
        return text


@dataclass(frozen=True)
class Choice(Kind):
    names: tuple[str | int, ...]
    advice: str = ""
    wrong = "is unknown"

    def wanted(self) -> str:
        return self.advice or f"use {', '.join(map(str, self.names[:-1]))} or {self.names[-1]}"

    def accepts(self, value: Any) -> bool:
        return not isinstance(value, bool) and value in self.names

    def read(self, text: str) -> Any:
        return next((name for name in self.names if str(name) == text), text)


@dataclass(frozen=True)
class Whole(Kind):
    """A whole number."""

    low: int = 1
    high: float = MOST_NUMBER

    def wanted(self) -> str:
        return f"give a whole number from {self.low}" + (
            f" to {self.high}" if self.high < MOST_NUMBER or self.low < -1 else ""
        )

    def accepts(self, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and self.low <= value <= self.high

    def read(self, text: str) -> int:
        return int(text)


@dataclass(frozen=True)
class Number(Kind):
    low: float
    high: float

    def wanted(self) -> str:
        return f"give a number from {self.low:g} to {self.high:g}"

    def accepts(self, value: Any) -> bool:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and self.low <= value <= self.high  # NaN fails the comparison

    def read(self, text: str) -> float:
        return float(text)


@dataclass(frozen=True)
class Flag(Kind):
    def wanted(self) -> str:
        return "give True or False"

    def accepts(self, value: Any) -> bool:
        return isinstance(value, bool)


@dataclass(frozen=True)
class Text(Kind):
    """`path`: an object that stands for a path is taken, too. `several`: so is a list of one."""

    advice: str
    path: bool = False
    several: str = ""  # why there cannot be more than one

    def wanted(self) -> str:
        return self.advice

    def accepts(self, value: Any) -> bool:
        if not self.several or not isinstance(value, list | tuple):
            return self._is(value)
        if len(value) > 1:
            raise UsageError(self.several)
        return all(self._is(item) for item in value)

    def _is(self, value: Any) -> bool:
        return isinstance(value, str) or (self.path and isinstance(value, os.PathLike))

    def normal(self, value: Any) -> str | None:
        if isinstance(value, list | tuple):
            return self.normal(value[0]) if value else None
        return str(os.fspath(value)) if isinstance(value, os.PathLike) else value


@dataclass(frozen=True)
class Merged(Text):
    """A path alone, or several as NAME=PATH, which are left as they are for `Named`."""

    def accepts(self, value: Any) -> bool:
        if not isinstance(value, list | tuple):
            return self._is(value)
        return super().accepts([item for item in value if not is_named(item)])

    def normal(self, value: Any) -> Any:
        listed = list(value) if isinstance(value, list | tuple) else [value]
        if any(map(is_named, listed)):
            return tuple(item if isinstance(item, str) else str(os.fspath(item)) for item in listed)
        return super().normal(value)


def is_named(value: object) -> bool:
    """Whether a text is NAME=PATH, and not a path that has = in it."""
    return isinstance(value, str) and NAMED.fullmatch(value) is not None and not os.path.exists(value)


@dataclass(frozen=True)
class Named(Kind):
    """Paths by name: a mapping, texts NAME=PATH, or pairs; stored as pairs. Raises UsageError for a name given twice."""

    most: int

    def wanted(self) -> str:
        return f"give up to {self.most} as NAME=PATH, names of letters, digits and . _ : / @ -"

    def accepts(self, value: Any) -> bool:
        pairs = self._pairs(value)
        if pairs is None or len(pairs) > self.most:
            return False
        names = [name for name, _ in pairs]
        twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
        if twice is not None:
            raise UsageError(f"two adapters are named {twice}: give each a name of its own")
        return all(NAME.fullmatch(name) and path for name, path in pairs)

    def normal(self, value: Any) -> tuple[tuple[str, str], ...]:
        return tuple(self._pairs(value) or ())

    def _pairs(self, value: Any) -> list[tuple[str, str]] | None:
        """None for what is none of the forms."""
        listed = (
            [value] if isinstance(value, str) else list(value.items() if isinstance(value, Mapping) else ())
        )
        listed = list(value) if isinstance(value, list | tuple) else listed
        if not listed and value not in ({}, (), []):
            return None
        pairs: list[tuple[str, str]] = []
        for item in listed:
            pair = item.split("=", 1) if isinstance(item, str) else item
            if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str):
                return None
            if not isinstance(pair[1], str | os.PathLike):
                return None
            pairs.append((pair[0], str(os.fspath(pair[1]))))
        return pairs


@dataclass(frozen=True)
class Blended(Kind):
    """Names of adapters, each with a factor: a name, a list of names or pairs, or a mapping; stored as pairs."""

    most: int
    largest: float

    def wanted(self) -> str:
        bounds = f"from -{self.largest:g} to {self.largest:g}"
        return f"give an adapter's name, or up to {self.most} names with a factor {bounds}"

    def accepts(self, value: Any) -> bool:
        pairs = self._pairs(value)
        if pairs is None or len(pairs) > self.most or len(dict(pairs)) < len(pairs):
            return False
        return all(0 < len(name) <= MOST_NAME and abs(factor) <= self.largest for name, factor in pairs)

    def normal(self, value: Any) -> tuple[tuple[str, float], ...]:
        return tuple((name, float(factor)) for name, factor in self._pairs(value) or ())

    def read(self, text: str) -> list[tuple[str, float]]:
        """NAME, or NAME=FACTOR,NAME=FACTOR."""
        parts = (part.partition("=") for part in text.split(","))
        return [(name, float(factor) if equals else 1.0) for name, equals, factor in parts]

    def _pairs(self, value: Any) -> list[tuple[str, float]] | None:
        if isinstance(value, str):
            return [(value, 1.0)]
        if not isinstance(value, Mapping | list | tuple):
            return None
        pairs: list[tuple[str, float]] = []
        for item in value.items() if isinstance(value, Mapping) else value:
            name, factor = (item, 1.0) if isinstance(item, str) else _pair(item)
            if not isinstance(name, str) or isinstance(factor, bool) or not isinstance(factor, int | float):
                return None
            pairs.append((name, factor))
        return pairs


def _pair(item: Any) -> tuple[Any, Any]:
    return (item[0], item[1]) if isinstance(item, list | tuple) and len(item) == 2 else (None, None)


@dataclass(frozen=True)
class Size(Kind):
    """Bytes, a number or a text such as 800M or 2G."""

    def wanted(self) -> str:
        return "give a whole number of bytes, or a size such as 800M or 2G"

    def accepts(self, value: Any) -> bool:
        try:
            size = self.normal(value)
        except ValueError:
            return False
        return isinstance(size, int) and not isinstance(size, bool) and 1 <= size <= MOST_NUMBER

    def normal(self, value: Any) -> Any:
        return self.read(value) if isinstance(value, str) else value

    def read(self, text: str) -> int:
        number = text.upper().removesuffix("B").removesuffix("I")
        unit = number[-1:] if number[-1:] in "KMGT" else ""
        try:
            return int(float(number.removesuffix(unit)) * 1024 ** (" KMGT".index(unit) if unit else 0))
        except OverflowError as error:
            raise ValueError(f"{text} is too large") from error


@dataclass(frozen=True)
class Length(Kind):
    """Tokens of a draft, or auto."""

    high: int

    def wanted(self) -> str:
        return f"give 0..{self.high} or 'auto'"

    def accepts(self, value: Any) -> bool:
        if isinstance(value, str):
            return value == "auto"
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= self.high

    def read(self, text: str) -> int | str:
        return text if text == "auto" else int(text)


@dataclass(frozen=True)
class Tree(Kind):
    """DEPTHxWIDTH of drafts that branch."""

    def wanted(self) -> str:
        return f"give DEPTHxWIDTH from 1x2 to {MOST_DEEP}x{MOST_WIDE}, for instance 4x2"

    def accepts(self, value: Any) -> bool:
        if not isinstance(value, str):
            return False
        Shape.parse(value)  # says itself what is wrong
        return True


@dataclass(frozen=True)
class Several(Kind):
    """A list of values of one type, or one of them; stored as a tuple."""

    of: type
    advice: str
    alone: bool = True  # whether a single value is taken, too

    def wanted(self) -> str:
        return self.advice

    def accepts(self, value: Any) -> bool:
        if self._is(value):
            return self.alone
        if isinstance(value, str | bytes) or not isinstance(value, Iterable) or isinstance(value, Iterator):
            return False
        return all(self._is(item) for item in value)

    def _is(self, value: Any) -> bool:
        return isinstance(value, self.of) and not isinstance(value, bool)

    def normal(self, value: Any) -> tuple[Any, ...]:
        return (value,) if self._is(value) else tuple(value)


@dataclass(frozen=True)
class Other(Kind):
    """Values that only a program can give."""

    test: Callable[[Any], bool]
    advice: str

    def wanted(self) -> str:
        return self.advice

    def accepts(self, value: Any) -> bool:
        return self.test(value)


@dataclass(frozen=True, slots=True)
class Look:
    """How a command shows an option. `default`: in words, where its value says little."""

    short: str | None = None  # a second flag, for instance -n
    metavar: str | None = None
    default: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A row. A default of None means that the option may be left out, and None given."""

    name: str = ""
    default: Any
    kind: Kind
    help: str
    group: str
    aliases: tuple[str, ...] = ()  # what other engines call it
    doors: frozenset[str] = NO_DOORS
    look: Look = field(default_factory=Look)

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment's name for it."""
        return f"PACELINE_{self.name.upper()}"

    def take(self, value: Any) -> Any:
        """`value` as it is stored. Raises UsageError for one that cannot be, with what to give."""
        if value is None and self.default is None:
            return None
        if not self.kind.accepts(value):
            more = ", or leave it out" if self.default is None and isinstance(self.kind, Choice) else ""
            raise UsageError(f"{self.name}={shown(value)} {self.kind.wrong}: {self.kind.wanted()}{more}")
        return self.kind.normal(value)


def option(
    default: Any, kind: Kind, help: str, group: str, *,
    aliases: tuple[str, ...] = (), doors: frozenset[str] = NO_DOORS, look: Look | None = None,
) -> Any:  # fmt: skip
    """A dataclass's field with its row. A callable default makes the value."""
    row = Option(
        default=default, kind=kind, help=help, group=group, aliases=aliases, doors=doors, look=look or Look()
    )
    if callable(default):
        return field(default_factory=default, metadata={"option": row})
    return field(default=default, metadata={"option": row})


@cache
def _rows(cls: Any, door: str | None) -> tuple[Option, ...]:
    named = [replace(f.metadata["option"], name=f.name) for f in fields(cls) if "option" in f.metadata]
    return tuple(row for row in named if door is None or door in row.doors)


def rows_of(cls: type[Any], door: str | None = None) -> tuple[Option, ...]:
    """The rows of a dataclass in the order of its fields, or those of one door."""
    return _rows(cast(Any, cls), door)


def aliases_of(cls: type[Any]) -> dict[str, str]:
    """What other engines call options -> our names."""
    return {alias: row.name for row in rows_of(cls) for alias in row.aliases}


def settle(value: Any) -> None:
    """Check all options of a frozen dataclass's value, and store them in their normal form. Raises UsageError."""
    for row in rows_of(type(value)):
        object.__setattr__(value, row.name, row.take(getattr(value, row.name)))
