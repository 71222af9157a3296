"""Memory that every step reads, weights and K/V: in huge pages where the system has them; and objects that stay.

In pages of 4 KB, 18 MB of weights need 4,600 entries of a translation buffer that has some 2,000, so each step walks the
page tables thousands of times; in pages of 2 MB they need nine. Linux gives them to whoever asks (madvise(2),
MADV_HUGEPAGE); elsewhere, or where they are switched off, this is ordinary memory.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import mmap
import weakref
from functools import cache
from pathlib import Path

import torch

HUGE = 1 << 21  # bytes of a huge page
BLOCK = 1 << 25  # bytes asked of the system at once: what is not touched costs nothing
LINE = 64  # bytes of a cache line
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")  # of Linux: always, madvise or never


def why_not() -> str | None:
    """None if the system grants huge pages, else one line that says why not and what to do."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return "this system has no huge pages to ask for"
    try:
        setting = SETTING.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return f"this kernel has no huge pages: {SETTING} cannot be read"
    if "[never]" in setting:
        return f"huge pages are switched off: `echo madvise | sudo tee {SETTING}` makes every step some percent faster"
    return None


class Loaded:
    """Bytes of all weights that this process computes with."""

    total = 0

    @classmethod
    def add(cls, weights: torch.Tensor) -> None:
        cls.total += len(weights)
        weakref.finalize(weights, cls._drop, len(weights)).atexit = False

    @classmethod
    def _drop(cls, size: int) -> None:
        cls.total -= size


@cache
def last_level_cache() -> int:
    """Bytes of the largest cache of the first processor, 0 where the system does not say (it does on Linux)."""
    sizes = [0]
    for entry in CACHES.glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            text = entry.read_text(encoding="ascii").strip()
            sizes.append(int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1:], 0))
    return max(sizes)


def freeze_objects() -> None:
    """Leave what exists now out of all later garbage collections: for a process that has loaded what it will run.

    A full collection walks every object, of which there are 180,000 once `demo` is loaded: up to 80 ms in the middle
    of a text.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # what is left at the end is to be found and closed as ever


def give_back_freed() -> None:
    """Return to the system what was freed: glibc keeps it, for each thread apart, as malloc_trim(3) says.

    Reading a text of 4 MB takes 300 MB for moments, and a server would hold them for good. Does nothing elsewhere.
    """
    with contextlib.suppress(AttributeError, OSError):  # musl, macOS
        ctypes.CDLL(None).malloc_trim(0)


class Arena:
    """Hands out zeros one after the other, since most matrices are smaller than a huge page.

    A block lives as long as a tensor in it.
    """

    def __init__(self) -> None:
        self._block: mmap.mmap | None = None
        self._next = 0  # byte of the block that is free

    def zeros(self, count: int) -> torch.Tensor:
        """uint8 [count], at the beginning of a cache line. Raises RuntimeError when there is no memory."""
        if not count or not self._has_room(count):
            return torch.zeros(count, dtype=torch.uint8)
        assert self._block is not None
        begin = self._next
        self._next += -(-count // LINE) * LINE
        return torch.frombuffer(self._block, dtype=torch.uint8, count=count, offset=begin)

    def _has_room(self, count: int) -> bool:
        """Whether the block has, or a new one was begun that has."""
        if self._block is not None and self._next + count <= len(self._block):
            return True
        if not hasattr(mmap, "MADV_HUGEPAGE"):
            return False
        size = max(BLOCK, -(-count // HUGE) * HUGE) + HUGE
        try:
            block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:
            return False
        with contextlib.suppress(OSError):  # a kernel without huge pages
            block.madvise(mmap.MADV_HUGEPAGE)
        self._block, self._next = block, -torch.frombuffer(block, dtype=torch.uint8).data_ptr() % HUGE
        return True
