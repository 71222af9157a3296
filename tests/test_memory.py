"""Memory in huge pages: zeros that do not overlap, outlive their arena, and are there without them; objects that stay."""

from __future__ import annotations

import errno
import gc
import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline import memory
from paceline.memory import BLOCK, HUGE, LINE, Arena, freeze_objects, give_back_freed


def test_pieces_are_zero_aligned_and_do_not_overlap() -> None:
    arena = Arena()
    sizes = [1, 63, 64, 65, 4096, 0, BLOCK // 2, BLOCK, 3 * BLOCK + 5, 7]
    pieces = [arena.zeros(size) for size in sizes]
    for i, (piece, size) in enumerate(zip(pieces, sizes, strict=True)):
        assert piece.dtype == torch.uint8
        assert piece.shape == (size,)
        assert not piece.any()
        piece.fill_(i + 1)
    for i, piece in enumerate(pieces):
        assert (piece == i + 1).all()
        assert piece.data_ptr() % LINE == 0 or not len(piece)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no huge pages on this system")
def test_large_pieces_begin_at_a_huge_page() -> None:
    arena = Arena()
    assert arena.zeros(BLOCK + 1).data_ptr() % HUGE == 0
    assert arena.zeros(BLOCK + 1).data_ptr() % HUGE == 0


def test_a_piece_outlives_its_arena() -> None:
    arena = Arena()
    piece = arena.zeros(HUGE)
    piece.fill_(3)
    arena.zeros(BLOCK)  # begins a new block
    del arena
    gc.collect()
    assert (piece == 3).all()


def test_without_huge_pages_it_is_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(memory.mmap, "MADV_HUGEPAGE", raising=False)
    assert Arena().zeros(100).tolist() == [0] * 100


def test_a_system_that_refuses_the_block_is_asked_in_the_ordinary_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(memory.mmap, "MADV_HUGEPAGE", 14, raising=False)
    monkeypatch.setattr(memory.mmap, "mmap", refuse)
    assert Arena().zeros(100).tolist() == [0] * 100


def test_why_there_are_no_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = tmp_path / "enabled"
    monkeypatch.setattr(memory, "SETTING", setting)
    monkeypatch.setattr(memory.mmap, "MADV_HUGEPAGE", 14, raising=False)
    assert "cannot be read" in str(memory.why_not())
    setting.write_text("always madvise [never]\n", encoding="ascii")
    assert f"echo madvise | sudo tee {setting}" in str(memory.why_not())
    for granted in ("[always] madvise never\n", "always [madvise] never\n"):
        setting.write_text(granted, encoding="ascii")
        assert memory.why_not() is None
    monkeypatch.delattr(memory.mmap, "MADV_HUGEPAGE")
    assert "no huge pages to ask for" in str(memory.why_not())


def test_what_is_loaded_is_left_out_of_later_collections() -> None:
    before = gc.get_freeze_count()
    cycle: list[object] = []
    cycle.append(cycle)
    try:
        freeze_objects()
        assert gc.get_freeze_count() > before
        assert not any(one is cycle for one in gc.get_objects())
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_what_was_freed_is_given_back_where_the_system_can(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Library:
        def __init__(self, name: str | None) -> None:
            assert name is None  # the C library that this process runs with

        def malloc_trim(self, pad: int) -> int:
            asked.append(pad)
            return 1

    give_back_freed()  # the real one
    monkeypatch.setattr(memory.ctypes, "CDLL", Library)
    give_back_freed()
    assert asked == [0]
    monkeypatch.delattr(Library, "malloc_trim")  # as of musl and of macOS
    give_back_freed()


def test_the_last_level_cache_is_the_largest_that_the_system_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "CACHES", tmp_path)
    ask = memory.last_level_cache.__wrapped__
    assert ask() == 0
    for i, size in enumerate(("32K", "1024K", "32M\n", "", "?")):
        (tmp_path / f"index{i}").mkdir()
        (tmp_path / f"index{i}" / "size").write_text(size)
    assert ask() == 32 << 20


def test_a_process_that_froze_its_objects_ends_without_complaints() -> None:
    code = """
from paceline import LLM, SamplingParams
from paceline.memory import freeze_objects
llm = LLM("demo", max_model_len=64)
llm.generate(["def"], SamplingParams(max_tokens=8))
freeze_objects()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
