"""From an `EngineConfig` to a running engine: every "auto" is settled here, and every choice is written down.
`info` of the built engine says what was loaded, from where, with what, and why.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from paceline.capacity import LEAST, check_gpu, faster_on_cpu, free_memory, full, make_cache
from paceline.checkpoints.card import describe_files
from paceline.checkpoints.defaults import pooling_of, read_defaults
from paceline.checkpoints.loading import Transform
from paceline.config import EngineConfig, step_options
from paceline.control.adaptive import AdaptivePolicy
from paceline.control.fixed import FixedPolicy
from paceline.core import MAX_DRAFT_TOKENS
from paceline.drafter_kinds import ASSISTANT_TYPES, KINDS, branching
from paceline.drafters import registry
from paceline.drafters.assistant import MTPDrafter
from paceline.drafters.base import Drafter
from paceline.drafters.draft_model import LARGE, NARROW, ModelDrafter
from paceline.drafters.guard import is_ours
from paceline.drafters.lookahead import LookaheadDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.states import MemoryDrafter
from paceline.drafters.translated import TranslatedDrafter
from paceline.engine.engine import Engine, EngineParts
from paceline.errors import CapacityError, LoadError, UsageError, sized
from paceline.hub.cache import hub_cache
from paceline.hub.outline import as_named
from paceline.hub.resolve import Role, bundled, find_assistant, look_at, resolve
from paceline.kv.cache import KVCache
from paceline.media.build import reader_of
from paceline.models.adapter import Adapter, load_adapter, unmerged
from paceline.models.adapters import AdapterBank
from paceline.models.base import Target
from paceline.models.config import read_config
from paceline.models.drafters.gemma4_assistant import GemmaAssistant
from paceline.models.drafters.networks import kind_of
from paceline.models.drafters.state_net import GraphNet
from paceline.models.registry import load_assistant, load_network, load_target
from paceline.models.target import GraphTarget
from paceline.ops.base import Runner
from paceline.ops.runners import DTYPES, pick_device, pick_runner
from paceline.parallel.team import gather, per_rank
from paceline.startup import Pair, Startup, start_up
from paceline.suggest import check_memory, costs_too_much, suggestions
from paceline.survey import check_models, other_vocabulary, same_vocabulary, why_not_together
from paceline.text.formats.choose import load_tokenizer
from paceline.text.tokenizer import Tokenizer, Words
from paceline.tree import Shape

Say = Callable[[str], None]
DRAFT_CACHE_SHARE = 0.25  # of that, for an independent draft model
SUGGESTED = 2  # drafters that are named at most where none was asked for
FLOATS = ("float32", "bfloat16", "float16")


class DrafterChoice(NamedTuple):
    """The drafter of an engine."""

    kind: str
    source: Path | None  # its folder or file, None for one without weights
    why: str  # for people

    def info(self) -> dict[str, Any]:
        source = str(self.source) if self.source else None
        return {"drafter": self.kind, "drafter_path": source, "drafter_reason": self.why}


def build_engine(config: EngineConfig, say: Say = lambda line: None) -> Engine:
    """Load everything and return an idle engine. `say` gets one line per choice. Raises PacelineError."""
    try:
        with ExitStack() as unless_built:
            engine = _build(
                per_rank(replace(config, drafter=registry.check_kind(config.drafter))), say, unless_built
            )
            unless_built.pop_all()
    except torch.OutOfMemoryError as error:
        raise CapacityError(f"{full(error)}: use --quantize int8 or int4, or lower --cache-memory") from error
    return engine


def _chats(config: EngineConfig, tokenizer: Tokenizer, path: Path) -> bool:
    """Whether prompts are put into the template where nobody says so: the demo's own is for servers."""
    return tokenizer.template is not None and (config.chat_template is not None or path != bundled("target"))


