"""Reading safetensors without trusting them: the header is checked in full before any byte is used as a
number.

Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the
data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from paceline.errors import LoadError, WeightsError
from paceline.files import check_file, parsed
from paceline.ops.blocks import BY_NAME

if TYPE_CHECKING:
    from torch import Tensor

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "U16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # as the format's own reader
MOST_TENSORS = 2**16  # in one file; shards of the largest models have a thousandth of it
MOST_AXES = 64  # of a tensor, as torch has it


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file. `name` as stored; with `parts`, those joined along `axis` and seen in this shape.

    With `make`, what that makes of the parts. With `blocks`, what gives the parts as blocks of the kind that is `dtype`,
    or None where they hold a value that it cannot.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    parts: tuple[Entry, ...] = ()
    axis: int = 0
    make: Callable[..., Tensor] | None = None
    blocks: Callable[..., Tensor | None] | None = None

    @property
    def memory(self) -> int:
        """Bytes that it takes once it is read; as in the file unless it is made of parts."""
        layout, count = BY_NAME.get(self.dtype), math.prod(self.shape)
        if self.make is not None and layout is not None:
            return count // layout.elements * layout.size
        if self.make is not None and self.dtype in ITEM_BYTES:
            return count * ITEM_BYTES[self.dtype]
        return sum(part.memory for part in self.parts) if self.parts else self.nbytes


def read_header(path: Path) -> list[Entry]:
    """The tensors of one file. WeightsError unless they fill the data section exactly, without overlap."""
    try:
        check_file(path)
    except LoadError as error:
        raise WeightsError(str(error)) from error
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise broken(path, f"it has {size} bytes and announces a header of {length}")
            text = file.read(length)
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror}") from error
    try:
        raw = parsed(text, _no_duplicates)
    except _Duplicate as error:
        raise WeightsError(f"{path} holds the tensor {error} twice: download it again") from error
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, or an absurd number
        raise broken(path, "its header is not JSON") from error
    if not isinstance(raw, dict):
        raise broken(path, "its header is not a JSON object")
    raw.pop("__metadata__", None)
    if len(raw) > MOST_TENSORS:
        raise broken(path, f"it lists {len(raw)} tensors, more than {MOST_TENSORS}")
    spans = [_entry(path, name, value) for name, value in raw.items()]
    _check_spans(path, spans, size - 8 - length)
    return [entry for _, _, entry in spans]


def broken(path: Path, why: str) -> WeightsError:
    return WeightsError(f"{path} is corrupt or truncated ({why}): download it again")


class _Duplicate(ValueError):
    pass


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise _Duplicate(key)
        out[key] = value
    return out


def _entry(path: Path, name: str, value: object) -> tuple[int, int, Entry]:
    if not isinstance(value, dict):
        raise broken(path, f"the entry of {name} is not an object")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise WeightsError(
            f"{path}: tensor {name} has the unknown dtype {dtype!r}: use a float32, bfloat16 or float16 one"
        )
    if isinstance(shape, list) and len(shape) > MOST_AXES:
        raise broken(path, f"{name} has {len(shape)} axes")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise broken(path, f"shape or offsets of {name} are not whole numbers")
    begin, end = offsets
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != nbytes:
        raise broken(path, f"{name} takes {end - begin} bytes where its shape needs {nbytes}")
    return begin, end, Entry(name, path, dtype, tuple(shape), nbytes)


def _naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value
    )


def _check_spans(path: Path, spans: list[tuple[int, int, Entry]], data_bytes: int) -> None:
    at = 0
    for begin, end, entry in sorted(spans, key=lambda span: span[:2]):
        if begin != at:
            raise broken(
                path, f"{entry.name} {'overlaps its neighbour' if begin < at else 'leaves a hole before it'}"
            )
        at = end
    if at != data_bytes:
        raise broken(path, f"{data_bytes} bytes of data where the header describes {at}")
