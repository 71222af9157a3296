"""Everything that can be chosen when an engine is built, as one frozen value."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

from paceline.core import Constraint, VerifyRule, check_draft_tokens, check_rule
from paceline.errors import UsageError, shown
from paceline.tree import Shape

ELSEWHERE = {  # what other engines call it
    "model": "target", "quantization": "quantize", "enable_prefix_caching": "prefix_cache", "max_num_seqs": "max_batch",
    "speculative_model": "drafter", "num_speculative_tokens": "draft_tokens",
    "speculative_eagle_topk": "draft_tree", "n_ctx": "max_model_len",
    "n_threads": "threads", "torch_dtype": "dtype", "tensor_parallel_size": "tensor_parallel",
}  # fmt: skip
MOST = {"threads": 256, "tensor_parallel": 64}  # of a whole number
MOST_NUMBER = 2**62  # of any other: the kernels count in 64 bits
IMAGE_TOKENS = (70, 140, 280, 560, 1120)
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    target: str = "demo"
    drafter: str = (
        "auto"  # auto | none | ngram | lookahead | mtp | eagle3 | dflash | heads | a folder or hub id
    )
    adapter: str | None = (
        None  # a LoRA adapter in PEFT's layout (folder or hub id), merged into the target at load
    )
    device: str = "auto"  # auto | cpu | cuda | cuda:N | mps
    dtype: str = "auto"  # of weights; auto = as stored on CPU, bfloat16 on a GPU
    activations: Literal["auto", "float32"] = (
        # on CPU: what weights are multiplied with; auto = for bfloat16 weights bfloat16 where that is twice as fast,
        # for int4 and blocks of GGUF files 8 bits (Q6_K and Q8_0: 16), each 16 values with a scale of their own
        "auto"
    )
    verify: VerifyRule = "match"
    draft_tokens: int | Literal["auto"] = "auto"
    draft_tree: str | None = (
        None  # DEPTHxWIDTH: drafts branch, draft_tokens counts all their tokens; None = chains
    )
    chat_format: str = (
        "auto"  # how thoughts and tool calls are written; auto = as the chat template writes them
    )
    max_model_len: int | None = (
        None  # tokens per text; None = what the model was made for, as far as memory allows
    )
    max_batch: int = 16  # texts computed side by side
    cache_memory: int | None = None  # bytes for K/V; None = a share of what is free
    kv_cache: Literal["auto", "int8"] = "auto"  # what K/V are kept as; int8: fewer bytes, not exact
    prefill_chunk: int = 64  # prompt tokens per step beside decoding texts
    step_tokens: int = 512  # prompt tokens per step when nothing decodes
    prefix_cache: bool = True
    quantize: Literal["int8", "int4"] | None = None
    quantize_drafter: Literal["int8", "int4", "none"] | None = None  # None: see assembly.network_transform
    media: bool = True  # read pictures and sound, where the model can
    mmproj: str | None = None  # the file with a GGUF model's towers; None = the one beside it that fits
    image_tokens: int | None = None  # soft tokens of a picture at most; None = what the model was made for
    preload_media: bool = False  # load the towers at start, not with the first picture
    threads: int | None = None  # CPU threads; None = one per core
    tensor_parallel: int = (
        1  # processes of this machine that compute the target together, each with a share of it
    )
    native: bool = True  # use the compiled kernels where they are installed
    profile_dir: str | None = (
        None  # where what start-up measured is kept for the next one; None or "none" = nowhere
    )
    remeasure: bool = (
        False  # measure at start-up whatever is kept, the drafter's self-test even if it takes a while
    )

    def __post_init__(self) -> None:
        for name in ("target", "drafter", "adapter", "profile_dir"):
            if isinstance(getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(getattr(self, name)))
        if isinstance(self.adapter, list | tuple):  # as options that may be repeated are given
            if len(self.adapter) > 1:
                raise UsageError(
                    "several adapters cannot be merged together: merge them with PEFT, or give one"
                )
            object.__setattr__(self, "adapter", self.adapter[0] if self.adapter else None)
        _check_kinds(self)
        if self.dtype not in DTYPES:
            raise UsageError(f"dtype={shown(self.dtype)} is unknown: use one of {', '.join(DTYPES)}")
        if self.activations not in ("auto", "float32"):
            raise UsageError(f"activations={shown(self.activations)} is unknown: use auto or float32")
        if self.kv_cache not in ("auto", "int8"):
            raise UsageError(f"kv_cache={shown(self.kv_cache)} is unknown: use auto or int8")
        check_rule(self.verify)
        if self.draft_tokens != "auto":
            check_draft_tokens(self.draft_tokens)
        if self.draft_tree is not None:
            Shape.parse(self.draft_tree)
        for name, more in (("quantize", ()), ("quantize_drafter", ("none",))):
            if getattr(self, name) not in (None, "int8", "int4", *more):
                raise UsageError(
                    f"{name}={shown(getattr(self, name))} is unknown: use int8 or int4, or leave it out"
                )
        for name in (
            "max_model_len",
            "max_batch",
            "cache_memory",
            "prefill_chunk",
            "step_tokens",
            "threads",
            "tensor_parallel",
        ):
            value, most = getattr(self, name), MOST.get(name, MOST_NUMBER)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise UsageError(
                    f"{name}={shown(value)} is not possible: give a whole number from 1 to {most}"
                )

    @classmethod
    def of(cls, options: dict[str, Any]) -> EngineConfig:
        """A config from options by name; an unknown name raises UsageError with the closest known one."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                near = [ELSEWHERE[name]] if name in ELSEWHERE else difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]}?" if near else f"known options: {', '.join(known)}"
                raise UsageError(f"unknown option {shown(name)}: {hint}")
        return cls(**options)


