"""The table of options: what stands in it once holds at every door."""

from __future__ import annotations

import importlib
import typing
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from paceline.cli import group
from paceline.cli.options import given
from paceline.config import EngineConfig, EngineOptions, SamplingOptions, StepOptions
from paceline.core import SamplingParams
from paceline.engine.engine import EngineParts
from paceline.errors import UsageError
from paceline.options import (
    COMMANDS,
    Choice,
    Flag,
    Length,
    Named,
    Number,
    Option,
    Size,
    Text,
    Whole,
    aliases_of,
    rows_of,
)
from paceline.server.schema import ChatRequest, CompletionRequest, Sampling, Speculation
from paceline.server.settings import read_config

TABLES = (EngineConfig, SamplingParams)
ALL = [(table, row) for table in TABLES for row in rows_of(table)]


def command(name: str) -> click.Command:
    made = group.get_command(click.Context(group), name)
    assert made is not None
    return made


def sample(row: Option) -> Any:
    """A value that the option can have and that is not its default."""
    kind = row.kind
    if isinstance(kind, Choice):
        return next(name for name in kind.names if name != row.default)
    if isinstance(kind, Flag):
        return not row.default
    if isinstance(kind, Length):
        return 3
    if isinstance(kind, Whole):
        return max(kind.low, 0) + 7
    if isinstance(kind, Number):
        return (max(kind.low, 0) + min(kind.high, 1)) / 2
    if isinstance(kind, Size):
        return 2**30
    if isinstance(kind, Named):
        return "a=x"
    return "4x2" if row.name == "draft_tree" else "x"


def test_every_field_is_a_row() -> None:
    for table in TABLES:
        named = {row.name for row in rows_of(table)}
        assert {f.name for f in fields(table) if f.init} == named
    assert {row.name for row in rows_of(StepOptions)} <= {f.name for f in fields(EngineParts)}
    assert (
        not {f.name for f in fields(EngineParts)}
        & set(EngineParts.__annotations__)
        & {r.name for r in rows_of(StepOptions)}
    )


@pytest.mark.parametrize(("table", "row"), ALL, ids=[row.name for _, row in ALL])
def test_a_default_is_a_value(table: type, row: Option) -> None:
    default = row.default() if callable(row.default) else row.default
    assert row.take(default) == default
    assert row.help.endswith((".", "...", ":"))
    assert row.doors


@pytest.mark.parametrize(
    ("kinds", "table"), [(EngineOptions, EngineConfig), (SamplingOptions, SamplingParams)]
)
def test_typed_keywords_take_what_the_fields_hold(kinds: Any, table: type) -> None:
    """The typed twin may take more than is stored (a path, a size in words), and never less."""
    typed, stored = typing.get_type_hints(kinds), typing.get_type_hints(table)
    assert set(typed) == {row.name for row in rows_of(table)} - {"target"}
    for name, kind in typed.items():
        assert parts(stored[name]) <= parts(kind) | {tuple[str, ...], tuple[int, ...]}, name


def parts(kind: Any) -> set[Any]:
    args = (
        typing.get_args(kind)
        if not typing.get_origin(kind) or "Union" in str(typing.get_origin(kind))
        else ()
    )
    return set(args) or {kind}


@pytest.mark.parametrize("door", sorted(COMMANDS))
def test_commands_have_the_options_of_their_door(door: str) -> None:
    params = {param.name: param for param in command(door).params}
    for row in (*rows_of(EngineConfig, door), *rows_of(SamplingParams, door)):
        param = params[row.name]
        assert row.flag in param.opts
        assert param.default is None or param.default == ()
        assert getattr(param, "group", None) == row.group
        assert row.help.split()[0] in param.help
    ours = {row.name for row in rows_of(EngineConfig)}
    left_out = ours - {row.name for row in rows_of(EngineConfig, door)} - {"target"}
    assert left_out <= {"drafter", "draft_tokens", "verify", "prefix_cache", "pooling"}, (
        "what check and bench go through, and what is not for texts"
    )
    if door in ("run", "generate", "serve"):
        assert left_out <= {"pooling"}
    assert ("pooling" in left_out) == (door != "serve")


EVERY = [(door, row) for door in ("run", "serve") for t in TABLES for row in rows_of(t, door)]


