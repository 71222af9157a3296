"""What of a device's memory goes to what: weights, drafter, K/V, and what a GPU needs beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from paceline import machine
from paceline.config import EngineConfig
from paceline.errors import CapacityError, sized
from paceline.kv.cache import KVCache
from paceline.kv.layout import Layout
from paceline.kv.plan import plan_pages
from paceline.kv.store import stored_as
from paceline.models.base import Cached
from paceline.models.inspection import inspect

CACHE_SHARE = {"cpu": 0.3, "cuda": 0.8}  # of the memory that is free once the weights are loaded
BESIDE = 1 << 30  # bytes of a GPU for activations and captured steps
LEAST = 1 << 28  # bytes of K/V below which nothing is worth running
TINY = (
    100 << 20
)  # bytes of weights: demo, of 18 MB, is three times as fast on a CPU as with plain torch on a GPU
PER_WEIGHT = {"int8": 1.01, "int4": 0.63}  # bytes, scales included


def free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return machine.free_memory()


def make_cache(target: Cached, config: EngineConfig, share: float, beside: int = 0) -> KVCache:
    """A K/V cache within `share` of the budget. Without max_model_len, texts are shortened until one fits.

    `beside`: bytes that a GPU still has to hold, of a drafter that is loaded later.
    """
    free = free_memory(target.device)
    if target.device.type == "cuda":
        free = max(0, free - beside - BESIDE)
    budget = config.cache_memory or int(free * CACHE_SHARE.get(target.device.type, 0.3))
    itemsize = stored_as(target.kv_dtype).itemsize
    pages, longest = plan_context(target.layout, int(budget * share), itemsize, config, target.max_len)
    return KVCache(
        target.layout,
        pages,
        max_sequences=config.max_batch,
        max_tokens=longest,
        dtype=target.kv_dtype,
        device=target.device,
    )


def plan_context(
    layout: Layout, budget: int, itemsize: int, config: EngineConfig, most: int
) -> tuple[dict[str, int], int]:
    """(pages by kind, tokens of the longest text) within `budget` bytes; raises CapacityError where nothing fits."""
    longest = min(config.max_model_len or most, most)
    while True:
        try:
            pages = plan_pages(
                layout,
                budget=budget,
                itemsize=itemsize,
                max_sequences=config.max_batch,
                max_tokens=longest,
                chunk=max(config.step_tokens, config.prefill_chunk, layout.run if config.media else 0),
            )
        except CapacityError:
            if config.max_model_len is not None or longest <= 256:
                raise
            longest //= 2
            continue
        return pages, longest


def bytes_on_gpu(model: Path, quantize: Literal["int8", "int4", "none"] | None, dtype: str = "auto") -> int:
    """About what the weights of a checkpoint take on a GPU. What is stored in fewer bits than 16 stays as it is."""
    inspection = inspect(model, itemsize=2)
    if quantize is not None and quantize != "none":
        return int(inspection.parameters * PER_WEIGHT[quantize])
    packed = {"I8", "U8", "I32", "Q4_0", "MXFP4"} & set(inspection.dtypes)
    return inspection.weight_bytes if packed else inspection.parameters * (4 if dtype == "float32" else 2)


def check_gpu(config: EngineConfig, target: Path, drafter: Path | None, free: int) -> int:
    """Bytes of the drafter. Raises CapacityError, with the sum by part and what would fit, before anything is loaded."""
    parts = {
        "weights": bytes_on_gpu(target, config.quantize, config.dtype),
        "drafter": 0 if drafter is None else bytes_on_gpu(drafter, config.quantize_drafter, config.dtype),
        "K/V, at least": config.cache_memory or LEAST,
        "activations and captured steps": BESIDE,
    }
    need = sum(parts.values())
    if need <= free:
        return parts["drafter"]
    rest, hint = need - parts["weights"], "use a smaller model, or --device cpu"
    if bytes_on_gpu(target, "int4") < 0.9 * parts["weights"]:  # it is kept in more bits than that
        fitting = [kind for kind in ("int8", "int4") if bytes_on_gpu(target, kind) + rest <= free]
        hint = f"use --quantize {fitting[0]}" if fitting else hint
    if need - parts["drafter"] <= free:
        hint = "use --quantize-drafter int4, or --drafter ngram"
    if config.cache_memory and need - config.cache_memory + LEAST <= free:
        hint = "lower --cache-memory"
    shares = ", ".join(f"{name} {sized(size)}" for name, size in parts.items() if size)
    raise CapacityError(
        f"the GPU has {sized(max(free, 0))} free and {sized(need)} are needed ({shares}): {hint}"
    )


def faster_on_cpu(config: EngineConfig, arithmetic: str, target: Path) -> str | None:
    """A line where `device=auto` took a GPU without kernels of our own for a model that hardly has weights."""
    if config.device != "auto" or not arithmetic.startswith("plain torch on cuda"):
        return None
    if bytes_on_gpu(target, config.quantize) > TINY:
        return None
    return "a model this small is faster on the CPU than with plain torch on a GPU: use --device cpu"


def full(error: torch.OutOfMemoryError) -> str:
    """What PyTorch says of a GPU's full memory, as far as it helps: its first two sentences."""
    return ". ".join(str(error).split(". ")[:2]).strip()
