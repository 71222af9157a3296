"""What a model needs of memory and disk, and how fast it will be here: measured on a slice of it with random weights.

The slice has as many layers, and as much of the head, as no cache of the processor holds. An engine decodes with it for a
moment. What a whole model takes follows by the bytes that are read for a token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from math import prod
from statistics import median
from typing import Any, cast

import torch

from paceline.capacity import CACHE_SHARE, plan_context
from paceline.checkpoints.loading import Shapes
from paceline.config import EngineConfig
from paceline.control.fixed import FixedPolicy
from paceline.core import SamplingParams
from paceline.engine.engine import Engine, EngineParts
from paceline.errors import CapacityError
from paceline.forecast.random_target import RandomWeights
from paceline.forecast.shapes import row_bytes, stored_as
from paceline.kv.cache import KVCache
from paceline.memory import last_level_cache
from paceline.models.families import spec_of
from paceline.models.inspection import Inspection
from paceline.models.spec import ModelConfig
from paceline.models.target import GraphTarget
from paceline.ops.base import Runner, WeightKind

BESIDE = 1 << 29  # bytes of the process itself and of what it computes with, besides weights and K/V
SECONDS = 0.8  # of decoding a slice, of timing its head
KINDS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "I8": "int8", "U8": "int4", "I32": "int4"}
LAYERS, MOST = 6, 1 << 30  # layers of a slice where they take no more bytes: a step has costs beside them
USEFUL = 2048  # tokens of context that a way to keep the weights should leave
CONTEXT = 512  # tokens that the slice's cache holds


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of a model's matrices kept as `kind`."""

    file: int
    memory: int
    layers: int  # read for a token, of the layers
    head: int  # read for a token, of the head


@dataclass(frozen=True, slots=True)
class Fit:
    """How a model kept as `kind` does here. `context` None: it does not fit; `speed` None: not measured."""

    kind: WeightKind
    size: Size
    context: int | None
    speed: float | None = None  # tokens a second, one text, without speculation


def size_of(config: ModelConfig, kind: WeightKind) -> Size:
    """Tables in which tokens are looked up stay in the file, unless they have to be quantized: see Weights.matrix."""
    shapes, moe = spec_of(config.model_type).shapes(config), getattr(config, "moe", None)
    used = moe.top_k / moe.experts if moe is not None else 1.0
    file = memory = layers = head = 0
    for name, size in _matrices(shapes, kind):
        file += size
        if name.startswith("embed_tokens_per_layer") or (name.startswith("embed_tokens") and not config.tied):
            memory += size if kind in ("int8", "int4") else 0
        elif name.startswith(("embed_tokens", "lm_head")):
            head += size
            memory += size + (size if config.tied and kind in ("int8", "int4") else 0)
        else:
            layers += round(size * used) if ".experts." in name else size
            memory += size
    return Size(file, memory, layers, head)


def _matrices(shapes: Shapes, kind: WeightKind) -> Iterator[tuple[str, int]]:
    for name, shape in shapes.items():
        if len(shape) > 1:
            stored = stored_as(name.removesuffix(".weight"), shape[-1], kind)
            yield name, prod(shape[:-1]) * row_bytes(stored, shape[-1])


def size_as_stored(seen: Inspection, config: ModelConfig) -> Size:
    """The same of a checkpoint as it lies there, whose matrices may be of several kinds."""
    parts, moe = seen.kept or seen.weights, getattr(config, "moe", None)
    table, head = parts.get("embedding table", 0), parts.get("output head", 0)
    idle = parts.get("per-layer embedding table", 0) + (0 if config.tied else table)
    head = table if config.tied else head
    experts = parts.get("experts", 0)
    spared = experts - round(experts * moe.top_k / moe.experts) if moe is not None else 0
    memory = sum(parts.values()) - idle
    return Size(seen.weight_bytes + sum(seen.skipped.values()), memory, memory - head - spared, head)


def ways(seen: Inspection, config: ModelConfig) -> dict[WeightKind, Size]:
    """How the weights can be kept, as they are stored first: what is quantized already stays as it is."""
    main = next((name for name in seen.dtypes if name != "F32"), "F32")  # norms may be in float32
    stored = KINDS.get(main, main.lower())
    kinds: list[WeightKind] = ["int8", "int4"] if stored in ("bfloat16", "float16", "float32") else []
    sizes = {kind: size_of(config, kind) for kind in kinds}
    return {cast(WeightKind, stored): size_as_stored(seen, config)} | sizes