def _build(config: EngineConfig, say: Say, unless_built: ExitStack) -> Engine:
    device = _device_and_threads(config)
    path, choice = find_models(config)
    beside = check_gpu(config, path, choice.source, free_memory(device)) if device.type == "cuda" else 0
    adapters = find_adapters(config, path, say)
    tokenizer = load_tokenizer(path, config.chat_format, config.chat_template)
    team = unless_built.enter_context(gather(config, path, _reader_of_kv(choice)))
    runner, arithmetic = team.over(*pick_runner(config, device, team.group, say))
    target = load_share(config, path, adapters, runner, team.shard)
    net = _load_network(config, choice, target)
    runner.prepare([target.hidden_graph, target.logits_graph])  # before the cache takes of what is free
    team.meet(target)
    cache = make_cache(target, config, 1.0 / team.ranks, beside)
    _compare(tokenizer, target, config.max_model_len, say)
    _announce(config, choice, path, arithmetic, say)
    drafters = _load_drafters(tokenizer, config, choice, target, cache, net)
    parts = EngineParts(
        target=target,
        cache=cache,
        drafters=drafters,
        default_drafter=choice.kind.partition("+")[0],
        policy=FixedPolicy(0),
        tokenizer=tokenizer,
        media=reader_of(config, path, target, tokenizer, min(target.max_len, cache.max_tokens)),
        **step_options(config),
        adapters=() if adapters.bank is None else adapters.bank.names,
        draft_tree=_tree(config, choice.kind, drafters, cache),
        own_threads=_on_kernels(target) and all(is_ours(drafter) for drafter in drafters.values()),
        watch=team.watch,
        close=team.close,
    )
    known = start_up(config, Pair(parts, path, choice.source, _settings(config, target, arithmetic)), say)
    info: dict[str, Any] = {
        "target": str(path),
        **adapters.about(),
        **choice.info(),
        **_drafting_info(config),
        "device": str(device),
        **_files_info(path, target),
        "arithmetic": arithmetic,
        "tensor_parallel": team.ranks,
        "max_model_len": cache.max_tokens,
        "cache_bytes": cache.nbytes * team.ranks,
        "cache_dtype": cache.holds,
        "skipped": sorted(target.skipped),
        "chat": _chats(config, tokenizer, path),
        "pooling": pooling_of(path) if config.pooling == "auto" else config.pooling,
    } | known.info
    learning = _learning(replace(parts, default_drafter=choice.kind, info=info), known, info, say)
    return Engine(learning)


def _learning(parts: EngineParts, known: Startup, info: dict[str, Any], say: Say) -> EngineParts:
    """The parts with the policy of `auto`: its warnings stay in `info`, what it learnt is kept at the end."""

    def warn(line: str) -> None:
        info["drafter_warning"] = line
        say(line)

    policy = AdaptivePolicy(known.table, known.known, warn)

    def close() -> None:
        known.keep(policy.learnt())
        parts.close()

    return replace(parts, policy=policy, close=close)


def load_share(
    config: EngineConfig, path: Path, adapters: Adapters, runner: Runner, shard: tuple[int, int] | None
) -> GraphTarget:
    """The target, or what a rank has of it."""
    transform, dtype = _transform(config.quantize, adapters.merged), DTYPES.get(config.dtype)
    target = load_target(
        path, device=pick_device(config.device), runner=runner, dtype=dtype, transform=transform, shard=shard,
        adapters=adapters.bank,
    )  # fmt: skip
    target.expect(config.max_model_len)
    if config.kv_cache == "int8":
        target.keep_bytes()
    return target


def load_mtp(config: EngineConfig, source: Path, target: GraphTarget) -> GemmaAssistant:
    """The network that reads the target's K/V, sharded as the target is."""
    transform = _transform(config.quantize_drafter)
    return load_assistant(source, target, dtype=DTYPES.get(config.dtype), transform=transform)


def _on_kernels(target: GraphTarget) -> bool:
    """Whether it runs on the CPU's native kernels."""
    return target.device.type == "cpu" and target.runner.reads_blocks


def _reader_of_kv(choice: DrafterChoice) -> Path | None:
    """The drafter, if it reads K/V of the target."""
    source = choice.source
    if source is None or choice.kind.partition("+")[0] not in KINDS:
        return None
    return source if read_config(source).get("model_type") in ASSISTANT_TYPES else None


