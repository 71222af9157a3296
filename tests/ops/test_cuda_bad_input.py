"""What is done where a card, Triton or a capture fails: no GPU is needed, kernels run under Triton's interpreter."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch

import interpreted  # noqa: F401
from paceline.config import EngineConfig
from paceline.core import ForwardBatch
from paceline.ops.base import Ops, Value, Weight
from paceline.ops.reference import EagerRunner
from paceline.ops.runners import pick_runner

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    ("card", "triton", "why"),
    [((7, 5), True, "compute capability 7.5 is older than 8.0"), ((9, 0), False, "triton is not installed")],
)
def test_plain_torch_is_said(
    monkeypatch: pytest.MonkeyPatch, card: tuple[int, int], triton: bool, why: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: find(name) if triton or name != "triton" else None
    )
    runner, said = pick_runner(EngineConfig(device="cuda"), CUDA)
    assert isinstance(runner, EagerRunner)
    assert said.startswith("plain torch on cuda: ")
    assert why in said


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_capture_that_is_broken_off_costs_nothing(error: type[BaseException]) -> None:
    """Ctrl-C in the middle of it: the next step captures. What cannot be captured is launched, which is said."""
    from paceline.ops.cuda.runner import CudaRunner

    notes: list[str] = []
    tries: list[int] = []

    def capture(launch: Callable[[], None]) -> Callable[[], None]:
        tries.append(1)
        if len(tries) == 1:
            raise error("broken off")
        return launch

    runner = CudaRunner(CPU, torch.float32, note=notes.append)
    runner._shared.capture = capture
    weight = Weight(torch.randn(48, 32), "float32")

    def graph(ops: Ops) -> tuple[Value, ...]:
        return (ops.linear(ops.given("x", 32), weight),)

    x, zeros = torch.randn(2, 32), torch.zeros(2, dtype=torch.int64)
    rows = ForwardBatch(zeros, zeros.int(), zeros.int(), [0, 2])
    expected = x @ weight.data.T

    def run() -> torch.Tensor:
        return runner.run(graph, rows, None, {"x": x})[0].clone()

    first = run()
    assert torch.allclose(first, expected, atol=1e-4)
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            run()
        assert not notes
    else:
        assert torch.equal(run(), first)
        assert "kernel by kernel" in notes[0]
    for _ in range(3):
        assert torch.equal(run(), first)
    assert len(tries) == (2 if error is KeyboardInterrupt else 1)


def test_what_is_done_the_slow_way_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import paceline.ops.cuda.runner as module

    made: dict[str, Callable[[str], None]] = {}

    def runner(device: torch.device, dtype: torch.dtype, *, note: Callable[[str], None]) -> EagerRunner:
        made["note"] = note
        return EagerRunner(dtype)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(module, "CudaRunner", runner)
    assert pick_runner(EngineConfig(device="cuda"), CUDA)[1] == "captured kernels on cuda (a card)"
    made["note"]("a step of 5 rows could not be captured")
    assert caplog.records[0].levelname == "WARNING"
    assert "could not be captured" in caplog.text
