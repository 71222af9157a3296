"""Experts that a checkpoint stores one by one, seen as the two stacks that they are computed as."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.models.safetensors_file import Entry

# stack [E, ...] -> the matrices of one expert that are laid upon each other in it
STACKS: Mapping[str, tuple[str, ...]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}


def fuse(entries: dict[str, Entry], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Replace `....experts.0.gate_proj.weight` and so on by the stack that is expected and not there, in place.

    What does not fit together is left as it is, to be told as missing.
    """
    for name, shape in expected.items():
        at, _, stack = name.rpartition(".")
        if name in entries or not at.endswith(".experts") or stack not in STACKS:
            continue
        names = [f"{at}.{i}.{part}.weight" for i in range(shape[0]) for part in STACKS[stack]]
        if not all(one in entries for one in names):
            continue
        parts = tuple(entries[one] for one in names)
        if len({(part.dtype, part.shape) for part in parts}) == 1:
            entries[name] = _stacked(name, parts, shape[0])
            for one in names:
                del entries[one]


def _stacked(name: str, parts: tuple[Entry, ...], count: int) -> Entry:
    first, each = parts[0], len(parts) // count
    shape = (count, each * first.shape[0], *first.shape[1:])
    return Entry(name, first.file, first.dtype, shape, sum(part.nbytes for part in parts), parts)