def _drafting_info(config: EngineConfig) -> dict[str, Any]:
    return {"draft_tree": config.draft_tree, "verify": config.verify}


def _files_info(path: Path, target: GraphTarget) -> dict[str, Any]:
    dtype = str(target.dtype).removeprefix("torch.")
    return {"dtype": dtype, "sampling": read_defaults(path).given(), "files": describe_files(path, dtype)}


def _tree(config: EngineConfig, kind: str, drafters: dict[str, Drafter], cache: KVCache) -> Shape | None:
    """The shape of drafts that branch, with room for them in the cache. Raises UsageError."""
    if config.draft_tree is None:
        return None
    if not any(drafter.branches for drafter in drafters.values()):
        raise UsageError(
            f"draft_tree={config.draft_tree}, but the drafter {kind} drafts chains: leave draft_tree out, or "
            f"use a drafter that branches ({branching()})"
        )
    for drafter in drafters.values():
        if isinstance(drafter, MemoryDrafter) and drafter.branches:
            drafter.cache.grow_branches(config.max_batch * (MAX_DRAFT_TOKENS - 1))
    cache.grow_branches(config.max_batch * (MAX_DRAFT_TOKENS - 1))
    return Shape.parse(config.draft_tree)


def _compare(tokenizer: Tokenizer, target: Target, asked: int | None, say: Say) -> None:
    """Say where the tokenizer or the context that was `asked` for is not the model's."""
    if other := other_vocabulary(tokenizer.vocab_size, target.vocab_size):
        say(f"tokenizer: {other}")
    if asked is not None and asked > target.max_len:
        say(
            f"the context is {target.max_len} tokens, which is all the model has here: {asked} were asked for"
        )


def _announce(config: EngineConfig, choice: DrafterChoice, path: Path, arithmetic: str, say: Say) -> None:
    kind, source, why = choice
    origin = "the bundled one" if source in (bundled("assistant"), bundled("draft")) else why
    unasked = ", which draft_tokens=0 never asks" if source is not None and config.draft_tokens == 0 else ""
    say(f"target {config.target} · drafter {kind} ({origin}){unasked} · {arithmetic}")
    if hint := faster_on_cpu(config, arithmetic, path):
        say(hint)
    if source is not None and kind.startswith("model") and (costs := costs_too_much(source, path)):
        say(costs)
    if config.drafter == "auto" and source is None:
        for suggestion in suggestions(path, [hub_cache()])[:SUGGESTED]:
            say(suggestion.described(path))
    if config.verify == "typical":
        say(
            "LOSSY: verify=typical keeps drafts that the target would not write; match, the default, is lossless"
        )


def _device_and_threads(config: EngineConfig) -> torch.device:
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    return pick_device(config.device)


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapter that is merged into the weights, and those that requests choose."""

    merged: Adapter | None
    bank: AdapterBank | None

    def about(self) -> dict[str, Any]:
        return {
            "adapter": None if self.merged is None else str(self.merged.folder),
            "adapters": {} if self.bank is None else self.bank.about(),
        }


def find_adapters(config: EngineConfig, target: Path, say: Say) -> Adapters:
    """The adapters that were asked for, checked against the target's config; says so if one lies there unasked."""
    merged, beside = None, unmerged(target)
    if config.adapter is not None:
        merged = load_adapter(resolve(config.adapter, "adapter"), target)
        say(f"adapter {config.adapter} is merged into {len(merged.parts) + len(merged.whole)} weights")
    elif beside is not None:
        say(beside)
    if not config.adapters:
        return Adapters(merged, None)
    adapters = [(name, load_adapter(resolve(path, "adapter"), target)) for name, path in config.adapters]
    bank = AdapterBank.of(adapters)
    for name, adapter in adapters:
        ranks = ", ".join(map(str, bank.ranks(name)))
        say(
            f"adapter {name}: {len(adapter.parts)} matrices of rank {ranks}, {sized(bank.nbytes(name))}, by request"
        )
    return Adapters(merged, bank)


