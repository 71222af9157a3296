"""Experts as checkpoints store them, seen as the two stacks that they are computed as.

One tensor for each expert and matrix: `experts.0.gate_proj.weight`. One for each matrix of all experts, as MLX writes
them: `experts.switch_glu.gate_proj.weight` [E, I, H]. Or the stacks themselves, with `.weight` at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from paceline.checkpoints.safetensors_file import Entry

# stack [E, ...] -> the matrices of one expert that are laid upon each other in it
STACKS: Mapping[str, tuple[str, ...]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "up_proj": ("up_proj",),  # of experts without gates
    "down_proj": ("down_proj",),
}
MLX = ("experts.switch_glu", "switch_mlp")  # what MLX writes for `experts`: Gemma 4, Qwen3-MoE


def fuse(entries: dict[str, Entry], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Replace what experts are stored as by the stacks that are expected and not there, in place.

    What does not fit together is left as it is, to be reported as missing.
    """
    for name, shape in expected.items():
        at, _, stack = name.rpartition(".")
        if name in entries or not at.endswith(".experts") or stack not in STACKS:
            continue
        for names, axis in _layouts(at, stack, shape[0]):
            parts = tuple(entries[entry_name] for entry_name in names if entry_name in entries)
            fits = len(parts) == len(names) and len({(part.dtype, part.shape) for part in parts}) == 1
            if fits and len(parts[0].shape) > axis:  # a scale has an axis less
                entries[name] = _stacked(name, parts, shape[0], axis)
                for entry_name in names:
                    del entries[entry_name]
                break


def _layouts(at: str, stack: str, count: int) -> Iterator[tuple[list[str], int]]:
    """The names that may make up a stack of `count` experts, and the axis along which they are laid: 0 or 1."""
    parts = STACKS[stack]
    yield [f"{at}.{i}.{part}.weight" for i in range(count) for part in parts], 0
    for mlx in MLX:
        place = f"{at.removesuffix('experts')}{mlx}"
        yield [f"{place}.{part}.weight" for part in parts], 1
        yield [f"{place}.{stack}.weight"], 1
    yield [f"{at}.{i}.{stack}.weight" for i in range(count)], 0
    yield [f"{at}.{stack}.weight"], 1


def _stacked(name: str, parts: tuple[Entry, ...], count: int, axis: int) -> Entry:
    """A stack of `count` experts, whose parts are laid along `axis`."""
    first = parts[0]
    rows = first.shape[axis] * (len(parts) if axis else len(parts) // count)
    shape = (first.shape[0] if axis else count, rows, *first.shape[axis + 1 :])
    return Entry(name, first.file, first.dtype, shape, sum(part.nbytes for part in parts), parts, axis)
