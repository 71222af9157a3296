"""One recorded graph on a device: its places, the integers of a step, and a captured graph for each bucket.

A bucket is launched kernel by kernel the first time, which compiles them, and captured the second time. What cannot be
captured is launched so always: the same kernels, so the same bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from paceline.core import ForwardBatch
from paceline.errors import CapacityError, UsageError
from paceline.kv.cache import KVCache
from paceline.ops.cuda.context import Context, Keys
from paceline.ops.cuda.emitter import Lowered
from paceline.ops.cuda.kernels.attention import COLUMNS
from paceline.ops.cuda.launch import power
from paceline.ops.cuda.places import allocate
from paceline.ops.cuda.shape import (
    FIELDS,
    TEXTS,
    Bucket,
    Layout,
    Reach,
    Step,
    fill,
    fill_texts,
    lanes_of,
    round_up,
)

STAGES = 8  # steps that may be on their way to the device at a time
Captured = Callable[[], None]  # enqueues all that was captured


class Staging:
    """Small copies to the device out of pinned memory, which a later step writes only after they are done."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._next = device, 0
        self._buffers: list[Tensor] = [torch.empty(0, dtype=torch.int32)] * STAGES
        self._events: list[torch.cuda.Event | None] = [None] * STAGES

    def take(self, count: int) -> Tensor:
        """An int32 buffer on the host of at least `count`, to be filled and given to `send`."""
        self._next = (self._next + 1) % STAGES
        event = self._events[self._next]
        if event is not None:
            event.synchronize()
        if len(self._buffers[self._next]) < count:
            pinned = self._device.type == "cuda"
            self._buffers[self._next] = torch.zeros(power(count), dtype=torch.int32, pin_memory=pinned)
        return self._buffers[self._next]

    def send(self, to: Tensor, count: int) -> None:
        """Copy the first `count` of the buffer that was taken last."""
        to[:count].copy_(self._buffers[self._next][:count], non_blocking=True)
        if self._device.type == "cuda":
            event = self._events[self._next] or torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._events[self._next] = event


@dataclass(slots=True)
class Held:
    """What a plan knows of a bucket."""

    context: Context
    uses: int = 0
    captured: Captured | None = None
    failed: bool = False


@dataclass(slots=True, eq=False)
class Device:
    """What the plans of a runner share."""

    device: torch.device
    staging: Staging
    capture: Callable[[Callable[[], None]], Captured] | None  # None: nothing is captured
    note: Callable[[str], None]
    scratch: dict[str, Tensor] = field(default_factory=dict)
    generation: int = 0  # of scratch: what was captured before a change is not replayed any more