def find_models(config: EngineConfig) -> tuple[Path, DrafterChoice]:
    """The target's folder and the drafter, both checked before the weights of either.

    What is on the hub is checked by its configs and headers before it is downloaded. Raises UsageError and LoadError.
    """
    with tempfile.TemporaryDirectory() as scratch:

        def look(name: str | Path, role: Role) -> Path:
            return look_at(name, role, Path(scratch))

        try:
            target = look(config.target, "target")
            check_models(target, choose_drafter(config, target, look).source)
        except LoadError as error:
            raise type(error)(as_named(str(error), Path(scratch))) from error
    target = resolve(config.target, "target")
    choice = choose_drafter(config, target)
    check_models(target, choice.source)
    device = pick_device(config.device)
    if device.type == "cpu" and choice.source is not None:
        check_memory(target, choice.source, free_memory(device))
    return target, choice


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a model takes, in bytes: its weights and its drafter's, and K/V; and what its device has free."""

    weights: int
    cache: int  # at least
    free: int


def footprint(config: EngineConfig) -> Footprint:
    """By the files of a model, which are downloaded if they are not here. Raises PacelineError."""
    path, choice = find_models(config)
    files = [
        describe_files(place, config.dtype)["bytes"] for place in (path, choice.source) if place is not None
    ]
    return Footprint(sum(files), config.cache_memory or LEAST, free_memory(pick_device(config.device)))


def _settings(config: EngineConfig, target: Target, arithmetic: str) -> dict[str, str]:
    """What a start-up measurement depends on, beside machine and weights."""
    drafter = config.quantize_drafter or "auto"
    return {
        "device": str(target.device),
        "arithmetic": arithmetic,
        "precision": f"{target.dtype}, {target.kv_dtype}, {config.dtype}, {config.quantize}, {drafter}"
        + ("" if config.adapter is None else f", {config.adapter}"),
        "threads": str(config.threads or torch.get_num_threads()),
    }


def _load_drafters(
    tokenizer: Tokenizer,
    config: EngineConfig,
    choice: DrafterChoice,
    target: GraphTarget,
    cache: KVCache,
    network: GraphNet | None,
) -> dict[str, Drafter]:
    """The chosen kind's network, if it has one, and the n-gram drafter, which costs nothing to have."""
    kind, source = choice.kind, choice.source
    drafters: dict[str, Drafter] = {"ngram": NgramDrafter(words=Words(tokenizer))}
    if network is not None:
        name = kind.partition("+")[0]
        drafters[name] = _state_drafter(name, network, config, cache)
    elif source is not None and kind.partition("+")[0] in KINDS:  # of these, one that reads the target's K/V
        net = load_mtp(config, source, target)
        net.runner.prepare([net.step_graph])
        drafters[MTPDrafter.name] = MTPDrafter(net)
    elif source is not None and kind.startswith("model"):
        drafters["model"] = _draft_model(source, config, target, tokenizer)
    elif kind in registry.LOOKAHEAD:
        drafters["lookahead"] = LookaheadDrafter()
    elif kind in registry.third_party():
        drafters[kind] = registry.load_third_party(kind, target, cache)
    return drafters


def choose_drafter(
    config: EngineConfig, target: Path, find: Callable[[str | Path, Role], Path] = resolve
) -> DrafterChoice:
    """`find` makes a folder of a name. Raises UsageError when what was asked for is not there."""
    name = config.drafter
    if name in ("none", "ngram", *registry.LOOKAHEAD) or name in registry.third_party():
        return DrafterChoice(name, None, "as asked")
    if name == "auto":
        assistant, why = find_assistant(target, read_config(target))
        if assistant is None:
            return DrafterChoice("ngram", None, why)
        broken = why_not_together(target, assistant)
        if broken is not None:
            return DrafterChoice("ngram", None, f"the drafter beside the target cannot be used: {broken}")
        return _named(assistant, target, why)
    if name.partition("+")[0] in KINDS:
        assistant, why = find_assistant(target, read_config(target))
        if assistant is not None and kind_of(assistant, target) != name.partition("+")[0]:
            assistant, why = None, f"{assistant} is a drafter of another kind: leave drafter out to use it"
        if assistant is None:
            raise UsageError(
                f"drafter={name!r}, but {why}; or name the folder or hub id of one that fits as the drafter"
            )
        return DrafterChoice(name, assistant, why)
    if name in ("model", "model+ngram"):
        if config.target != "demo":
            raise UsageError(
                f"drafter={name!r} needs a draft model: name its folder or hub id as the drafter"
            )
        return DrafterChoice(name, bundled("draft"), "the bundled draft model")
    folder = find(name, "assistant")
    return _named(folder, target, "as asked")


