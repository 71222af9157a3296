"""Everything that can be chosen when an engine is built, as one frozen value. Each field is a row: see options.py."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

from paceline.core import MAX_DRAFT_TOKENS, RULE, Constraint, Pooling, VerifyRule
from paceline.drafter_kinds import KINDS
from paceline.errors import UsageError, shown
from paceline.options import (
    COMMANDS,
    ENVIRONMENT,
    FILE,
    LIBRARY,
    MACHINE,
    MEDIA,
    MEMORY,
    MODEL,
    SPECULATION,
    START,
    Choice,
    Flag,
    Length,
    Look,
    Merged,
    Named,
    Size,
    Text,
    Tree,
    Whole,
    aliases_of,
    is_named,
    option,
    rows_of,
    settle,
)

IMAGE_TOKENS = (70, 140, 280, 560, 1120)
EVERYWHERE = COMMANDS | LIBRARY | FILE | ENVIRONMENT
UNSWEPT = EVERYWHERE - {"check", "bench"}  # what these two go through themselves
_HUB = "give a folder, a GGUF file or a hub id"
MOST_ADAPTERS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """What the steps of an engine are made by: the options that an engine itself has (engine/engine.py)."""

    verify: VerifyRule = option(
        "match", RULE,
        "match: the very text of plain decoding. reject, block: equal in distribution. typical: LOSSY.",
        SPECULATION, aliases=("spec_decoding_acceptance_method",), doors=UNSWEPT,
    )  # fmt: skip
    draft_tokens: int | Literal["auto"] = option(
        "auto", Length(MAX_DRAFT_TOKENS), "Tokens to draft per step; auto measures what pays on this machine.",
        SPECULATION, aliases=("num_speculative_tokens", "speculative_num_draft_tokens", "draft_max"), doors=UNSWEPT,
    )  # fmt: skip
    max_batch: int = option(
        16, Whole(), "Texts that are computed side by side.", MEMORY,
        aliases=("max_num_seqs", "max_running_requests", "n_parallel", "parallel"), doors=EVERYWHERE,
    )  # fmt: skip
    prefill_chunk: int = option(
        64, Whole(), "Prompt tokens per step beside texts that decode, at most.", MEMORY, doors=EVERYWHERE
    )
    step_tokens: int = option(
        512, Whole(), "Prompt tokens per step when nothing decodes.", MEMORY,
        aliases=("max_num_batched_tokens", "chunked_prefill_size", "n_ubatch", "ubatch_size"), doors=EVERYWHERE,
    )  # fmt: skip
    prefix_cache: bool = option(
        True, Flag(), "Compute what prompts begin with alike only once.", MEMORY,
        aliases=("enable_prefix_caching",), doors=EVERYWHERE - {"bench"},
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(StepOptions):
    target: str = option(
        "demo", Text("give demo, smollm2, a folder, a GGUF file or a hub id", path=True),
        "demo, smollm2, a folder, a GGUF file, or a hub id.", MODEL,
        aliases=("model", "model_path"), doors=LIBRARY | FILE,
    )  # fmt: skip
    drafter: str = option(
        "auto",
        Text("give 'none' to decode without one, 'auto' for the one that fits, or a kind or a model", path=True),
        f"auto, none, ngram, lookahead, {', '.join(KINDS)}, model, or a drafter's folder or hub id.",
        SPECULATION, aliases=("speculative_model", "speculative_draft_model_path", "model_draft"),
        doors=UNSWEPT, look=Look(metavar="NAME"),
    )  # fmt: skip
    draft_tree: str | None = option(
        None, Tree(), "Draft several continuations at once, for instance 4x2: that many tokens one after the other and "
        "beside each other at most; the length of a draft counts them all.", SPECULATION,
        aliases=("speculative_eagle_topk",), doors=EVERYWHERE, look=Look(metavar="DEPTHxWIDTH"),
    )  # fmt: skip
    adapter: str | None = option(
        None,
        Merged(_HUB, path=True, several="several adapters cannot be merged together: give each a name, NAME=PATH, by "
        "which requests choose it, or merge them with PEFT"),
        "A LoRA adapter (folder in PEFT's layout, GGUF file or hub id) to merge into the target's weights at load. As "
        "NAME=PATH, any number of times: one for requests to choose, as of --adapters.", MODEL,
        aliases=("lora", "lora_path"), doors=EVERYWHERE, look=Look(metavar="PATH"),
    )  # fmt: skip
    adapters: tuple[tuple[str, str], ...] = option(
        (), Named(MOST_ADAPTERS), "LoRA adapters that requests choose by name, none of them merged; can be given several "
        "times.", MODEL, aliases=("lora_modules", "lora_paths"), doors=EVERYWHERE, look=Look(metavar="NAME=PATH"),
    )  # fmt: skip
    dtype: str = option(
        "auto", Choice(("auto", "float32", "bfloat16", "float16")),
        "Of the weights; auto keeps them as stored on a CPU, and takes bfloat16 on a GPU.", MODEL,
        aliases=("torch_dtype",), doors=EVERYWHERE,
    )  # fmt: skip
    quantize: Literal["int8", "int4"] | None = option(
        None, Choice(("int8", "int4")), "Quantize the target's weights at load.", MODEL,
        aliases=("quantization", "load_in"), doors=EVERYWHERE,
    )  # fmt: skip
    quantize_drafter: Literal["int8", "int4", "none"] | None = option(
        None, Choice(("int8", "int4", "none")),
        "Quantize the drafter's. Left out, a drafter that reads hidden states is int8 on a CPU.", MODEL, doors=EVERYWHERE,
    )  # fmt: skip
    chat_format: str = option(
        "auto", Text("give auto, or a name of docs/families.md"),
        "How the model writes thoughts and tool calls, a name of docs/families.md; auto: as its chat template writes "
        "them.", MODEL, aliases=("tool_call_parser", "reasoning_parser"), doors=EVERYWHERE, look=Look(metavar="NAME"),
    )  # fmt: skip
    chat_template: str | None = option(
        None, Text("give a file with a template in Jinja, or chatml, llama3 or gemma", path=True),
        "A file with the chat template to use in place of the model's own; or the name of one: chatml, llama3, gemma.",
        MODEL, aliases=("chat_template_file",), doors=EVERYWHERE, look=Look(metavar="FILE"),
    )  # fmt: skip
    pooling: Literal["auto", "last", "mean"] = option(
        "auto", Choice(("auto", "last", "mean")),
        "What embeddings are made of: the last token's state, or the mean of all; auto: by the model's files, else last.",
        MODEL, aliases=("pooling_type",), doors=frozenset({"serve"}) | LIBRARY | FILE | ENVIRONMENT,
    )  # fmt: skip
    max_model_len: int | None = option(
        None, Whole(), "Context in tokens (prompt and answer).", MEMORY, aliases=("n_ctx", "ctx_size", "context_length"),
        doors=EVERYWHERE, look=Look(default="what the model was made for, as far as memory allows"),
    )  # fmt: skip
    cache_memory: int | None = option(
        None, Size(), "Memory for the K/V cache, e.g. 2G.", MEMORY, aliases=("kv_cache_memory_bytes",),
        doors=EVERYWHERE, look=Look(default="a share of what is free, also below the limit of a container"),
    )  # fmt: skip
    kv_cache: Literal["auto", "int8"] = option(
        "auto", Choice(("auto", "int8")),
        "What keys and values are kept as on a CPU; int8: less memory, faster in long texts, not exact.", MEMORY,
        aliases=("kv_cache_dtype", "cache_type_k", "cache_type_v"), doors=EVERYWHERE,
    )  # fmt: skip
    media: bool = option(
        True, Flag(), "Read pictures and sound, where the model can.", MEDIA, doors=EVERYWHERE
    )
    mmproj: str | None = option(
        None, Text("give the path of an mmproj file or None", path=True), "The file with a GGUF model's towers.", MEDIA,
        doors=EVERYWHERE, look=Look(metavar="FILE", default="the one beside it that fits"),
    )  # fmt: skip
    image_tokens: int | None = option(
        None, Choice(IMAGE_TOKENS),
        "Soft tokens of a picture that names no budget, at most: more see finer print, and take longer.", MEDIA,
        aliases=("max_soft_tokens",), doors=EVERYWHERE, look=Look(default="the model's"),
    )  # fmt: skip
    preload_media: bool = option(
        False, Flag(), "Load the towers at start, not with the first picture.", MEDIA, doors=EVERYWHERE
    )
    device: str = option(
        "auto", Text("give auto, cpu, cuda, cuda:N or mps"), "auto, cpu, cuda, cuda:N or mps.", MACHINE, doors=EVERYWHERE
    )  # fmt: skip
    threads: int | None = option(
        None, Whole(1, 256), "CPU threads.", MACHINE, aliases=("n_threads",), doors=EVERYWHERE,
        look=Look(default="one per core that affinity and a quota allow"),
    )  # fmt: skip
    tensor_parallel: int = option(
        1, Whole(1, 64), "Processes of this machine that compute the target together, each with a share of its weights "
        "and K/V.", MACHINE, aliases=("tensor_parallel_size", "tp_size"), doors=EVERYWHERE,
    )  # fmt: skip
    activations: Literal["auto", "float32"] = option(
        "auto", Choice(("auto", "float32")),
        "What weights are multiplied with on a CPU; auto rounds it to bfloat16 for bfloat16 weights, where the processor "
        "has twice the speed for that, and to 8 or 16 bits for int4 and blocks of GGUF files.", MACHINE, doors=EVERYWHERE,
    )  # fmt: skip
    native: bool = option(
        True, Flag(), "Use the compiled kernels where they are installed.", MACHINE, doors=EVERYWHERE
    )
    profile_dir: str | None = option(
        None, Text("give a folder or None", path=True),
        "Folder that keeps what start-up measured for the next start; none: keep nothing.", START, doors=EVERYWHERE,
        look=Look(default="the user's cache"),
    )  # fmt: skip
    remeasure: bool = option(
        False, Flag(), "Measure again at start-up, and find out anew what is kept of drafts.", START,
        doors=EVERYWHERE,
    )  # fmt: skip

    def __post_init__(self) -> None:
        given: Any = self.adapter
        listed = list(given) if isinstance(given, list | tuple) else [given]
        if named := [item for item in listed if is_named(item)]:
            others: Any = self.adapters
            pairs = Named(MOST_ADAPTERS)
            if pairs.accepts(others):
                object.__setattr__(self, "adapters", (*pairs.normal(others), *pairs.normal(named)))
            object.__setattr__(self, "adapter", [item for item in listed if item not in named])
        settle(self)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> EngineConfig:
        """A config from options by name; an unknown name raises UsageError with the closest known one."""
        known, elsewhere = [f.name for f in fields(cls)], aliases_of(cls)
        for name in options:
            if name not in known:
                near = [elsewhere[name]] if name in elsewhere else difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]}?" if near else f"known options: {', '.join(known)}"
                raise UsageError(f"unknown option {shown(name)}: {hint}")
        return cls(**options)


def step_options(config: EngineConfig) -> dict[str, Any]:
    """What an engine's parts take over, by name."""
    return {row.name: getattr(config, row.name) for row in rows_of(StepOptions)}


