"""A tower in slices: the same bits whatever comes between them, whose turn it is, and work that nobody wants any more."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from media_models import build_seeing, picture
from paceline import AsyncLLM
from paceline.config import EngineConfig
from paceline.errors import RequestFailed
from paceline.media.build import reader_of
from paceline.media.reader import MediaReader
from paceline.media.talk import MediaItem, Talk
from paceline.models.registry import load_target
from paceline.models.towers import encoder
from paceline.models.towers.base import whole
from paceline.models.towers.gemma4_vision import GemmaVision, parse_vision, vision_shapes
from paceline.ops import native
from paceline.text.tokenizer import Tokenizer
from paceline.turns import IDLE, TURN, Turns, wanted_while

CONFIG = {
    "hidden_size": 72, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 36,
    "position_embedding_size": 64, "use_clipped_linears": True,
}  # fmt: skip
PIXELS = torch.randint(
    0, 256, (48 * 5, 48 * 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
)


def tower(dtype: torch.dtype) -> GemmaVision:
    """A small tower with random weights, of which the bounds cut some values."""
    config, made = parse_vision(CONFIG, 96, False), torch.Generator().manual_seed(0)

    def take(name: str) -> torch.Tensor:
        shape = vision_shapes(config)[name]
        if not shape:
            return torch.tensor(-2.0 if name.endswith("min") else 2.0)
        values = torch.randn(shape, generator=made)
        return (1 + 0.1 * values if len(shape) == 1 else values / shape[-1] ** 0.5).to(dtype)

    return GemmaVision(config, take)


native_only = pytest.mark.skipif(not native.available(), reason=str(native.why_not()))


@native_only
@pytest.mark.parametrize("isa", ["best", "floats", "avx2", "generic"])
def test_native_layers_are_those_of_torch(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    if not native._extension().choose_isa(isa):
        pytest.skip(f"this processor has no {isa}")
    try:
        for dtype in (torch.float32, torch.bfloat16):
            with monkeypatch.context() as patched:
                patched.setattr(encoder.Encoder, "available", lambda device: None)
                by_torch = tower(dtype)
            assert by_torch.encoder is None
            expected, found = whole(by_torch.slices(PIXELS)), whole(tower(dtype).slices(PIXELS))
            if dtype == torch.bfloat16 and native.bf16_dot():
                assert torch.cosine_similarity(found, expected).min() > 0.998
                assert not torch.equal(found, expected)
            else:
                assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    finally:
        native._extension().choose_isa("best")


@native_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_slices(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    seeing = tower(dtype)
    threads = native._extension().threads()
    expected = whole(seeing.slices(PIXELS))
    try:
        native.set_threads(3)
        assert torch.equal(whole(seeing.slices(PIXELS)), expected)
        monkeypatch.setattr(encoder, "ROWS", 37)
        one, other = seeing.slices(PIXELS), seeing.slices(PIXELS.flip(0))
        for turn in range(9):  # two pictures at once, and more slices of one than of the other
            next(one)
            next(other)
            native.set_threads(1 + turn % 2)
            next(one)
        flipped = whole(other)
        assert torch.equal(whole(one), expected)
        monkeypatch.undo()
        assert torch.equal(whole(seeing.slices(PIXELS.flip(0))), flipped)
        assert not torch.equal(flipped, expected)
    finally:
        native.set_threads(threads)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_steps_and_slices_have_half_of_the_time_each() -> None:
    clock, done = Clock(), list[str]()
    turns = Turns(clock)

    def slices() -> Generator[None, None, str]:
        for _ in range(6):
            while not turns._coming:  # the engine always has a next step
                time.sleep(0)
            clock.now += 0.012
            done.append("slice")
            yield
        return "seen"

    found = list[str]()
    beside = threading.Thread(target=lambda: found.append(turns.run(slices())))

    def step() -> None:
        with turns.step():
            clock.now += 0.006
            done.append("step")
            while not turns._waiting and beside.is_alive():
                time.sleep(0)

    beside.start()
    while beside.is_alive():
        step()
    assert found == ["seen"]
    # two slices are what is longer than TURN; then as much time is the steps'
    assert TURN < 0.024 < 2 * TURN
    slices_in_a_row = "".join(one[1] for one in done).strip("t").split("tttt")
    assert slices_in_a_row == ["ll", "ll", "ll"]


def test_slices_run_at_once_where_no_step_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    turns = Turns(clock)
    monkeypatch.setattr(
        threading.Condition, "wait", lambda *_: pytest.fail("slices waited for an idle engine")
    )
    with turns.step():
        clock.now += 1
    clock.now += 2 * IDLE
    with turns.beside():
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("e2b")
    build_seeing("e2b", folder)
    return folder


def reader(folder: Path) -> MediaReader:
    target = load_target(folder)
    found = reader_of(EngineConfig(target=str(folder)), folder, target, Tokenizer.load(folder))
    assert found is not None
    return found


def test_a_request_that_nobody_wants_gives_up_at_the_next_slice(folder: Path) -> None:
    seeing, talk = reader(folder), Talk([], [MediaItem("image", picture(100, 70), budget=70)])
    seeing.turns = Turns(iter(range(10**6)).__next__)  # each slice is a turn
    asked = iter([True] * 3 + [False] * 9)
    with wanted_while(lambda: next(asked)), pytest.raises(RequestFailed, match="given up"):
        seeing.prompt("<|image|>", talk)
    assert len(list(asked)) == 8
    (again,) = seeing.prompt("<|image|>", talk).media
    (fresh,) = reader(folder).prompt("<|image|>", talk).media
    assert torch.equal(again.vectors, fresh.vectors)


def test_a_cancelled_call_gives_its_picture_up(folder: Path) -> None:
    async def run() -> list[int]:
        async with AsyncLLM(folder, profile_dir="none") as llm:
            media = llm._llm.reader
            assert media is not None
            begun, made, real = threading.Event(), list[int](), media.turns.run

            def slowly(slices: Generator[None, None, torch.Tensor]) -> torch.Tensor:
                def watched() -> Generator[None, None, torch.Tensor]:
                    while True:
                        begun.set()
                        made.append(1)
                        cancelled.wait(10)
                        yield

                slices.close()
                return real(watched())

            cancelled = threading.Event()
            media.turns.run = slowly  # type: ignore[method-assign]
            call = asyncio.create_task(llm.generate("<|image|>", images=[picture(50, 50)], max_tokens=2))
            await asyncio.to_thread(begun.wait, 10)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            cancelled.set()
            while media._working.locked():
                await asyncio.sleep(0.001)
            return made

    assert asyncio.run(run())  # its slices would never have ended