def _named(source: Path, target: Path, why: str) -> DrafterChoice:
    """Says where a draft model has another vocabulary."""
    kind = kind_of(source, target)
    if kind is None and not same_vocabulary(source, target):
        why += "; of another vocabulary, so it drafts by the text"
    return DrafterChoice(f"{kind or 'model'}+ngram", source, why)


def _draft_model(source: Path, config: EngineConfig, target: GraphTarget, tokenizer: Tokenizer) -> Drafter:
    model = load_target(
        source,
        dtype=DTYPES.get(config.dtype),
        device=target.device,
        runner=target.runner,
        transform=_transform(config.quantize_drafter),
    )
    model.expect(config.max_model_len)
    graphs, narrow = [model.hidden_graph, model.logits_graph], None
    if same_vocabulary(source, target.path) and model.vocab_size >= LARGE:
        narrow = model.narrowed(slice(0, model.vocab_size // NARROW))
        graphs.append(narrow.logits_graph)
    model.runner.prepare(graphs)
    if model.max_len < 32:
        raise UsageError(
            f"the draft model {source} has a context of {model.max_len} tokens: use a longer one"
        )
    cache = make_cache(model, replace(config, max_model_len=None), DRAFT_CACHE_SHARE)
    if same_vocabulary(source, target.path):
        return ModelDrafter(model, cache, target.vocab_size, narrow=narrow)
    return TranslatedDrafter(model, cache, Tokenizer.load(source), tokenizer)


def _load_network(config: EngineConfig, choice: DrafterChoice, target: GraphTarget) -> GraphNet | None:
    """The network that reads hidden states of the target, of which it takes some weights, before they are packed."""
    kind, source = choice.kind, choice.source
    if kind in registry.third_party():
        target.tap(registry.third_party_taps(kind))
    if source is None or kind.partition("+")[0] not in KINDS:
        return None
    if _reader_of_kv(choice) is not None:
        return None  # it reads K/V of the target
    transform = network_transform(config, target)
    return load_network(source, target, dtype=DTYPES.get(config.dtype), transform=transform)


def _state_drafter(name: str, net: GraphNet, config: EngineConfig, cache: KVCache) -> MemoryDrafter:
    net.runner.prepare(net.graphs)
    net.max_len = min(net.max_len, cache.max_tokens)  # it hears of no longer texts
    own = make_cache(net, replace(config, max_model_len=None), DRAFT_CACHE_SHARE)
    return registry.over(name, net, own)


def network_transform(config: EngineConfig, target: GraphTarget) -> Transform | None:
    """Of a drafter over hidden states. On a CPU with native kernels it is int8 unless something else is asked for: a step
    reads half as much, and which token is kept is the target's choice. What is stored quantized stays as it is.
    """
    kind = config.quantize_drafter
    if kind is not None or not _on_kernels(target) or config.dtype != "auto" or config.verify != "match":
        return _transform(kind)
    quantized = _transform("int8")
    assert quantized is not None, "int8 is a kind"
    return lambda name, weight: quantized(name, weight) if weight.kind in FLOATS else weight


def _transform(
    kind: Literal["int8", "int4", "none"] | None, adapter: Adapter | None = None
) -> Transform | None:
    """What is done to each weight while it is loaded: the adapter is merged first, then it is quantized."""
    if kind is None or kind == "none":
        return adapter
    from paceline.ops.quantize import quantizer

    quantized = quantizer(kind)
    if adapter is None:
        return quantized
    return lambda name, weight: quantized(name, adapter(name, weight))
