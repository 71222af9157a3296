"""Everything that can be chosen when a server is started, and its TOML file. Flags win over the file."""

from __future__ import annotations

import difflib
import ipaddress
import math
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from paceline.config import EngineConfig
from paceline.core import SamplingParams
from paceline.errors import UsageError
from paceline.options import Option, Size, aliases_of, rows_of

_MAY_BE_0 = (
    "port", "drain_timeout", "default_output", "max_output", "max_logprobs", "max_stop", "max_logit_bias", "max_tools",
    "stream_interval", "idle_unload",
)  # fmt: skip


_MEMORY = Option(name="memory", default=None, kind=Size(), help="", group="")
_NONE: Mapping[str, str] = {}
_ROOT = re.compile(r"(?!/(?:v1|api)(?:/|$))(?:/[A-Za-z0-9._~\-]+)+")
_ORIGIN = re.compile(
    r"[a-z][a-z0-9+.\-]*://(\[[0-9a-f:.]+\]|[a-z0-9_.\-]+)(:\d{1,5})?"
)  # as browsers write them


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None  # a Unix socket to listen on, in place of host and port
    ssl_certfile: str | None = None  # PEM: the certificate, and those that signed it; then https is spoken
    ssl_keyfile: str | None = None  # PEM: its key, where that is in a file of its own
    root_path: str | None = None  # where a proxy shows the server, e.g. /llm
    api_key_file: str | None = None  # one key per line, plain or as sha256:<hex>
    without_key: bool = False  # listen on another address than loopback although there is no key
    allowed_hosts: tuple[str, ...] = ()  # names beside localhost and plain IP addresses in the Host header
    cors_origins: tuple[
        str, ...
    ] = ()  # origins whose pages may ask here, e.g. http://localhost:3000; * = all
    model_name: str | None = None  # what clients call the model; None = the last part of the target's name
    served_model_names: tuple[str, ...] = ()  # further names; without model_name the first is the model's own
    idle_unload: float = 0.0  # seconds without a request after which a model is unloaded; 0 = never
    memory: int | str | None = (
        None  # bytes that the models may take together, or 16G; None = what the machine has
    )
    strict: bool = False  # refuse unknown fields and models instead of ignoring them with a warning
    request_log: bool = True  # one line to standard error for each request that asks for something
    max_texts: int = 128  # texts waiting or running; more get 429
    max_connections: int = 512
    request_timeout: float = 600.0  # seconds from arrival to the last token
    body_timeout: float = 30.0  # seconds for a request's body to arrive
    header_timeout: float = 10.0  # seconds for a request's head to arrive
    drain_timeout: float = 30.0  # seconds that open requests get after SIGTERM
    max_body: int = 4 * 2**20  # bytes
    max_media_body: int = 48 * 2**20  # bytes, where the model reads pictures or sound
    max_header: int = 32 * 2**10  # bytes
    max_prompts: int = 64  # in one completion request
    max_inputs: int = 2048  # of one request for embeddings
    max_n: int = 16
    default_output: int = (
        4096  # tokens of a chat's answer where the request names no limit; 0 = as many as fit
    )
    max_output: int = 0  # tokens an answer may have; 0 = as many as the context holds
    max_logprobs: int = 20
    max_stop: int = 64
    max_stop_length: int = 256  # characters
    max_logit_bias: int = 1024
    max_tools: int = 128
    max_schema: int = 64 * 2**10  # characters of a JSON schema or grammar
    max_schema_depth: int = 32
    grammar_timeout: float = 5.0  # seconds to compile a schema or grammar
    stream_buffer: int = 4096  # deltas a slow reader may leave unread before its request is given up
    stream_interval: float = 0.02  # seconds: tokens made faster than this are sent together; 0 = each step
    # what requests leave out, before what the model's makers suggest: options of SamplingParams, the table [sampling]
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        SamplingParams(**self.sampling)
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type not in ("int", "float"):
                continue
            if not 0 <= value < math.inf:
                raise UsageError(f"{f.name}={value!r} is not possible: give a number of at least 0")
            if value == 0 and f.name not in _MAY_BE_0:
                raise UsageError(f"{f.name}=0 would let nothing through: give a number above 0")
        if self.memory is not None:
            object.__setattr__(self, "memory", _MEMORY.take(self.memory))
        if not 0 <= self.port <= 65535:
            raise UsageError(f"port={self.port} is not possible: give 0..65535")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise UsageError("ssl_keyfile is the key of a certificate: give ssl_certfile, too")
        if self.root_path is not None and _ROOT.fullmatch(self.root_path) is None:
            raise UsageError(
                f"root_path={self.root_path!r} is not possible: write it as /llm, and not as the paths of the API begin"
            )
        for origin in self.cors_origins:
            if origin != "*" and _ORIGIN.fullmatch(origin) is None:
                raise UsageError(
                    f"cors_origins: {origin!r} is no origin: write scheme, name and port, as in http://localhost:3000"
                )
        if (
            self.uds is None
            and not is_loopback(self.host)
            and self.api_key_file is None
            and not self.without_key
        ):
            raise UsageError(
                f"host={self.host} can be reached from other machines: give --api-key-file, "
                "or --without-key if the network keeps strangers out"
            )


