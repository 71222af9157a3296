"""The house rules, held over the syntax tree: where imports may point, and how large things may be."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import paceline
from paceline.drafter_kinds import KINDS, TRAININGS

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "paceline"
FILES = sorted(p for p in SOURCE.rglob("*.py"))
NATIVE = sorted([*(ROOT / "native").glob("*.cpp"), *(ROOT / "native").glob("*.h")])

# room -> rooms it may import; everything may import errors, core, config, files
MAY_IMPORT = {
    "errors": set(),
    "core": set(),
    "options": set(),
    "config": set(),
    "drafter_kinds": set(),
    "files": set(),
    "memory": set(),
    "tree": set(),
    "soft_tokens": set(),
    "child": set(),
    "turns": set(),
    "machine": set(),
    "sampling": {"ops"},
    "kv": {"memory"},
    "ops": {"kv", "memory"},
    "text": {"checkpoints"},
    "checkpoints": {"ops"},
    "models": {"checkpoints", "kv", "ops"},
    "hub": {"checkpoints", "models", "ops"},
    "convert": {"checkpoints", "hub", "kv", "models", "ops", "text"},
    "drafters": {"checkpoints", "control", "kv", "models", "ops"},
    "control": set(),
    "startup": {"control", "drafters", "engine", "text"},
    "media": {"checkpoints", "models", "text"},
    "engine": {"control", "sampling", "kv", "ops", "text", "models", "drafters"},
    "survey": {"checkpoints", "hub", "models", "text"},
    "suggest": {"checkpoints", "control", "models", "survey"},
    "parallel": {"kv", "models", "ops"},
    "capacity": {"kv", "models", "ops"},
    "assembly": {
        "capacity",
        "checkpoints",
        "control",
        "hub",
        "startup",
        "suggest",
        "survey",
        "kv",
        "ops",
        "text",
        "models",
        "drafters",
        "engine",
        "media",
        "parallel",
    },
    "rank": {"assembly", "kv", "models", "ops", "parallel"},
    "chat": {"media", "text"},
    "llm": {"assembly", "chat", "engine", "media", "text"},
    "server": {"chat", "media", "control", "engine", "text", "llm", "assembly", "memory"},
    "provenance": set(),
    "forecast": {
        "assembly",
        "capacity",
        "checkpoints",
        "control",
        "engine",
        "hub",
        "kv",
        "memory",
        "models",
        "ops",
        "suggest",
        "survey",
    },
    "bench": {
        "assembly",
        "capacity",
        "control",
        "drafters",
        "engine",
        "forecast",
        "kv",
        "llm",
        "memory",
        "models",
        "ops",
        "startup",
        "text",
    },
    "check": {"llm", "engine", "assembly", "text", "media", "models", "kv", "ops", "sampling", "drafters"},
    "cluster": {
        "assembly",
        "chat",
        "hub",
        "control",
        "engine",
        "llm",
        "memory",
        "models",
        "sampling",
        "server",
        "text",
    },
    "audit": {"check"},
    "train": {
        "checkpoints",
        "hub",
        "capacity",
        "control",
        "kv",
        "ops",
        "models",
        "drafters",
        "sampling",
        "text",
        "llm",
        "engine",
        "assembly",
    },
    "cli": {"*"},
    "async_llm": {"chat", "llm", "text"},
    "__init__": {"async_llm", "llm"},
    "__main__": {"cli"},
}
# What a person runs beside the product: the product imports none of it, not even inside a function.
TOOLS = {"audit", "bench", "check", "convert", "train"}
COMMANDS_OF_TOOLS = {"audit", "bench", "check", "convert", "quantize", "self_test", "train"}  # modules of cli
BASE = {
    "errors",
    "options",
    "core",
    "config",
    "files",
    "tree",
    "soft_tokens",
    "child",
    "turns",
    "machine",
    "drafter_kinds",
}
# What a reader can hold at once. They are guards against files of two ideas, no aims: nothing is split to meet them.
LINES, FUNCTION_LINES, CLASS_LINES, PARAMETERS = 700, 50, 400, 7
MOST_FILES = 30  # in a room below models, so that a newcomer sees what belongs there


def room(path: Path) -> str:
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else path.stem


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "paceline":
            names = node.module.split(".")[1:2] or [a.name for a in node.names]
            yield from (n for n in names if (SOURCE / n).is_dir() or (SOURCE / f"{n}.py").exists())
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("paceline."))


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_imports_go_one_way() -> None:
    wrong = {}
    for path in FILES:
        own = room(path)
        allowed = MAY_IMPORT[own] | BASE | {own}
        if "*" not in allowed and (more := set(imported(parse(path))) - allowed):
            wrong[str(path.relative_to(SOURCE))] = more
    assert not wrong, "these files import rooms that theirs must not"


def test_the_product_imports_no_tool() -> None:
    wrong = {}
    for path in FILES:
        own = room(path)
        if own in TOOLS or (own == "cli" and path.stem in COMMANDS_OF_TOOLS):
            continue
        if tools := set(imported(parse(path))) & TOOLS:
            wrong[str(path.relative_to(SOURCE))] = tools
    assert not wrong, "tools stand in a wing of their own: move what the product needs to one of its rooms"


LOADED = """
import sys
import time
from click.testing import CliRunner
import paceline
from paceline.cli import group
import paceline.server.start as start

