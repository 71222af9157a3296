"""`check --processes`: fresh processes compute the same bits, and whatever makes one of them differ is found."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from media_models import build_seeing
from paceline import LLM
from paceline.check import again, processes, proof
from paceline.check.again import Order, observe
from paceline.check.processes import Circumstance, Starts, compare, finding, start
from paceline.check.subject import Subject
from paceline.cli import main
from paceline.errors import CapacityError, PacelineError

OPTIONS = {"threads": 2, "max_model_len": 256, "cache_memory": 2**26, "activations": "float32"}
PROMPTS = [[5, 6, 7, 8] * 4, [30, 31, 32, 33, 34, 35] * 2]


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> Order:
    folder: Path = tmp_path_factory.mktemp("seeing")
    build_seeing("moe26b", folder)
    return Order(str(folder), ["ngram"], OPTIONS, PROMPTS)


@pytest.fixture(scope="module")
def here(order: Order) -> dict[str, str]:
    """What this process computes."""
    with LLM(order.target, drafter="ngram", profile_dir="none", **OPTIONS) as llm:
        return observe(Subject(llm.engine, tuple(map(tuple, PROMPTS))), "")


def test_another_process_computes_the_same_bits(
    order: Order, here: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hard = Circumstance("all at once", threads=3, kept=True, stopped=True, first="pictures")
    monkeypatch.setattr(processes, "CIRCUMSTANCES", (hard,))
    seen = Starts()
    processes._add(seen, Circumstance("here"), dict(here))
    compare(order, 1, seen)
    found = finding(seen)
    assert found.outcome == "holds", found
    assert found.counts["processes"] == 2
    assert [*here] == ["logits", "soft tokens", "drafts", "texts"]
    assert "native kernels" in seen.arithmetic or "plain torch" in seen.arithmetic


def test_preemption_before_changes_nothing(order: Order, here: dict[str, str]) -> None:
    with LLM(order.target, drafter="ngram", profile_dir="none", **OPTIONS) as llm:
        assert observe(Subject(llm.engine, tuple(map(tuple, PROMPTS))), "preemption") == here


def test_one_is_killed_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The one that is asked for begins after another has loaded and is dead."""
    program = 'import sys, time; print(\'{"loaded": "kernels"}\', flush=True); time.sleep(%s); print(\'{"logits": "x"}\')'
    sleeps, begun, popen = [60, 0], [], subprocess.Popen
    monkeypatch.setattr(processes.child, "command", lambda module: _script(program % sleeps.pop(0))(module))

    def note(*args: Any, **named: Any) -> subprocess.Popen[str]:
        assert all(one.poll() == -signal.SIGKILL for one in begun)
        begun.append(popen(*args, **named))
        return begun[-1]

    monkeypatch.setattr(subprocess, "Popen", note)
    asked = Circumstance("killed", killed=True)
    said = start(Order("t", ["none"], {}, []), asked, tmp_path, random.Random(0))
    assert said == {"logits": "x", "arithmetic": "kernels"}
    assert len(begun) == 2
    seen = Starts()
    processes._add(seen, asked, said)
    assert seen.killed == 1