def _check_kinds(config: EngineConfig) -> None:
    """Raise UsageError for the first value of a kind that its field cannot have."""
    name = "give a folder or a hub id"
    texts = {
        "target": "give demo, smollm2, a folder, a GGUF file or a hub id",
        "drafter": "give 'none' to decode without one, 'auto' for the one that fits, or a kind or a model",
        "adapter": name, "chat_format": "give auto, or a name of docs/families.md",
        "device": "give auto, cpu, cuda, cuda:N or mps", "profile_dir": "give a folder or None",
        "mmproj": "give the path of an mmproj file or None",
    }  # fmt: skip
    for field, what in texts.items():
        value = getattr(config, field)
        if not isinstance(value, str) and not (
            value is None and field in ("adapter", "profile_dir", "mmproj")
        ):
            raise UsageError(f"{field}={shown(value)} is not possible: {what}")
    if config.image_tokens not in (None, *IMAGE_TOKENS):
        least = ", ".join(map(str, IMAGE_TOKENS))
        raise UsageError(
            f"image_tokens={shown(config.image_tokens)} is not possible: give one of {least}, or None"
        )
    for field in ("prefix_cache", "media", "preload_media", "native", "remeasure"):
        if not isinstance(getattr(config, field), bool):
            raise UsageError(f"{field}={shown(getattr(config, field))} is not possible: give True or False")


class EngineOptions(TypedDict, total=False):
    """The fields of `EngineConfig` without the target, as keyword arguments that an editor completes."""

    drafter: str | os.PathLike[str]
    adapter: str | os.PathLike[str] | list[str] | tuple[str, ...] | None
    device: str
    dtype: str
    activations: Literal["auto", "float32"]
    verify: VerifyRule
    draft_tokens: int | Literal["auto"]
    draft_tree: str | None
    chat_format: str
    max_model_len: int | None
    max_batch: int
    cache_memory: int | None
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
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    bad_token_ids: int | list[int] | tuple[int, ...]
    allowed_token_ids: list[int] | tuple[int, ...] | None
    stop: str | list[str] | tuple[str, ...]
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