class Plan:
    """Runs a `Lowered` for any number of rows."""

    def __init__(self, lowered: Lowered, shared: Device) -> None:
        self.lowered, self._shared = lowered, shared
        self._capacity = 0
        self._generation = 0
        self._held: dict[Bucket, Held] = {}
        self._meta = torch.empty(0, dtype=torch.int32)
        self._cache: weakref.ref[KVCache] | None = None
        self.reaches: list[Reach] = []
        self._reach: dict[Keys, int] = {}
        self._further = 0

    @property
    def device(self) -> torch.device:
        return self._shared.device

    @property
    def staging(self) -> Staging:
        return self._shared.staging

    def captured(self, launch: Callable[[], None], what: str) -> Captured | None:
        """What enqueues all of `launch`, whose kernels have been launched before, at once; None, with a note, if not."""
        if self._shared.capture is None:
            return None
        try:
            return self._shared.capture(launch)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            self._shared.note(f"{what} could not be captured and is launched kernel by kernel: {error}")
            return None

    # -- sizes -------------------------------------------------------------------------------------------------

    def grow(self, rows: int) -> None:
        """Make room for so many rows. What was captured is given up if that moves anything."""
        if rows <= self._capacity:
            return
        capacity = max(16, rows)
        try:
            allocate(self.lowered.uses, capacity, self._shared.device)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"no memory on {self._shared.device} for the activations of {capacity} rows: "
                "lower prefill_chunk, step_tokens or cache_memory"
            ) from error
        self._capacity = capacity
        self._meta = torch.zeros(
            self._layout(capacity).size(4 * capacity),
            dtype=torch.int32,
            device=self._shared.device,
        )
        self._held.clear()

    def bind(self, cache: KVCache | None) -> None:
        """Read and write this cache from now on."""
        if cache is None or (self._cache is not None and self._cache() is cache):
            return
        self._cache = weakref.ref(cache)
        self.reaches, self._reach, self._capacity = [], {}, 0
        self._held.clear()
        for keys in self.lowered.attends:
            heads, _ = lanes_of(keys.heads // cache.layout.layers[keys.layer].kv_heads)
            reach = Reach(keys.window, keys.sees, COLUMNS // heads)
            if reach not in self.reaches:
                self.reaches.append(reach)
            self._reach[keys] = self.reaches.index(reach)

    # -- a step ------------------------------------------------------------------------------------------------

    def run(
        self, rows: ForwardBatch, cache: KVCache | None, given: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        """[rows, width] for each result: views that the next run writes over."""
        count = rows.count
        bucket = self.load(rows, cache)
        for name, ref in self.lowered.givens.items():
            value = given.get(name)
            if value is None or value.dim() != 2 or value.shape[0] < count or value.shape[1] != ref.width:
                shape = None if value is None else tuple(value.shape)
                raise UsageError(f"input {name!r} must be [{count}, {ref.width}], not {shape}")
            ref.rows(count).copy_(value[:count])
        self.enqueue(bucket)
        return tuple(ref.rows(count) for ref in self.lowered.results)

    def load(self, rows: ForwardBatch, cache: KVCache | None) -> Bucket:
        """Bring a step's integers to the device; what has to be enqueued for it."""
        self.bind(cache)
        count = rows.count
        padded = round_up(count)
        self.grow(padded)
        if not self.lowered.reads_rows:
            return Bucket(padded)
        assert cache is not None or not self.lowered.attends
        numbers = rows.numbers or (rows.tokens.tolist(), rows.positions.tolist(), rows.slots.tolist())
        branches = rows.branches
        runs, further = (rows.starts, []) if branches is None else (branches.runs, branches.further)
        layout = self._layout(padded)
        size = layout.size(2 * power(len(further)) if further else 0)
        staged = self._shared.staging.take(size)
        host = staged.numpy()
        bucket = fill(
            host, layout, Step(numbers, runs, None if rows.media is None else rows.media.reach), self.reaches
        )
        if branches is not None and cache is not None:
            cache.copy_pages(branches.copies)
            bucket = self._branch(host, layout, bucket, further)
        if self.lowered.recurs and cache is not None:
            bucket = replace(
                bucket, texts=fill_texts(host, layout, texts_of(rows.starts, numbers[1], numbers[2], cache))
            )
        self._shared.staging.send(self._meta, size)
        return bucket

    def _layout(self, rows: int) -> Layout:
        return Layout(rows, len(self.reaches), self.lowered.recurs)

    def _branch(
        self, host: np.ndarray, layout: Layout, bucket: Bucket, further: Seq[tuple[int, int]]
    ) -> Bucket:
        """Note the rows of trees that are stored for further branches."""
        if not further:
            return bucket
        count, host[1] = power(len(further)), len(further)
        host[layout.fixed : layout.fixed + len(further)] = [row for row, _ in further]
        host[layout.fixed + count : layout.fixed + count + len(further)] = [slot for _, slot in further]
        return Bucket(bucket.rows, bucket.tiles, bucket.sections, count)

    def enqueue(self, bucket: Bucket) -> None:
        """Compute what was loaded: replay what was captured, capture, or launch kernel by kernel."""
        held = self.held(bucket)
        if held.captured is not None:
            held.captured()
            return
        held.uses += 1
        if held.uses > 1 and not held.failed:
            held.captured = self.captured(lambda: self.launch(bucket), f"a step of {bucket.rows} rows")
            held.failed = held.captured is None
        if held.captured is not None:
            held.captured()
        else:
            self.launch(bucket)

    def held(self, bucket: Bucket) -> Held:
        """What is known of a bucket, its context among it."""
        if self._generation != self._shared.generation:
            self._held.clear()
            self._generation = self._shared.generation
        held = self._held.get(bucket)
        if held is None:
            held = self._held[bucket] = Held(self._context(bucket))
            generation = self._shared.generation
            self._reserve(held.context)
            if generation != self._shared.generation:
                return self.held(bucket)
        return held

    def launch(self, bucket: Bucket) -> None:
        """Enqueue every kernel. Nothing waits for the device."""
        context = self.held(bucket).context
        for launch in self.lowered.launches:
            launch(context)

    def _reserve(self, context: Context) -> None:
        """Have the scratch memory that this bucket's attention needs."""
        cache = context.cache
        if cache is None or not context.bucket.few:
            return
        for keys, number in self._reach.items():
            layer = cache.layout.layers[keys.layer]
            heads, _ = lanes_of(keys.heads // layer.kv_heads)
            parts = context.bucket.tiles[number] * (keys.heads // heads) * context.bucket.sections[number]
            context.scratch("attention", parts * COLUMNS * layer.value_dim)
            context.scratch("mass", parts * 2 * COLUMNS)

    def _context(self, bucket: Bucket) -> Context:
        layout = self._layout(bucket.rows)
        places = {name: layout.field(name) for name in FIELDS}
        if self.lowered.recurs:
            places |= {f"text_{name}": layout.text(name) for name in TEXTS}
        places |= {
            "count": 0,
            "further_count": 1,
            "further_rows": layout.fixed,
            "further_slots": layout.fixed + bucket.further,
        }
        return Context(
            bucket,
            lambda name: self._meta[places[name] :],
            lambda number: self._meta[layout.tiles(number) :],
            self._reach.__getitem__,
            None if self._cache is None else self._cache(),
            self._scratch,
        )

    def _scratch(self, name: str, count: int) -> Tensor:
        """Memory that no launch expects anything in."""
        held = self._shared.scratch.get(name)
        if held is None or len(held) < count:
            held = torch.empty(power(max(count, 1 << 12)), dtype=torch.float32, device=self._shared.device)
            self._shared.scratch[name] = held
            self._shared.generation += 1
        return held


def texts_of(starts: Seq[int], positions: Seq[int], slots: Seq[int], cache: KVCache) -> list[tuple[int, ...]]:
    """(first row, rows, state, where it stands, where it is to be left) of each text. Raises UsageError."""
    states = cache.states
    assert states is not None, "the layout of a model with linear attention has states"
    out: list[tuple[int, ...]] = []
    for start, end in pairwise(starts):
        if start < end:
            span = states.span(slots[start], positions[start], positions[end - 1] + 1)
            out.append((start, end - start, *span))
    return out
