"""`check --processes`: fresh processes compute the same bits, and whatever makes one of them differ is found."""

from __future__ import annotations

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
from paceline.check import again, processes
from paceline.check.again import Order, observe
from paceline.check.processes import Circumstance, Starts, compare, finding, start
from paceline.check.subject import Subject
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


def test_processes_compute_the_same_bits(
    order: Order, here: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = (
        Circumstance("three threads, busy, pictures first", threads=3, busy=True, first="pictures"),
        Circumstance(
            "killed, stopped, after preemption", kept=True, killed=True, stopped=True, first="preemption"
        ),
    )
    monkeypatch.setattr(processes, "CIRCUMSTANCES", asked)
    seen = Starts()
    compare(order, 2, seen)
    found = finding(seen)
    assert found.outcome == "holds", found
    assert found.counts["processes"] == 2
    assert found.counts["killed before"] == 1
    assert seen.first == here
    assert [*here] == ["logits", "soft tokens", "drafts", "texts"]
    assert "native kernels" in seen.arithmetic or "plain torch" in seen.arithmetic


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


def test_plain_torch_keeps_its_number_of_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[Any] = []

    class Stop(Exception):
        pass

    def running(order: Order, fill: int) -> Any:
        given.append(order.options)
        raise Stop

    monkeypatch.setattr(processes, "_running", running)
    for native in (True, False):
        with pytest.raises(Stop):
            start(Order("t", ["none"], {"native": native, "threads": 2}, []), Circumstance("", threads=3),
                  tmp_path, random.Random(0))  # fmt: skip
    assert [options["threads"] for options in given] == [3, 2]


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
