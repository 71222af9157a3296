"""scripts/setup: which PyTorch it takes, and that it says in one line why it cannot go on."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import paceline

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"


@pytest.fixture
def choosing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("choose_torch", SCRIPTS / "choose_torch.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_cpu_never_gets_the_build_with_cuda(choosing: ModuleType) -> None:
    pinned = f"torch=={choosing.VERSION}"
    for reachable in (True, False):
        arguments, what, size, _ = choosing.choose(False, "linux", reachable)
        assert arguments[0] == pinned + "+cpu"  # a name that the plain index has nothing for
        assert (len(arguments) > 1) is reachable
        assert size + choosing.REST < 500
        assert "CPU build" in what
    arguments, what, size, _ = choosing.choose(True, "linux", True)
    assert (arguments, size > 1000, "CUDA" in what) == ([pinned], True, True)
    assert choosing.choose(False, "darwin", True)[0] == [pinned]


@pytest.mark.parametrize(
    ("version", "libc", "said"),
    [
        ((3, 10), ("glibc", "2.36"), "3.11 to 3.13, this one is 3.10"),
        ((3, 14), ("glibc", "2.36"), "3.11 to 3.13, this one is 3.14"),
        ((3, 12), ("", ""), "other than glibc (this is musl"),
        ((3, 12), ("glibc", "2.17"), "glibc 2.28 or later, this is 2.17"),
        ((3, 11), ("glibc", "2.28"), None),
        ((3, 13), ("glibc", "2.41"), None),
    ],
)
def test_what_cannot_work_is_said_in_one_line(
    version: tuple[int, int], libc: tuple[str, str], said: str | None, choosing: ModuleType
) -> None:
    found = choosing.unusable(version, libc)
    assert (found is None) is (said is None)
    assert said is None or said in found
    assert "\n" not in (found or "")


def test_a_full_disk_is_seen_before_the_download() -> None:
    script = [sys.executable, str(SCRIPTS / "choose_torch.py"), "--free", "100"]
    offline = {**os.environ, "https_proxy": "http://127.0.0.1:9"}  # nothing is asked of the network
    done = subprocess.run(script, capture_output=True, text=True, env=offline, check=False)
    assert done.returncode == 1
    assert re.fullmatch(
        r"scripts/setup: 100 MB are free here, and about \d+ are needed: make room.*\n", done.stderr
    )
    assert not done.stdout
    done = subprocess.run([*script[:-1], "99999"], capture_output=True, text=True, env=offline, check=True)
    assert done.stdout.startswith("torch==")
    assert "to download" in done.stderr


def checkout(tmp_path: Path, python: str) -> tuple[Path, dict[str, str]]:
    """A folder with scripts/setup, and the environment in which `python` is what it finds."""
    (tmp_path / "scripts").mkdir()
    for name in ("setup", "choose_torch.py"):
        shutil.copy(SCRIPTS / name, tmp_path / "scripts" / name)
    fake = tmp_path / "python-of-here"
    fake.write_text(f"#!/bin/sh\n{python}\n", encoding="utf-8")
    fake.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    return tmp_path / "scripts" / "setup", env | {"PYTHON": str(fake)}


def test_an_old_python_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    script, env = checkout(tmp_path, "exit 1")
    done = subprocess.run([str(script)], capture_output=True, text=True, env=env, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "paceline needs Python 3.11 to 3.13" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_an_environment_that_was_left_half_made_is_made_again(tmp_path: Path) -> None:
    script, env = checkout(tmp_path, 'case "$1" in -c) exit 0 ;; *) echo "made $*" >&2; exit 7 ;; esac')
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "left").write_text("", encoding="utf-8")
    done = subprocess.run([str(script)], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 7
    assert ".venv is not complete, it is made again" in done.stderr
    assert "made -m venv .venv" in done.stderr
    assert "run it again: what is installed already stays" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_the_version_stands_in_one_place() -> None:
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f"## {paceline.__version__}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_image_takes_the_same_torch(choosing: ModuleType) -> None:
    image = (ROOT / "deploy" / "image" / "Dockerfile").read_text(encoding="utf-8")
    assert set(re.findall(r"torch==(\S+?)[;+ ]", image)) == {choosing.VERSION}
    services = yaml.safe_load((ROOT / "deploy" / "image" / "compose.yaml").read_text(encoding="utf-8"))[
        "services"
    ]
    assert services["paceline"]["command"][0] == "serve"
    assert "ports" not in services["paceline"]  # it has no key: only its neighbour may reach it
    yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))


def test_an_image_needs_a_builder(tmp_path: Path) -> None:
    for tool, said in (("", "neither docker nor podman"), ("/bin/false", "/bin/false does not answer")):
        env = {"PATH": str(tmp_path), "CONTAINER": tool}
        (tmp_path / "dirname").unlink(missing_ok=True)
        (tmp_path / "dirname").symlink_to(shutil.which("dirname") or "dirname")
        bash = shutil.which("bash") or "bash"
        done = subprocess.run(
            [bash, str(SCRIPTS / "image")], capture_output=True, text=True, env=env, check=False
        )
        assert done.returncode == 1
        assert said in done.stderr
    done = subprocess.run([str(SCRIPTS / "image"), "tpu"], capture_output=True, text=True, check=False)
    assert done.returncode == 2


def test_help_of_the_test_command_installs_nothing(tmp_path: Path) -> None:
    """It runs in a copy without a Python: whatever it started would fail."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPTS / "test", tmp_path / "scripts" / "test")
    for flag in ("-h", "--help"):
        asked = subprocess.run(
            [tmp_path / "scripts" / "test", flag], capture_output=True, text=True, check=False
        )
        assert asked.returncode == 0
        assert "--fast" in asked.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["scripts"]


def test_the_fast_lane_names_tests_that_are_there() -> None:
    lane = re.search(r"FAST=\((.*?)\)", (SCRIPTS / "test").read_text(encoding="utf-8"), re.DOTALL)
    assert lane is not None
    assert len(paths := lane.group(1).split()) > 10
    assert all((ROOT / path).exists() for path in paths)
