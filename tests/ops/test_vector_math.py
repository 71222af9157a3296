"""The first call of torch's vector math in a process gives what all later calls give, with any number of threads."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from test_architecture import FILES, SOURCE, modules_of, parse

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "processes" / "first_calls.py"
HOME = "paceline.ops.base"  # where the call is made
# A process that has imported torch with one thread. Its arguments are those of `Asked`.
PROGRAM = """
import importlib, importlib.util, sys
import torch

path, module, machine, forks, *names = sys.argv[1:]
spec = importlib.util.spec_from_file_location("first_calls", path)
recipe = importlib.util.module_from_spec(spec)
spec.loader.exec_module(recipe)
torch.set_num_threads(1)
found = recipe.detected()
assert found is None or found.number.value == -1, "the vector math was called before"
known = found is not None and (machine != "intel" or found.as_intel())
if module:
    importlib.import_module(module)
print(int(known), -1 if found is None else found.number.value)
for name in names:
    print(name, recipe.differing(recipe.functions()[name], int(forks)))
"""


class Asked:
    """What such a process says of the first calls in its forks.

    `module`: what it imports then, or "". `machine`: "intel" or "". `forks`: of each name.
    """

    def __init__(self, module: str, machine: str, forks: int, names: list[str]) -> None:
        command = [sys.executable, "-c", PROGRAM, str(RECIPE), module, machine, str(forks), *names]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE.parent)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == 0, done.stderr
        first, *rest = done.stdout.splitlines()
        self.known, self.number = (int(word) for word in first.split())
        self.differing = {name: int(count) for name, count in (line.split() for line in rest)}


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("first_calls", RECIPE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("machine", ["", "intel"])
def test_first_calls(recipe: ModuleType, machine: str) -> None:
    """In a hundred processes, of all functions of the vector math, and of others with something to set up."""
    names = [*recipe.VML] if machine else [*recipe.functions()]
    asked = Asked(HOME, machine, 4 if machine else 1, names)
    if machine and not asked.known:
        pytest.skip("needs torch with MKL, and AVX2")
    assert asked.differing == dict.fromkeys(names, 0)
    assert asked.number >= 0 or not asked.known, "threads would find out what the processor is, at once"


def test_another_number_is_another_result(recipe: ModuleType) -> None:
    """What a thread computes that comes in between: so the test above can fail. All of them share the one variable."""
    if (found := recipe.detected()) is None or torch.backends.cpu.get_cpu_capability() not in recipe.INTEL:
        pytest.skip("needs torch with MKL, and AVX2")
    settled, between = found.number.value, recipe.INTEL[torch.backends.cpu.get_cpu_capability()]
    x, same = torch.rand(4, 500) * 0.8 + 0.1, []
    try:
        for name in recipe.VML:
            found.number.value = between
            first = recipe.functions()[name](x)
            found.number.value = settled
            if torch.equal(first, recipe.functions()[name](x)):
                same.append(name)
    finally:
        found.number.value = settled
    assert not same


def doors() -> dict[Path, set[str]]:
    """Where a process of ours may begin, and all that it then imports: a command's modules, the package's, programs."""
    modules = {_module(path): path for path in FILES}
    names = ("paceline.llm", "paceline.async_llm", "paceline.cluster.replica")
    begin = {modules[name]: {name} for name in names}
    for path in FILES:
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8"):
            begin[path] = {_module(path)}
        elif path.parent.name == "cli":
            inner = (
                f for f in ast.walk(parse(path)) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)
            )
            begin[path] = {_module(path)}.union(*(modules_of(function) for function in inner))
    return begin


def _module(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_each_door_leads_to_it() -> None:
    """No door leads to torch by a way that leaves the call out."""
    modules = {_module(path): path for path in FILES}
    at_import = {name: _top(path) for name, path in modules.items()}
    with_torch = {name for name, path in modules.items() if _imports_torch(path)}
    without = set()
    for door, begin in doors().items():
        reached, waiting = set(), [*begin]
        while waiting:
            if (name := waiting.pop()) not in reached:
                reached.add(name)
                waiting += at_import[name]
        if reached & with_torch and HOME not in reached:
            without.add(_module(door))
    assert without == {"paceline.cli.audit"}, (
        "it asks servers over HTTP, and computes a chance from a few numbers"
    )


def _statements(path: Path) -> list[ast.stmt]:
    """Those that an import runs."""
    return [
        node
        for node in parse(path).body
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]


def _top(path: Path) -> set[str]:
    return set().union(*(modules_of(node) for node in _statements(path)))


def _imports_torch(path: Path) -> bool:
    return any(
        isinstance(node, ast.Import) and any(name.name.split(".")[0] == "torch" for name in node.names)
        for node in _statements(path)
    )
