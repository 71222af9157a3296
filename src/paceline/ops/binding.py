"""Where native programs find what Python owns: addresses, checked."""

from __future__ import annotations

from typing import Any

import torch

from paceline.errors import UsageError
from paceline.kv.cache import KVCache
from paceline.kv.layout import RECENT

_STATUS = {
    1: "a token id is outside the vocabulary",
    2: "a position or sequence slot lies outside the K/V cache",
    3: "the recorded graph was run without the inputs or the cache that it reads",
    4: "it has more rows than are computed at once",
    5: "a recurrent state stands behind the rows, or too far before them: reserve them with KVCache.tail",
}


def refusal(what: str, status: int) -> str:
    """Why native code did not run `what`."""
    return f"native {what} refused: {_STATUS[status]}"


def address(tensor: torch.Tensor, dtype: torch.dtype, rows: int, name: str) -> int:
    """data_ptr() of a tensor that native code may read. Raises UsageError."""
    if (
        tensor.dtype != dtype
        or tensor.device.type != "cpu"
        or not tensor.is_contiguous()
        or tensor.shape[0] < rows
    ):
        raise UsageError(
            f"{name} must be a contiguous {dtype} tensor on the CPU with at least {rows} rows, not "
            f"{tensor.dtype} {tuple(tensor.shape)} strides {tensor.stride()} on {tensor.device}"
        )
    return tensor.data_ptr()


def bind_cache(program: Any, cache: KVCache) -> None:
    """Have a program read and write this cache. Raises UsageError."""
    layers, dtype = [], torch.bfloat16 if cache.packed else torch.int8 if cache.quantized else torch.float32
    for spec, k, v in zip(cache.layout.layers, cache.k, cache.v, strict=True):
        table = cache.tables[spec.kind]
        layers.append((
            address(k, dtype, 0, "cache.k"), address(v, dtype, 0, "cache.v"), k.shape[0],
            spec.kv_heads, spec.head_dim, spec.value_dim, address(table, torch.int32, 0, "cache.tables"),
            table.shape[1], table.shape[0], cache.page_size,
        ))  # fmt: skip
    if cache.page_size > 32:
        raise UsageError(f"native attention reads pages of up to 32 tokens, not {cache.page_size}")
    if cache.quantized:
        program.bind_bytes(layers)
    else:
        program.bind_cache(layers, cache.packed)
    if (states := cache.states) is not None:
        state, recent = ([address(s, torch.float32, 0, "states") for s in part] for part in states.stores)
        arrays = [numbers.ctypes.data for numbers in (states.place, states.goal, states.folded)]
        sizes = len(states.place), states.count, RECENT, states.history
        program.bind_states(list(zip(state, recent, strict=True)), *arrays, *sizes)