def fits(
    config: ModelConfig, sizes: Mapping[WeightKind, Size], runner: Runner, free: int, *, measure: bool
) -> list[Fit]:
    """For each way to keep the weights: what they take, the context that is left room for, and the speed if it fits."""
    layout = spec_of(config.model_type).layout(config)
    rows = []
    for kind, size in sizes.items():
        itemsize = 2 if kind == "bfloat16" and runner.packs(layout) else 4
        left = free - size.memory - BESIDE
        try:
            budget = int(left * CACHE_SHARE["cpu"])
            context = plan_context(layout, budget, itemsize, EngineConfig(), config.max_len)[1]
        except CapacityError:
            rows.append(Fit(kind, size, None))
            continue
        rows.append(Fit(kind, size, context, speed(config, kind, size, runner) if measure else None))
    return rows


def chosen(fits: Seq[Fit], free: int) -> Fit:
    """How to keep the weights, of `fits` as they are stored first and then in fewer bits: the first way that leaves a
    useful context and takes half of `free` bytes at most, since every token reads them all; else the first that leaves
    one, or fits. Where none fits, the smallest.
    """
    useful = [fit for fit in fits if (fit.context or 0) >= USEFUL]
    light = [fit for fit in useful if fit.size.memory <= free / 2]
    fitting = [fit for fit in fits if fit.context is not None]
    return next(iter(light or useful or fitting), min(fits, key=lambda fit: fit.size.memory))


def speed(config: ModelConfig, kind: WeightKind, whole: Size, runner: Runner) -> float:
    """Tokens a second that one text is expected to get without speculation, near the beginning of its context."""
    part = slice_of(config, kind)
    spec = spec_of(part.model_type)
    weights: Any = RandomWeights(spec.shapes(part), kind)
    target = spec.build(part, weights, runner, torch.float32)
    runner.prepare([target.hidden_graph, target.logits_graph])
    hidden = torch.randn(1, part.hidden_size)
    target.logits(hidden)
    head = _median(lambda: target.logits(hidden), SECONDS / 4)
    step = max(_step(target), head)
    measured = size_of(part, kind)
    return 1 / ((step - head) * whole.layers / measured.layers + head * whole.head / measured.head)


def slice_of(config: ModelConfig, kind: WeightKind) -> Any:
    """The first layers and the first rows of the vocabulary, each more than the processor can cache, or all."""
    enough = max(1 << 26, 2 * last_level_cache())
    rows = config.vocab_size * enough // size_of(config, kind).head + 1
    few = _cut(config, 1, min(config.vocab_size, max(rows, 1024)))
    count = len(_layers(config))
    each = size_of(few, kind).memory - size_of(few, kind).head
    wanted = max(enough // each + 1, min(LAYERS, MOST // each), 1)
    return _cut(config, min(count, wanted), few.vocab_size)


def _layers(config: Any) -> Any:
    return config.layers if hasattr(config, "layers") else config.kinds


def _cut(config: Any, count: int, vocab: int) -> Any:
    same = {"vocab_size": vocab, "eos_token_ids": (), "max_len": CONTEXT}
    if hasattr(config, "layers"):
        return replace(config, layers=config.layers[:count], ple_vocab=min(config.ple_vocab, vocab), **same)
    return replace(config, kinds=config.kinds[:count], sparse=config.sparse & set(range(count)), **same)


def _step(target: GraphTarget) -> float:
    """Seconds of a step of an engine that writes one text."""
    plan = EngineConfig(max_model_len=CONTEXT, max_batch=1)
    pages, longest = plan_context(target.layout, 1 << 40, 4, plan, CONTEXT)
    cache = KVCache(
        target.layout, pages, max_sequences=1, max_tokens=longest, dtype=target.kv_dtype, device=target.device
    )
    engine = Engine(
        EngineParts(
            target=target,
            cache=cache,
            drafters={},
            default_drafter="none",
            policy=FixedPolicy(0),
            max_batch=1,
        )
    )
    prompt = [i % target.vocab_size for i in range(5, 37)]
    engine.add("estimate", prompt, SamplingParams(max_tokens=CONTEXT - 40, ignore_eos=True))
    while not any(delta.token_ids for delta in engine.step()):
        pass
    seconds = _median(engine.step, SECONDS, lambda: engine.has_work)
    engine.cancel("estimate")
    return seconds


def _median(call: Any, seconds: float, more: Any = lambda: True) -> float:
    """Of the times of `call` for so many seconds, three at least."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while more() and (len(times) < 3 or time.perf_counter() < end):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return median(times)