class EngineOptions(TypedDict, total=False):
    """The fields of `EngineConfig` without the target, as keyword arguments that an editor completes."""

    drafter: str | os.PathLike[str]
    adapter: str | os.PathLike[str] | list[str] | tuple[str, ...] | None
    adapters: Mapping[str, str | os.PathLike[str]] | list[str] | tuple[tuple[str, str], ...]
    device: str
    dtype: str
    activations: Literal["auto", "float32"]
    verify: VerifyRule
    draft_tokens: int | Literal["auto"]
    draft_tree: str | None
    chat_format: str
    chat_template: str | os.PathLike[str] | None
    pooling: Literal["auto", "last", "mean"]
    max_model_len: int | None
    max_batch: int
    cache_memory: int | str | None
    kv_cache: Literal["auto", "int8"]
    prefill_chunk: int
    step_tokens: int
    prefix_cache: bool
    quantize: Literal["int8", "int4"] | None
    quantize_drafter: Literal["int8", "int4", "none"] | None
    media: bool
    mmproj: str | os.PathLike[str] | None
    image_tokens: int | None
    preload_media: bool
    threads: int | None
    tensor_parallel: int
    native: bool
    profile_dir: str | os.PathLike[str] | None
    remeasure: bool


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams`, as keyword arguments that an editor completes."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    dynatemp_range: float
    dynatemp_exponent: float
    mirostat: Literal[0, 2]
    mirostat_tau: float
    mirostat_eta: float
    temperature_last: bool
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: str | list[str] | tuple[str, ...]
    repetition_penalty: float
    penalty_last_n: int
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    bad_token_ids: int | list[int] | tuple[int, ...]
    allowed_token_ids: list[int] | tuple[int, ...] | None
    stop: str | list[str] | tuple[str, ...]
    bad_words: str | list[str] | tuple[str, ...]
    banned_strings: str | list[str] | tuple[str, ...]
    include_stop_str_in_output: bool
    stop_token_ids: int | list[int] | tuple[int, ...]
    ignore_eos: bool
    seed: int | None
    n: int
    logprobs: int | None
    draft_tokens: int | Literal["auto"] | None
    drafter: str | None
    verify: VerifyRule | None
    typical_epsilon: float
    typical_delta: float
    reference: str | list[int] | tuple[int, ...] | None
    constraint: Callable[[], Constraint] | None
    pooling: Pooling | None
    lora: str | Mapping[str, float] | list[str] | tuple[tuple[str, float], ...]