def run(app, worker, config, listening):
    worker.start()
    while worker.state == "loading":
        time.sleep(0.01)
    assert worker.state == "ready", worker.error
    worker.close()
    worker.join()

start.run = run
pair = ["demo", "--max-model-len", "64"]
for words in (["run", *pair, "hello", "--max-tokens", "2"], ["serve", *pair, "--port", "0"]):
    done = CliRunner().invoke(group, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
print(*sys.modules)
"""


def test_a_conversation_and_a_server_load_no_tool() -> None:
    """In a process of its own: `run` answers, `serve` loads the demo pair, and no module of a tool is there."""
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = {name.split(".")[1] for name in done.stdout.split() if name.startswith("paceline.")}
    assert {"engine", "server", "drafters"} <= loaded
    assert not loaded & TOOLS


def test_a_kind_of_drafter_is_named_in_its_own_files_and_in_the_list() -> None:
    """Whoever adds one finds its name nowhere else: all others ask `drafter_kinds`."""
    methods = {training.name.replace("-", "_") for training in TRAININGS.values()}
    own = {Path("drafter_kinds.py"), Path("drafters/assistant.py")}
    own |= {Path("models/drafters", f"{name}.py") for name in KINDS}
    own |= {path.relative_to(SOURCE) for name in methods for path in SOURCE.glob(f"train/methods/{name}*")}
    named = re.compile(
        rf"\b({'|'.join(name for name in KINDS if name != 'heads')})\b"
    )  # heads is a word, too
    others = [
        path for path in FILES if not {path.relative_to(SOURCE), *path.relative_to(SOURCE).parents} & own
    ]
    assert len(FILES) - len(others) >= 2 + len(KINDS) + len(TRAININGS)
    found = {
        str(path.relative_to(SOURCE)): named.findall(path.read_text(encoding="utf-8")) for path in others
    }
    assert not {path: names for path, names in found.items() if names}


def test_sizes() -> None:
    wrong = {str(p.relative_to(SOURCE)): found for p in FILES if (found := [*too_large(p)])}
    wrong |= {p.name: ["lines"] for p in NATIVE if p.read_text(encoding="utf-8").count("\n") > LINES}
    assert not wrong


def too_large(path: Path) -> Iterator[str]:
    if (lines := path.read_text(encoding="utf-8").count("\n")) > LINES:
        yield f"{lines} lines"
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ClassDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > CLASS_LINES:
                yield f"{node.name} has {lines} lines"
    for function in functions(parse(path)):
        if any("triton.jit" in ast.unparse(d) for d in function.decorator_list):
            continue  # a kernel: it can be given no objects, and its parts share registers
        lines = (function.end_lineno or 0) - function.lineno + 1
        if lines > FUNCTION_LINES:
            yield f"{function.name} has {lines} lines"
        a = function.args
        names = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
        own = [n for n in names if n not in ("self", "cls")]
        command = room(path) == "cli"  # a command's parameters are its options
        if not command and len(own) > PARAMETERS:
            yield f"{function.name} has {len(own)} parameters"


MODULES = {
    ".".join(p.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): p for p in FILES
}


def modules_of(tree: ast.AST) -> set[str]:
    """The modules of ours that a file imports, in functions and for type checkers too."""
    seen: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            within = {f"{node.module}.{a.name}" for a in node.names}
            seen |= within & MODULES.keys() or {node.module} & MODULES.keys()
        elif isinstance(node, ast.Import):
            seen |= {a.name for a in node.names} & MODULES.keys()
    return seen


@cache
def graph() -> dict[str, set[str]]:
    """Each module's imports. `paceline` itself only names what it hands out, and is left out."""
    imports = {name: modules_of(parse(path)) - {name, "paceline"} for name, path in MODULES.items()}
    return {name: needs for name, needs in imports.items() if name != "paceline"}


def test_no_circles() -> None:
    """Neither between rooms nor inside one: modules can be sorted so that each imports only what comes before it."""
    left = dict(graph())
    while free := {name for name, needs in left.items() if not needs & left.keys()}:
        for name in free:
            del left[name]
    assert not left, f"these import each other, directly or over others: {sorted(left)}"


NAMED_ELSEWHERE = ("paceline.cli", "paceline.models.families", "paceline.text.formats")  # one of a kind each


def test_no_module_is_a_fragment_of_another() -> None:
    """A module of less than 40 lines that one other imports belongs into that one."""
    recipes = [modules_of(ast.parse(p.read_text(encoding="utf-8"))) for p in (ROOT / "recipes").rglob("*.py")]
    fragments = {}
    for name, path in MODULES.items():
        few = path.read_text(encoding="utf-8").count("\n") < 40 and path.name != "__init__.py"
        if few and not name.startswith(NAMED_ELSEWHERE):
            users = [other for other, needs in graph().items() if name in needs]
            if len(users) + sum(name in needs for needs in recipes) == 1:
                fragments[name] = users
    assert not fragments


MIXED_NAMES = ("row", "span", "how", "talk", "asked")  # what tuples of several things used to be called


def test_no_parameter_is_a_tuple_of_several_things() -> None:
    wrong = []
    for path in FILES:
        for function in functions(parse(path)):
            a = function.args
            for argument in (*a.posonlyargs, *a.args, *a.kwonlyargs):
                if argument.annotation is not None and carries_several(argument.annotation, argument.arg):
                    wrong.append(f"{path.relative_to(SOURCE)}: {function.name}({argument.arg})")
    assert not wrong, "make a small dataclass or a NamedTuple of it"


def carries_several(annotation: ast.expr, name: str) -> bool:
    """Whether it is a tuple of things of several types, or any under a name that says nothing."""
    if isinstance(annotation, ast.BinOp):  # | None
        return carries_several(annotation.left, name) or carries_several(annotation.right, name)
    if not isinstance(annotation, ast.Subscript) or ast.unparse(annotation.value) != "tuple":
        return False
    parts = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
    kinds = {ast.unparse(part) for part in parts} - {"..."}
    return len(kinds) > 1 or (name in MIXED_NAMES and ast.unparse(parts[-1]) != "...")


def test_no_room_of_models_is_crowded() -> None:
    folders = [SOURCE / "models", *(p for p in (SOURCE / "models").iterdir() if p.is_dir())]
    assert not [folder.name for folder in folders if len(list(folder.glob("*.py"))) > MOST_FILES]


ROOMS = sorted(
    p for p in FILES if p.name == "__init__.py" and p.parent != SOURCE and p.parent.parent.name != "methods"
)


def test_each_room_says_what_belongs_there() -> None:
    silent = [p for p in ROOMS if not re.search(r"\bbelongs?\b", ast.get_docstring(parse(p)) or "")]
    assert not silent, "say what belongs there, and what does not"


def test_no_hidden_state() -> None:
    wrong = {str(p.relative_to(SOURCE)): found for p in FILES if (found := [*hidden_state(p)])}
    assert not wrong


def hidden_state(path: Path) -> Iterator[str]:
    tree = parse(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield "no `global`"
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield "`except` names its exception"
        if isinstance(node, ast.Attribute) and node.attr == "environ" and room(path) != "cli":
            yield "only the command line reads the environment"
    for node in tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.List | ast.Dict | ast.Set) and isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            name = target.id if isinstance(target, ast.Name) else ""
            if not (name.isupper() or name.lstrip("_").isupper() or name.startswith("__")):
                yield f"module-level state {name!r}: pass it as an argument"


def test_scheduler_and_policy_know_no_torch() -> None:
    for path in (SOURCE / "engine" / "scheduler.py", *(SOURCE / "control").glob("*.py")):
        tree = parse(path)
        names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
        assert not {n for n in names if n.split(".")[0] in ("torch", "numpy")}


def test_public_names_are_pinned() -> None:
    assert paceline.__all__ == [
        "LLM", "AsyncLLM", "CapacityError", "Completion", "ConfigError", "Delta", "LoadError", "PacelineError",
        "PairError", "PromptError", "RequestFailed", "SamplingParams", "Stats", "TokenLogprob", "UsageError",
        "WeightsError", "__version__",
    ]  # fmt: skip
    assert all(hasattr(paceline, name) for name in paceline.__all__)


def test_the_step_fits_on_one_screen() -> None:
    (step,) = [f for f in functions(parse(SOURCE / "engine" / "step.py")) if f.name == "step"]
    assert (step.end_lineno or 0) - step.lineno < 80