@dataclass(frozen=True, slots=True)
class Served:
    """One of several models: what of its engine is not as for all, its name and its sampling."""

    engine: Mapping[str, Any]
    name: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_config(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a TOML file says of server and engine, checked by name and value: its tables [server] with [sampling] inside,
    and [engine]. Raises UsageError.
    """
    tables = _tables(path)
    kinds = {"server": ServerConfig, "engine": EngineConfig, "sampling": SamplingParams}
    tables.pop("models", None)  # see `read_models`
    server, engine, sampling = check_tables(tables, kinds, f"--config {path}")
    return server | ({"sampling": sampling} if sampling else {}), engine


def _tables(path: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read ({error.strerror}): check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} is not valid TOML: {error}") from error


def read_models(path: str | Path) -> list[Served]:
    """The tables [[models]] of a TOML file: options of [engine], a `name`, a table `sampling`. Raises UsageError."""
    tables = _tables(path).get("models", [])
    where = f"--config {path}, [[models]]"
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise UsageError(f"{where}: give a table for each model, [[models]]")
    out = []
    for table in tables:
        name, sampling = table.pop("name", None), table.pop("sampling", {})
        if not (name is None or isinstance(name, str)) or not isinstance(sampling, dict):
            raise UsageError(f"{where}: name is a text, and sampling a table")
        _check_table(table, EngineConfig, where)
        _check_table(sampling, SamplingParams, f"{where}, sampling")
        if "target" not in table:
            raise UsageError(f"{where}: a model has no target: name a folder, a GGUF file or a hub id")
        out.append(Served(table, name, sampling))
    return out


def check_tables(tables: dict[str, Any], kinds: dict[str, type[Any]], where: str) -> list[dict[str, Any]]:
    """A table for each of `kinds`, {} where there is none, its names and types checked. Raises UsageError."""
    _known(tables, list(kinds), where)
    for name, kind in kinds.items():
        if not isinstance(tables.setdefault(name, {}), dict):
            raise UsageError(f"{where}: {name} has to be a table, [{name}]")
        _check_table(tables[name], kind, f"{where}, [{name}]")
    return [tables[name] for name in kinds]


def _known(
    table: dict[str, Any], names: Iterable[str], where: str, aliases: Mapping[str, str] = _NONE
) -> None:
    listed = list(names)
    for key in table:
        if key not in listed:
            near = [aliases[key]] if aliases.get(key) in listed else difflib.get_close_matches(key, listed, 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(listed)}"
            raise UsageError(f"{where}: unknown key {key!r}: {hint}")


def _check_table(table: dict[str, Any], kind: type[Any], where: str) -> None:
    if rows := {row.name: row for row in rows_of(kind, "file")}:
        _known(table, rows, where, aliases_of(kind))
        for key, value in table.items():
            try:
                table[key] = rows[key].take(value)
            except UsageError as error:
                raise UsageError(f"{where}: {error}") from error
        return
    _known(table, [f.name for f in fields(kind) if f.name != "sampling"], where)
    hints = typing.get_type_hints(kind)
    for key, value in table.items():
        if isinstance(value, list):
            table[key] = tuple(value)
        if not _fits(table[key], hints[key]):
            raise UsageError(f"{where}: {key}={value!r} has the wrong type: {_name(hints[key])} is wanted")


def _fits(value: Any, hint: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, part) for part in args)
    if origin is typing.Literal:
        return value in args
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, args[0]) for item in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float)) if hint is float else isinstance(value, hint)


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def server_config(options: dict[str, Any]) -> ServerConfig:
    """Build the config from options by name (None = not given), already known to exist."""
    return ServerConfig(**{key: value for key, value in options.items() if value is not None})