@pytest.mark.parametrize(("door", "row"), EVERY, ids=[f"{door} {row.name}" for door, row in EVERY])
@pytest.mark.parametrize("by", ["flag", "environment"])
def test_a_value_arrives_by_flag_and_by_environment(
    door: str, row: Option, by: str, seen: dict[str, Any]
) -> None:
    value = sample(row)
    text = "1" if value is True else "0" if value is False else str(value)
    flags, variables = [], {}
    if by == "environment":
        variables[row.variable] = text
    elif isinstance(row.kind, Flag):
        flags = [row.flag if value else f"--no-{row.flag[2:]}"]
    else:
        flags = [f"{row.flag}={text}"]
    done = CliRunner().invoke(
        command(door), [*(["demo", "x"] if door == "run" else []), *flags], env=variables
    )
    assert done.exit_code == 0, done.output
    expected = row.kind.normal([value] if isinstance(row.kind, Text) and row.kind.several else value)
    assert seen[row.name] == (
        expected if not isinstance(seen[row.name], tuple) or row.name in ("stop", "lora") else (value,)
    )


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a command passes on, in place of loading a model."""
    found: dict[str, Any] = {}

    class Loaded:
        def __init__(self, target: str, say: Any, **options: Any) -> None:
            found.update(vars_of(EngineConfig.of({"target": target, **options})) | found)
            raise SystemExit(0)

    def started(file: Any, server: dict[str, Any], engine: dict[str, Any], *rest: Any) -> None:
        found.update(
            vars_of(EngineConfig.of(engine))
            | vars_of(SamplingParams(**server["sampling"]))
            | engine
            | server["sampling"]
        )

    def taken(door: str, values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        engine, sampling = split(door, values)
        found.update(vars_of(SamplingParams(**sampling)) | sampling | engine)
        return engine, sampling

    from paceline.cli import run
    from paceline.cli.options import split

    monkeypatch.setattr("paceline.llm.LLM", Loaded)
    monkeypatch.setattr("paceline.server.start.start", started)
    monkeypatch.setattr(run, "split", taken)
    return found


def vars_of(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in fields(value)}


def test_a_flag_wins_over_the_environment(seen: dict[str, Any]) -> None:
    env = {"PACELINE_MAX_BATCH": "5", "PACELINE_MEDIA": "0", "PACELINE_ADAPTER": "/a folder/with spaces"}
    done = CliRunner().invoke(command("run"), ["demo", "x", "--max-batch", "7"], env=env)
    assert done.exit_code == 0, done.output
    assert (seen["max_batch"], seen["media"], seen["adapter"]) == (7, False, ("/a folder/with spaces",))
    wrong = CliRunner().invoke(command("run"), ["demo", "x"], env={"PACELINE_MAX_BATCH": "none"})
    assert wrong.exit_code == 2
    assert "'none' is not possible: give a whole number from 1" in wrong.output


@pytest.mark.parametrize("row", rows_of(EngineConfig, "run"), ids=lambda row: row.name)
def test_a_value_arrives_by_file(row: Option, tmp_path: Path, seen: dict[str, Any]) -> None:
    value = sample(row)
    path = tmp_path / "c.toml"
    path.write_text(
        f"[engine]\n{row.name} = {str(value).lower() if isinstance(value, bool) else repr(value)}\n"
    )
    done = CliRunner().invoke(command("run"), ["demo", "x", "--config", str(path)], env={row.variable: None})
    assert done.exit_code == 0, done.output
    assert seen[row.name] == ((value,) if row.name in ("adapter", "adapters") else value)


def test_flag_environment_and_file_win_in_this_order(tmp_path: Path, seen: dict[str, Any]) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[server]\nport = 1\n[engine]\nmax_batch = 2\nthreads = 2\ndevice = 'cpu'\ntarget = 'there'\n"
                    "[sampling]\ntemperature = 0.5\ntop_p = 0.5\n")  # fmt: skip
    env = {"PACELINE_CONFIG": str(path), "PACELINE_MAX_BATCH": "3", "PACELINE_THREADS": "3"}
    done = CliRunner().invoke(command("run"), ["--max-batch", "4", "--top-p", "0.25", "hello there"], env=env)
    assert done.exit_code == 0, done.output
    assert [seen[name] for name in ("max_batch", "threads", "device", "target")] == [4, 3, "cpu", "there"]
    assert (seen["temperature"], seen["top_p"]) == (0.5, 0.25)
    done = CliRunner().invoke(command("run"), ["demo", "hello there"], env=env)
    assert done.exit_code == 0, done.output
    path.write_text("[engine]\nmax_batch = 0\n")
    wrong = CliRunner().invoke(command("run"), ["demo", "hello there"], env=env)
    assert "[engine]: max_batch=0 is not possible" in str(wrong.exception)


@pytest.mark.parametrize(("table", "row"), ALL, ids=[row.name for _, row in ALL])
def test_files_have_the_options_of_their_door(table: type, row: Option, tmp_path: Path) -> None:
    name = "engine" if table is EngineConfig else "sampling"
    value = sample(row)
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    path = tmp_path / "c.toml"
    path.write_text(f"[{name}]\n{row.name} = {text}\n")
    if "file" not in row.doors:
        with pytest.raises(UsageError, match="unknown key"):
            read_config(path)
        return
    server, engine = read_config(path)
    assert (engine if name == "engine" else server["sampling"])[row.name] == row.take(value)
    path.write_text(f"[{name}]\n{row.name} = [[]]\n")
    with pytest.raises(UsageError, match=rf"\[{name}\]: {row.name}="):
        read_config(path)


def test_a_size_may_be_written_in_words(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[engine]\ncache_memory = '2G'\n")
    assert read_config(tmp_path / "c.toml")[1] == {"cache_memory": 2**31}
    assert EngineConfig(cache_memory="800M").cache_memory == 800 * 2**20  # type: ignore[arg-type]
    for wrong in ("2X", "", "0", "-1G", "1e999", True, 0, 1.5):
        with pytest.raises(
            UsageError, match=r"cache_memory=.* is not possible: give a whole number of bytes"
        ):
            EngineConfig(cache_memory=wrong)  # type: ignore[arg-type]


def test_requests_have_the_options_of_their_door_with_the_bounds_of_their_rows() -> None:
    inside = {**Sampling.model_fields, **ChatRequest.model_fields, **CompletionRequest.model_fields}
    for row in rows_of(SamplingParams, "request"):
        field = inside.get(row.name) or Speculation.model_fields[row.name]
        names = [row.name, *row.aliases]
        assert set(names) <= {*inside, *Speculation.model_fields}
        if isinstance(row.kind, Number):
            bounds = {type(one).__name__: one for one in field.metadata}
            assert (bounds["Ge"].ge, bounds["Le"].le) == (row.kind.low, row.kind.high)


def test_what_other_engines_call_an_option_is_no_option_of_another_meaning() -> None:
    for table in TABLES:
        names = {row.name for row in rows_of(table)}
        assert not names & set(aliases_of(table))
        assert sum(len(row.aliases) for row in rows_of(table)) == len(aliases_of(table))
        for alias, name in aliases_of(table).items():
            if table is EngineConfig:
                with pytest.raises(UsageError, match=f"did you mean {name}"):
                    EngineConfig.of({alias: 1})


@pytest.mark.parametrize("door", sorted(COMMANDS))
def test_a_help_has_groups_and_the_eight_most_used_first(door: str) -> None:
    shown = CliRunner().invoke(group, [door, "--help"]).output
    titles = [line[:-1] for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles[0] == "Most used"
    assert {"Model", "Memory and context", "This machine", "Start-up"} <= set(titles)
    first = shown[shown.index("Most used:") : shown.index(f"{titles[1]}:")]
    assert len([line for line in first.splitlines() if line.startswith("  -")]) == 8
    for param in command(door).params:
        assert isinstance(param, click.Argument) or any(name in shown for name in param.opts)


def test_nothing_is_given_that_nobody_gave() -> None:
    assert given({"a": None, "b": (), "c": 0, "d": False, "e": ""}) == {"c": 0, "d": False, "e": ""}
    assert all(f.default is not MISSING or f.default_factory is not MISSING for f in fields(EngineConfig))


def test_the_page_of_options_is_written_from_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[1]
    monkeypatch.syspath_prepend(str(root / "scripts"))
    page = importlib.import_module("options_page").page()
    assert (root / "docs" / "options.md").read_text(encoding="utf-8") == page, "run scripts/options_page.py"
