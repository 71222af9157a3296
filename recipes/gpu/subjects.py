"""What is measured: targets of published shapes with random weights; with `dry` tiny ones that have the same parts."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline.bench.synthetic import Pair, random_parts
from paceline.bench.workloads import Prompt
from paceline.capacity import free_memory
from paceline.config import EngineConfig
from paceline.control.adaptive import AdaptivePolicy
from paceline.control.cost_model import unmeasured
from paceline.engine.engine import Engine
from paceline.engine.forced import ForcedAcceptance
from paceline.forecast.shapes import (
    SMALL,
    assistant_of,
    check_memory,
    fields_of,
    shallow,
    shrunk,
)
from paceline.models.families.gemma4.config import parse_gemma
from paceline.ops.base import WeightKind
from paceline.ops.runners import pick_device, pick_runner

SHAPES = {
    "31b": "gemma-4-31b",
    "12b": "gemma-4-12b",
    "e4b": "gemma-4-e4b",
    "e2b": "gemma-4-e2b",
    "26b": "gemma-4-26b-a4b",
}
PROMPT = 64  # tokens


@dataclass(frozen=True, slots=True)
class Place:
    """Where everything runs. `dry`: tiny widths, few tokens, to try the code."""

    device: str
    dry: bool = False

    @property
    def torch(self) -> torch.device:
        return pick_device(self.device)

    def fields(self, shape: str, layers: int | None = None) -> dict[str, Any]:
        if self.dry:
            return shrunk(SHAPES[shape])
        return fields_of(SHAPES[shape]) if layers is None else shallow(SHAPES[shape], layers)


@dataclass(frozen=True, slots=True)
class Wanted:
    """An engine: of which shape, how its weights are kept, and what its cache has to hold."""

    shape: str
    kind: WeightKind = "bfloat16"
    layers: int | None = None
    batch: int = 2
    length: int = 2048  # tokens of a text
    cache: int = 3 << 30  # bytes
    network: Path | None = None  # a folder with a drafter that reads hidden states


def engine_of(place: Place, wanted: Wanted) -> tuple[Engine, str]:
    """(an idle engine with the assistant of its target, what it computes with). Raises CapacityError."""
    fields = place.fields(wanted.shape, wanted.layers)
    length, cache = (256, 1 << 26) if place.dry else (wanted.length, wanted.cache)
    config = EngineConfig(
        target=wanted.shape, device=place.device, max_model_len=length, max_batch=wanted.batch, cache_memory=cache,
        quantize=wanted.kind if wanted.kind in ("int8", "int4") else None, draft_tokens=4,
    )  # fmt: skip
    if not place.dry and wanted.layers is None:
        on_gpu, free = place.torch.type != "cpu", free_memory(place.torch)
        check_memory(SHAPES[wanted.shape], wanted.kind, cache, free, drafter=True, gpu=on_gpu)
    runner, arithmetic = pick_runner(config, place.torch)
    pair = Pair(parse_gemma(fields), assistant_of(fields, SHAPES[wanted.shape] in SMALL), wanted.network)
    parts = random_parts(pair, wanted.kind, config, runner)
    return Engine(replace(parts, policy=AdaptivePolicy(unmeasured(), warn=print))), arithmetic


def forced(engine: Engine, chances: tuple[float, ...]) -> Engine:
    """An engine over the same weights and cache whose drafts are kept with these chances."""
    return Engine(replace(engine.parts, forced=ForcedAcceptance(chances)))


@contextmanager
def engine(place: Place, wanted: Wanted) -> Iterator[tuple[Engine, str]]:
    """As `engine_of`; what it held is free afterwards, if nobody keeps it."""
    made: list[tuple[Engine, str]] = [engine_of(place, wanted)]
    try:
        yield made[0]
    finally:
        made.clear()
        free()


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def prompts(vocab_size: int, count: int) -> list[Prompt]:
    """`count` prompts of random tokens, the same at every call."""
    rng = random.Random(0)
    return [Prompt([rng.randrange(5, vocab_size) for _ in range(PROMPT)]) for _ in range(count)]
