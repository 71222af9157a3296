"""One GGUF file, or all parts of a split one: metadata and tensor table, memory-mapped and checked.

Nothing that the header claims is believed before it is held against the size of the file: counts, lengths, offsets.
Metadata values are decoded when they are asked for, so that a vocabulary of 262,144 tokens costs a walk over its
lengths and no strings. Format: ggml's docs/gguf.md; versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoints.gguf.blocks import BY_NAME, NAMES_OF_OTHERS, TYPES, dequantize
from paceline.errors import LoadError, WeightsError
from paceline.files import check_content, check_regular, unreadable

MAGIC = b"GGUF"
INTEGERS = ("I32", "I64")
VERSIONS = (2, 3)
SPLIT = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})(?P<end>\.gguf)", re.IGNORECASE)
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
MOST_DIMS, MOST_NESTED = 4, 2
LEAST_ENTRY, LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8  # bytes that one takes at least
DAMAGED = "the file is damaged or not complete, download it again"


def is_gguf(path: Path) -> bool:
    """Whether a model's path is a GGUF file: by its name, or as a file that begins like one, as in Ollama's store.

    Everything else is a folder, whatever it is called.
    """
    suffix = path.suffix.lower()
    if suffix in (".gguf", ".safetensors"):
        return suffix == ".gguf" and not path.is_dir()
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except (OSError, ValueError):
        return False


class _Header(NamedTuple):
    """A tensor in the file's table."""

    name: str
    shape: tuple[int, ...]
    kind: int  # a key of `TYPES`
    offset: int  # bytes from the start of the data


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies. `shape` as in Hugging Face checkpoints, the longest stride first: a matrix is [out, in]."""

    name: str
    shape: tuple[int, ...]
    kind: str  # "Q4_1"
    file: Path
    offset: int  # bytes from the start of the file
    nbytes: int

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of the bytes: the last axis counts bytes instead of values."""
        layout = BY_NAME[self.kind]
        return (*self.shape[:-1], self.shape[-1] // layout.elements * layout.size)


class Metadata(Mapping[str, Any]):
    """Values by GGUF's keys, of a GGUF file or of what stands for one."""

    path: Path


class Gguf(Metadata):
    """A GGUF model: its metadata as a mapping, `tensors` by name, their bytes as views of the mapped files."""

    def __init__(self, path: Path) -> None:
        """Open `path` and, if it is a part of a split file, the other parts. WeightsError for anything that is wrong."""
        self.path = path
        self.files = [_File(part) for part in _parts(path)]
        for file in self.files:
            file.entries, file.tensors = _head(file.path, state(file.path))
        self._entries = self.files[0].entries
        self._values: dict[str, Any] = {}  # those that were asked for
        self.tensors: dict[str, GgufTensor] = {}
        for file in self.files:
            for tensor in file.tensors:
                if tensor.name in self.tensors:
                    _wrong(file.path, f"the tensor {_named(tensor.name)} is there twice")
                self.tensors[tensor.name] = tensor
        self._maps = {file.path: file.data for file in self.files}
        self._check_split()

    def _check_split(self) -> None:
        count, here = self.get("split.count", 0), len(self.files)
        if isinstance(count, int) and count > 1 and count != here:
            raise WeightsError(
                f"{self.path} is a part of a model in {count} files, of which {here} can be found by name: put all "
                "parts into one folder under their own names (...-00001-of-0000N.gguf)"
            )
        total = self.get("split.tensors.count")
        if here > 1 and isinstance(total, int) and total != len(self.tensors):
            raise WeightsError(
                f"{self.path}: the parts hold {len(self.tensors)} tensors where the first says {total}: {DAMAGED}"
            )

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            kind, start = self._entries[key]
            self._values[key] = self.files[0].value(kind, start)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, [..., bytes of a row]; a view of the mapped file, not to be written to."""
        tensor = self.tensors[name]
        data = np.frombuffer(self._maps[tensor.file], np.uint8, tensor.nbytes, tensor.offset)
        return data.reshape(tensor.stored_shape)

    def floats(self, name: str) -> NDArray[np.float32]:
        """The values of a tensor, in its shape. WeightsError for one of integers."""
        tensor = self.tensors[name]
        if tensor.kind in INTEGERS:
            raise WeightsError(f"{tensor.file}: the tensor {name} holds integers, not weights: {DAMAGED}")
        return dequantize(tensor.kind, self.raw(name))


State = tuple[int, int, int, int]


def state(path: Path) -> State:
    """What changes when a file does: its device, inode, size in bytes and time of change in nanoseconds."""
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def states(path: Path) -> tuple[State, ...]:
    """Of all files of the model that `path` is a part of. Raises WeightsError and OSError."""
    return tuple(state(part) for part in _parts(path))


@lru_cache(maxsize=8)
def _head(path: Path, state: State) -> tuple[dict[str, tuple[int, int]], list[GgufTensor]]:
    """(entries, tensors) of a file in `state`: a start asks for them a dozen times. Not to be written to."""
    file = _File(path)
    file.parse()
    return file.entries, file.tensors


def header(path: Path, have: int) -> tuple[bool, dict[str, Any]]:
    """Of a file of which the first `have` bytes are there, and zeros after them: whether they hold its whole header,
    and the single values of its metadata so far. WeightsError for what more bytes would not mend.
    """
    file = _File(path, have)
    try:
        file.parse()
        whole = True
    except _Incomplete:
        whole = False
    return whole, {key: file.value(*place) for key, place in file.entries.items() if place[0] != ARRAY}


class _Incomplete(WeightsError):
    """The bytes that are there end inside the header."""


class _File:
    """One part: `entries` key -> (type, start of the value), `tensors` in the order of the file."""

    def __init__(self, path: Path, have: int | None = None) -> None:
        self.path, self.data = path, _map(path)
        self.size = len(self.data)
        self.have = self.size if have is None else have  # bytes; those after them are zeros
        self.entries: dict[str, tuple[int, int]] = {}
        self.tensors: list[GgufTensor] = []
        self.counts = self._counts()

    def parse(self) -> None:
        at = 24
        for _ in range(self.counts[1]):
            key, at = self.string(at)
            kind, at = self.number("I", at), at + 4
            start, at = at, self.skip(kind, at)
            self.need(at)
            if key in self.entries:
                _wrong(self.path, f"the metadata key {_named(key)} is there twice")
            self.entries[key] = (kind, start)
        self.tensors = self._table(self.counts[0], at)
        self._check_overlaps()

    def need(self, end: int) -> None:
        if end > self.have < self.size:
            raise _Incomplete(f"{self.path}: its header does not end within {self.have} bytes: {DAMAGED}")

    def _counts(self) -> tuple[int, int]:
        """(tensors, metadata entries), after what comes before them is checked."""
        magic = self.data[:4]
        if magic != MAGIC:
            hint = (
                "a file of llama.cpp before August 2023"
                if magic in (b"lmgg", b"tjgg", b"fmgg")
                else "no GGUF file"
            )
            raise WeightsError(
                f"{self.path} is {hint} (it begins with {magic!r}): give a GGUF file of version 2 or 3"
            )
        version = self.number("I", 4)
        if version not in VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
                raise WeightsError(
                    f"{self.path} is a big-endian GGUF file, which is not supported: get the usual little-endian one"
                )
            raise WeightsError(
                f"{self.path} is a GGUF file of version {version}, only 2 and 3 are supported: get a newer file, or "
                "write it again with llama.cpp's gguf-py"
            )
        tensors, entries = self.number("Q", 8), self.number("Q", 16)
        if tensors * LEAST_TENSOR + entries * LEAST_ENTRY > self.size:
            _wrong(
                self.path,
                f"its header counts {tensors} tensors and {entries} metadata entries, more than {self.size} "
                "bytes can hold",
            )
        return tensors, entries

    def number(self, code: str, at: int) -> Any:
        try:
            return struct.unpack_from(f"<{code}", self.data, at)[0]
        except struct.error:
            _wrong(self.path, f"it ends at byte {self.size}, inside its header")

    def string(self, at: int) -> tuple[str, int]:
        """(the string at `at`, where it ends)."""
        length = self.number("Q", at)
        end = at + 8 + length
        if end > self.size:
            _wrong(self.path, f"a string of {length} bytes at byte {at} goes past its end")
        return self.data[at + 8 : end].decode("utf-8", errors="replace"), end

    def skip(self, kind: int, at: int, depth: int = 0) -> int:
        """Where the value of type `kind` at byte `at` ends."""
        if kind in SCALARS:
            end = at + struct.calcsize(SCALARS[kind])
        elif kind == STRING:
            end = at + 8 + self.number("Q", at)
        elif kind == ARRAY and depth < MOST_NESTED:
            end = self._skip_array(at, depth)
        else:
            _wrong(self.path, f"the metadata value at byte {at} has type {kind}, which GGUF does not know")
        if end > self.size:
            _wrong(self.path, f"the metadata value at byte {at} goes past its end")
        return end

    def _skip_array(self, at: int, depth: int) -> int:
        kind: int = self.number("I", at)
        count: int = self.number("Q", at + 4)
        at += 12
        if kind in SCALARS:
            return at + count * struct.calcsize(SCALARS[kind])
        if count * 8 > self.size - at:
            _wrong(self.path, f"an array of {count} values at byte {at} goes past its end")
        if kind != STRING:
            for _ in range(count):
                at = self.skip(kind, at, depth + 1)
            return at
        unpack, data, last = struct.Struct("<Q").unpack_from, self.data, self.size - 8
        for _ in range(count):  # the one long loop: a vocabulary and its merges
            if at > last:
                _wrong(self.path, f"it ends at byte {self.size}, inside an array of strings")
            at += 8 + unpack(data, at)[0]
        return at

    def value(self, kind: int, at: int) -> Any:
        """The value that `skip` has measured; arrays of numbers as numpy, of strings and arrays as lists."""
        if kind in SCALARS:
            return self.number(SCALARS[kind], at)
        if kind == STRING:
            return self.string(at)[0]
        inner, count, at = self.number("I", at), self.number("Q", at + 4), at + 12
        if inner in SCALARS:
            dtype = "?" if inner == BOOL else f"<{np.dtype(SCALARS[inner]).str[1:]}"
            return np.frombuffer(self.data, dtype, count, at)
        if inner == STRING:
            return self._strings(count, at)
        out = []
        for _ in range(count):
            out.append(self.value(inner, at))
            at = self.skip(inner, at, MOST_NESTED - 1)
        return out

    def _strings(self, count: int, at: int) -> list[str]:
        """`count` strings one after the other, whose lengths `skip` has checked: a vocabulary or its merges."""
        unpack, data, out = struct.Struct("<Q").unpack_from, self.data, []
        for _ in range(count):
            begin, at = at + 8, at + 8 + unpack(data, at)[0]
            out.append(data[begin:at].decode("utf-8", errors="replace"))
        return out

    def _table(self, count: int, at: int) -> list[GgufTensor]:
        entries = []
        for _ in range(count):
            name, at = self.string(at)
            dims = self.number("I", at)
            self.need(at + 4)
            if not 1 <= dims <= MOST_DIMS:
                _wrong(self.path, f"the tensor {_named(name)} has {dims} dimensions, not 1 to {MOST_DIMS}")
            shape = tuple(self.number("Q", at + 4 + 8 * i) for i in reversed(range(dims)))
            at += 4 + 8 * dims
            entries.append(_Header(name, shape, self.number("I", at), self.number("Q", at + 4)))
            at += 12
            self.need(at)
        alignment = 32
        if "general.alignment" in self.entries:
            alignment = self.value(*self.entries["general.alignment"])
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            _wrong(self.path, f"general.alignment is {alignment!r}, not a power of two")
        start = (at + alignment - 1) // alignment * alignment
        return [self._tensor(header, start, alignment) for header in entries]

    def _tensor(self, header: _Header, start: int, alignment: int) -> GgufTensor:
        name, shape, number, offset = header
        layout = TYPES.get(number)
        if layout is None:
            kind = NAMES_OF_OTHERS.get(number, f"number {number}")
            raise WeightsError(
                f"{self.path}: the tensor {_named(name)} has type {kind}, which is not supported: use a file of "
                f"{', '.join(t.name for t in TYPES.values() if t.name not in INTEGERS)}"
            )
        if 0 in shape or shape[-1] % layout.elements:
            _wrong(
                self.path,
                f"the tensor {_named(name)} of shape {list(shape)} is no whole number of {layout.name} blocks",
            )
        nbytes = prod(shape) // layout.elements * layout.size
        if start + offset + nbytes > self.size:
            _wrong(
                self.path,
                f"the tensor {_named(name)} ends at byte {start + offset + nbytes}, after the end of the file at "
                f"{self.size}",
            )
        if offset % alignment:
            _wrong(self.path, f"the tensor {_named(name)} does not begin at a multiple of {alignment} bytes")
        return GgufTensor(name, shape, layout.name, self.path, start + offset, nbytes)

    def _check_overlaps(self) -> None:
        ordered = sorted(self.tensors, key=lambda tensor: tensor.offset)
        for first, other in pairwise(ordered):
            if first.offset + first.nbytes > other.offset:
                _wrong(self.path, f"the tensors {_named(first.name)} and {_named(other.name)} overlap")


def _map(path: Path) -> mmap.mmap:
    """The file, mapped copy-on-write: arrays over it are writable for torch, the file never changes."""
    try:
        size = check_regular(path)
        if size is None:
            raise WeightsError(f"{path} does not exist: check the spelling")
        with path.open("rb") as file:
            check_content(path, file.read(256))
            if size < 24:
                _wrong(path, f"it has only {size} bytes")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise WeightsError(unreadable(path, error)) from error
    except WeightsError:
        raise
    except LoadError as error:
        raise WeightsError(str(error)) from error


def _parts(path: Path) -> list[Path]:
    """All files of the model that `path` is a part of, the first one first."""
    match = SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if not 1 <= int(match["part"]) <= count:
        raise WeightsError(f"{path} names part {match['part']} of {match['count']}: rename it")
    parts = []
    for i in range(1, count + 1):
        parts.append(path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}{match['end']}"))
        if not parts[-1].exists():
            raise WeightsError(
                f"{path} is a part of {count}, and {parts[-1].name} is missing: download it too"
            )
    return parts


def _named(name: str) -> str:
    """A name from the file, short and in one line."""
    return ascii(name[:80])


def _wrong(path: Path, what: str) -> NoReturn:
    raise WeightsError(f"{path}: {what}: {DAMAGED}")