def test_half_a_picture_of_less_accuracy_is_found(
    order: Order, here: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the race of MKL did: half of the cosines of a picture's angles by kernels with 11 right bits."""
    exact = torch.Tensor.cos

    def coarse(self: torch.Tensor) -> torch.Tensor:
        out = exact(self)
        if out.numel() > 64:
            half = out.view(-1)[out.numel() // 2 :]
            half.copy_(half.view(torch.int32).bitwise_and(-4096).view(torch.float32))
        return out

    monkeypatch.setattr(torch.Tensor, "cos", coarse)
    with LLM(order.target, drafter="ngram", profile_dir="none", **OPTIONS) as llm:
        blurred = observe(Subject(llm.engine, tuple(map(tuple, PROMPTS))), "")
    seen = Starts()
    for one, name in ((here, "first"), (blurred, "another")):
        processes._add(seen, Circumstance(name), dict(one))
    assert blurred["soft tokens"] != here["soft tokens"]
    assert finding(seen).outcome == "refuted"
    assert "soft tokens" in finding(seen).words


@pytest.mark.parametrize("what", ["logits", "soft tokens", "drafts", "texts"])
def test_one_difference_refutes(what: str) -> None:
    seen = Starts()
    said = dict.fromkeys(("logits", "soft tokens", "drafts", "texts"), "same")
    for name, value in (("alone", "same"), ("alone", "same"), ("busy", "other"), ("busy", "same")):
        processes._add(seen, Circumstance(name), said | {what: value})
    found = finding(seen)
    assert found.outcome == "refuted"
    assert found.words == f"another process computed other {what}"
    assert found.divergence is not None
    assert found.divergence.case == "busy"
    assert found.counts[f"{what}: different"] == 1


def test_one_process_shows_nothing() -> None:
    seen = Starts()
    processes._add(seen, Circumstance("alone"), {"logits": "same"})
    assert finding(seen).outcome == "not shown"


def test_digests_see_a_bit_a_shape_and_a_type() -> None:
    x = torch.tensor([1.0, 2.0])
    others = (torch.nextafter(x, x + 1), x[None], x.double(), torch.tensor([2.0, 1.0]), -x)
    assert len({again.digest([value]) for value in (x, *others)}) == 6
    assert again.digest([x.clone()]) == again.digest([x])


def _script(program: str) -> Callable[..., list[str]]:
    return lambda module: [sys.executable, "-I", "-c", program]


@pytest.mark.parametrize(
    ("program", "error", "words"),
    [
        ("import os; os.abort()", RuntimeError, f"a process ended with {-signal.SIGABRT}"),
        ("raise SystemExit('no such kernels')", RuntimeError, "ended with 1: no such kernels"),
        ('print(\'{"error": "too large", "kind": "CapacityError"}\')', CapacityError, "too large"),
        ('print(\'{"error": "no weights", "kind": "LoadError"}\')', PacelineError, "no weights"),
    ],
)
def test_one_that_breaks_is_told(
    program: str, error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(processes.child, "command", _script(program))
    with pytest.raises(error, match=words):
        start(Order("t", ["none"], {}, []), Circumstance("alone"), tmp_path, random.Random(0))


def test_plain_torch_is_compared_for_a_number_of_threads() -> None:
    """Also where nobody asked for it: kernels that are not usable fall back to it."""
    said = {"logits": "of two", "soft tokens of sound by 3 threads": "same"}
    for arithmetic, outcome in (("plain torch", "holds"), ("native kernels", "refuted")):
        seen = Starts()
        for threads, bits in ((0, "of two"), (3, "of three"), (3, "of three"), (0, "of two")):
            processes._add(seen, Circumstance("", threads), said | {"logits": bits, "arithmetic": arithmetic})
        assert finding(seen).outcome == outcome
    processes._add(seen, Circumstance("", 3), {"logits": "another", "arithmetic": "plain torch"})
    processes._add(seen, Circumstance("", 3), {"logits": "of three", "arithmetic": "plain torch"})
    assert finding(seen).counts["logits by 3 threads: different"] == 1


def test_what_is_busy_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[subprocess.Popen[bytes]] = []
    first = subprocess.Popen

    def note(*args: Any, **named: Any) -> subprocess.Popen[bytes]:
        begun.append(first(*args, **named))
        return begun[-1]

    monkeypatch.setattr(subprocess, "Popen", note)
    with processes._busy():
        assert all(one.poll() is None for one in begun)
    assert begun
    assert all(one.poll() is not None for one in begun)


def command(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    """The exit code of `paceline check demo --quick`, whose other proofs are left out."""
    monkeypatch.setattr(proof, "_stages", lambda *args: [])
    monkeypatch.setattr(sys, "argv", ["paceline", "check", "demo", "--quick", *args])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.mark.parametrize("differs", [False, True])
def test_the_command(
    differs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[Order, Circumstance]] = []

    def start(order: Order, circumstance: Circumstance, *_: Any) -> dict[str, str]:
        asked.append((order, circumstance))
        return {"logits": "same", "texts": str(differs and len(asked) == 3), "arithmetic": "native kernels"}

    monkeypatch.setattr(processes, "start", start)
    code = command(monkeypatch, "--processes", "12", "--threads", "2", "--json", str(tmp_path / "out.json"))
    out, kept = capsys.readouterr().out, (tmp_path / "out.json").read_text(encoding="utf-8")
    assert code == int(differs)
    assert [circumstance for _, circumstance in asked] == [
        *processes.CIRCUMSTANCES,
        processes.CIRCUMSTANCES[0],
    ]
    assert {(order.target, order.options["threads"]) for order, _ in asked} == {("demo", 2)}
    words = "another process computed other texts" if differs else "all bits were those of the first process"
    assert words in out
    (found,) = json.loads(kept)[0]["findings"]
    assert found["name"] == processes.NAME
    assert found["counts"]["processes"] == 12
    assert found["counts"]["texts: different"] == int(differs)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--processes", "1"], "not in the range"),
        (["--processes", "some"], "not a valid integer"),
        (["--processes", "2", "--verify", "typical"], "leave it out, or --verify typical"),
    ],
)
def test_what_the_command_refuses(
    args: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, *args) == 2
    assert words in capsys.readouterr().err
