"""What fits on a GPU, and what is said where it does not: a card is stood in for, none is needed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from paceline import LLM, CapacityError, UsageError
from paceline.capacity import bytes_on_gpu, check_gpu, faster_on_cpu, make_cache
from paceline.cli import main
from paceline.config import EngineConfig
from paceline.forecast import gpu_memory
from paceline.forecast.estimate import size_of
from paceline.forecast.published import published
from paceline.forecast.rates import readers, seconds_each
from paceline.hub.resolve import bundled
from paceline.models.config import parse_target
from paceline.models.families import spec_of
from paceline.ops.reference import EagerRunner
from paceline.ops.runners import pick_device

GIB = 1 << 30


def bundled_pair() -> tuple[Path, Path]:
    target, assistant = bundled("target"), bundled("assistant")
    assert target is not None
    assert assistant is not None
    return target, assistant


@pytest.mark.parametrize(
    ("options", "free", "hint"),
    [
        ({}, 1.262, "use --quantize int4"),
        ({"quantize": "int4"}, 1.1, "use a smaller model, or --device cpu"),
        ({"cache_memory": 4 * GIB}, 2.0, "lower --cache-memory"),
        ({"quantize": "int4"}, 1.258, "use --quantize-drafter int4, or --drafter ngram"),
    ],
)
def test_what_does_not_fit_is_said_by_part(options: dict[str, object], free: float, hint: str) -> None:
    target, drafter = bundled_pair()
    with pytest.raises(CapacityError) as error:
        check_gpu(EngineConfig(**options), target, drafter, int(free * GIB))  # type: ignore[arg-type]
    said = str(error.value)
    assert f"the GPU has {free:.2f} GiB free" in said
    for part in ("weights", "drafter", "captured steps"):
        assert re.search(rf"\b{part} \d+\.\d+ [MG]iB", said)
    assert said.endswith(hint)
    assert "\n" not in said


def test_what_fits_and_what_it_takes() -> None:
    target, drafter = bundled_pair()
    assert check_gpu(EngineConfig(), target, drafter, 2 * GIB) == bytes_on_gpu(drafter, None)
    stored, half, quarter = (bytes_on_gpu(target, kind) for kind in (None, "int8", "int4"))
    assert stored > half > quarter > stored // 4


def test_what_a_drafter_and_captured_steps_take_is_kept_free(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = spec_of("gemma4_text").layout(parse_target(published("gemma-4-e2b")[1]))  # type: ignore[index]
    sizes: list[int] = []

    def plan(layout: object, budget: int, *rest: object) -> tuple[dict[str, int], int]:
        sizes.append(budget)
        raise CapacityError("seen enough")

    monkeypatch.setattr("paceline.capacity.free_memory", lambda device: 10 * GIB)
    monkeypatch.setattr("paceline.capacity.plan_context", plan)
    target = SimpleNamespace(
        layout=layout, device=torch.device("cuda"), kv_dtype=torch.bfloat16, max_len=1024
    )
    for beside in (0, GIB):
        with pytest.raises(CapacityError):
            make_cache(target, EngineConfig(), 1.0, beside)  # type: ignore[arg-type]
    assert sizes == [int(9 * GIB * 0.8), int(8 * GIB * 0.8)]


def test_a_full_gpu_is_an_error_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total of ..."
        )

    monkeypatch.setattr("paceline.assembly.load_target", load)
    with pytest.raises(CapacityError, match=r"out of memory. Tried to allocate 3.00 GiB: use --quantize"):
        LLM("demo")
    monkeypatch.setattr("paceline.cli.run.command.callback", load)
    monkeypatch.setattr("sys.argv", ["paceline", "run", "demo", "x"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 4
    assert "out of GPU memory: use" in capsys.readouterr().err


OLD = "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver\nby hand"


@pytest.mark.parametrize(
    ("name", "built", "there", "why"),
    [
        ("cuda", None, 0, "this PyTorch has no CUDA: use device='cpu', or install a CUDA build"),
        ("cuda", "13.0", OLD, "too old (found version 11040): update the driver, or install a PyTorch"),
        ("cuda:7", "13.0", 1, "'cuda:7', but only cuda:0 is there"),
        ("cuda:7", "13.0", 4, "'cuda:7', but cuda:0 to cuda:3 are there"),
        ("cuda", "13.0", 0, "sees no CUDA GPU: use device='cpu'"),
        ("cuda", "13.0", "No CUDA GPUs are available", "No CUDA GPUs are available: see nvidia-smi"),
    ],
)
def test_a_gpu_that_cannot_be_used_says_why(
    monkeypatch: pytest.MonkeyPatch, name: str, built: str | None, there: int | str, why: str
) -> None:
    def init() -> None:
        if isinstance(there, str):
            raise RuntimeError(there)

    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: isinstance(there, int) and there > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there if isinstance(there, int) else 0)
    with pytest.raises(UsageError) as error:
        pick_device(name)
    assert why in str(error.value)
    assert "\n" not in str(error.value)


def test_a_card_that_is_not_here_is_planned_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = published("google/gemma-4-31B-it")
    assert found is not None
    config = parse_target(found[1])
    drafter = gpu_memory.assistant_bytes(config)
    assert 0.8e9 < drafter < 1e9
    assert gpu_memory.assistant_bytes(parse_target(published("Qwen/Qwen3-8B")[1])) == 0  # type: ignore[index]
    kinds = ("bfloat16", "int8", "int4")
    sizes = {kind: size_of(config, kind) for kind in kinds}  # type: ignore[arg-type]
    large, middle, small = gpu_memory.needs(config, sizes, drafter, 8192, 24 * GIB)  # type: ignore[arg-type]
    assert large.longest is middle.longest is None
    assert small.total <= 24 * GIB  # 31B in int4 with its drafter and 8,192 tokens
    assert small.longest is not None
    assert small.longest >= 8192
    assert gpu_memory.needs(config, sizes, drafter, small.longest, 24 * GIB)[2].total <= 24 * GIB  # type: ignore[arg-type]
    assert large.total == sum((large.weights, large.drafter, large.cache, large.beside))
    layout = spec_of(config.model_type).layout(config)
    full = layout.bytes_per_token(2)["full_attention"]
    assert gpu_memory.cache_bytes(layout, 20_000) - gpu_memory.cache_bytes(layout, 10_000) == pytest.approx(
        10_000 * full, rel=0.01
    )
    monkeypatch.setattr(
        "sys.argv", ["paceline", "info", "demo", "--no-measure", "--gpu-memory", "8", "--context", "100"]
    )
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "on a GPU with 8.00 GiB, one text of 100 tokens:" in out
    assert out.count("4,096\n") >= 3  # whole contexts of demo


def test_tables_are_in_the_memory_of_a_gpu() -> None:
    config = parse_target(published("google/gemma-4-E2B-it")[1])  # type: ignore[index]
    size = size_of(config, "bfloat16")
    assert gpu_memory.weights_of(config, "bfloat16", size) == pytest.approx(size.file, rel=0.01)


def test_info_on_a_gpu_says_what_fits_and_the_most_that_it_can_write(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    card = torch.device("cuda")
    monkeypatch.setattr("paceline.ops.runners.pick_device", lambda name: card)
    monkeypatch.setattr(
        "paceline.ops.runners.pick_runner", lambda *_: (EagerRunner(), "captured kernels on cuda")
    )
    monkeypatch.setattr("paceline.capacity.free_memory", lambda device: 24 * GIB)
    monkeypatch.setattr("paceline.forecast.rates.read_rate", lambda device: 1e12)
    monkeypatch.setattr("sys.argv", ["paceline", "info", "google/gemma-4-31B-it", "--json"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["gpu_memory"] == facts["free_memory"] == 24 * GIB
    assert [one["context"] is not None for one in facts["fits"]] == [False, False, True]
    config = parse_target(published("google/gemma-4-31B-it")[1])  # type: ignore[index]
    read = size_of(config, "int4")
    assert facts["fits"][2]["speed"] == pytest.approx(1e12 / (read.layers + read.head))
    assert facts["next"].endswith("--quantize int4")
    assert facts["gpu"][2]["total"] <= 24 * GIB


def test_auto_says_where_the_cpu_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = "plain torch on cuda: triton is not installed"
    target, _ = bundled_pair()
    said = faster_on_cpu(EngineConfig(), slow, target)
    assert said is not None
    assert said.endswith("use --device cpu")
    assert faster_on_cpu(EngineConfig(device="cuda"), slow, target) is None  # as asked
    assert faster_on_cpu(EngineConfig(), "captured kernels on cuda", target) is None
    monkeypatch.setattr("paceline.capacity.TINY", 1 << 20)
    assert faster_on_cpu(EngineConfig(), slow, target) is None


class Clock:
    """Stands in for an event of a GPU on which a call takes 3 ms."""

    calls, made = 0, list["Clock"]()

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0

    def record(self) -> None:
        self.at = Clock.calls

    def synchronize(self) -> None:
        Clock.made.append(self)

    def elapsed_time(self, other: Clock) -> float:
        return 3.0 * (other.at - self.at)


def test_times_on_a_gpu_are_those_of_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    def call() -> None:
        Clock.calls += 1

    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert seconds_each(call, torch.device("cuda"), 0.01) == pytest.approx(3e-3)
    assert len(Clock.made) >= 3  # groups


def test_what_is_read() -> None:
    data = torch.randn(64, 128).bfloat16()
    by_vector, most, total = (read() for read in readers(data))
    assert torch.allclose(by_vector.float(), data.float().sum(1), rtol=0.05, atol=0.5)  # type: ignore[attr-defined]
    assert most == data.view(torch.int32).max()
    assert total == data.view(torch.int32).sum()
