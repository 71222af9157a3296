"""An engine of a published shape with random weights, whose drafts are kept by given chances.

Compute and cache traffic are those of the real model; the text means nothing. Everything made from it says so.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline.bench.workloads import Prompt
from paceline.capacity import free_memory, make_cache
from paceline.config import EngineConfig, step_options
from paceline.control.adaptive import AdaptivePolicy
from paceline.control.cost_model import unmeasured
from paceline.control.fixed import FixedPolicy
from paceline.core import MAX_DRAFT_TOKENS
from paceline.drafters.assistant import MTPDrafter
from paceline.drafters.base import Drafter
from paceline.drafters.registry import over
from paceline.engine.engine import Engine, EngineParts
from paceline.engine.forced import ForcedAcceptance
from paceline.errors import UsageError
from paceline.forecast.random_target import random_assistant, random_target
from paceline.forecast.shapes import assistant_config, check_memory, target_config
from paceline.models.families.gemma4.config import AssistantConfig, GemmaConfig
from paceline.models.registry import load_network
from paceline.ops.base import Runner, WeightKind
from paceline.ops.runners import DTYPES, pick_device, pick_runner
from paceline.startup.profiling import measure_steps
from paceline.tree import Shape

Say = Callable[[str], None]
WORKLOAD = "synthetic"
NETWORK = "network"  # the drafter of `Pair.network`
PROMPT = 64  # tokens of a prompt
CACHE = 1 << 30  # bytes for K/V
PROFILING = 2.0  # seconds


def synthetic_engine(shape: str, chances: ForcedAcceptance, options: dict[str, Any], say: Say) -> Engine:
    """An idle engine of `shape`. `options`: of EngineConfig. Raises UsageError, and CapacityError before it allocates."""
    drafter = options.get("drafter", "auto")
    if drafter not in ("auto", MTPDrafter.name, "none"):
        raise UsageError(
            f"--drafter {drafter} has nothing to do with random weights: use auto, {MTPDrafter.name} or none"
        )
    config = EngineConfig.of(
        {"max_model_len": 1024, "cache_memory": CACHE, **options, "target": shape, "drafter": "auto"}
    )
    if config.adapter is not None or config.quantize_drafter is not None:
        raise UsageError("--shape makes its own weights: leave --adapter and --quantize-drafter out")
    if config.tensor_parallel > 1:
        raise UsageError("--shape is computed by one process: leave --tensor-parallel out")
    device = pick_device(config.device)
    kind: WeightKind = config.quantize or ("float32" if config.dtype == "float32" else "bfloat16")
    cache, free = config.cache_memory or CACHE, free_memory(device)
    check_memory(shape, kind, cache, free, drafter=drafter != "none", gpu=device.type != "cpu")
    runner, arithmetic = pick_runner(config, device)
    say(f"SYNTHETIC {shape}: random weights ({kind}), acceptance {said(chances)} · {arithmetic}")
    parts = random_parts(
        Pair(target_config(shape), assistant_config(shape) if drafter != "none" else None),
        kind,
        config,
        runner,
    )
    info = {"target": shape, "drafter": parts.default_drafter, "arithmetic": arithmetic,
            "synthetic": {"weights": f"random, {kind}", "acceptance": list(chances.chances)}}  # fmt: skip
    return _measured(replace(parts, forced=chances, info=info), say)


@dataclass(frozen=True, slots=True)
class Pair:
    """What random weights are made for."""

    target: GemmaConfig
    assistant: AssistantConfig | None
    network: Path | None = None  # a folder with a drafter that reads the target's hidden states


def random_parts(pair: Pair, kind: WeightKind, config: EngineConfig, runner: Runner) -> EngineParts:
    """An engine's parts with random weights stored as `kind`, drafts of a fixed length; without a tokenizer."""
    device = pick_device(config.device)
    dtype = torch.float32 if device.type == "cpu" else DTYPES.get(config.dtype, torch.bfloat16)
    target = random_target(pair.target, kind, runner, device, dtype)
    other = None if pair.network is None else load_network(pair.network, target)
    runner.prepare([target.hidden_graph, target.logits_graph])
    cache = make_cache(target, config, share=1.0)
    drafters: dict[str, Drafter] = {}
    if pair.assistant is not None:
        net = random_assistant(pair.assistant, target)
        net.runner.prepare([net.step_graph])
        drafters[MTPDrafter.name] = MTPDrafter(net)
    if other is not None:
        runner.prepare(other.graphs)
        own = make_cache(other, replace(config, cache_memory=None), share=0.1)
        drafters[NETWORK] = over(NETWORK, other, own)
    tree = None if config.draft_tree is None or not drafters else Shape.parse(config.draft_tree)
    if tree is not None:
        cache.grow_branches(config.max_batch * MAX_DRAFT_TOKENS)
    return EngineParts(
        target=target, cache=cache, drafters=drafters, default_drafter=MTPDrafter.name if drafters else "none",
        policy=FixedPolicy(0), draft_tree=tree, **step_options(config),
    )  # fmt: skip


def _measured(parts: EngineParts, say: Say) -> Engine:
    """The engine, with the costs of its steps measured where draft lengths are chosen by them, as at a real start."""
    table = measure_steps(parts, PROFILING) if parts.draft_tokens == "auto" else None
    return Engine(replace(parts, policy=AdaptivePolicy(table or unmeasured(), warn=say)))


def said(chances: ForcedAcceptance) -> str:
    return ", ".join(f"{chance:g}" for chance in chances.chances)


def random_prompts(vocab_size: int, count: int) -> list[Prompt]:
    """`count` prompts of random token ids, the same at every call."""
    rng = random.Random(0)
    return [Prompt([rng.randrange(5, vocab_size) for _ in range(PROMPT)]) for _ in range(count)]
