"""One engine with several drafters beside each other, and prompts to try them on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from paceline.check.subject import Subject
from paceline.drafters.assistant import MTPDrafter
from paceline.errors import UsageError
from paceline.llm import LLM

LEAST = 160  # tokens of context that the texts of a check need
SHORT, SPARE = 64, 24  # longest short prompt; tokens that a long one leaves of the sliding window


Texts = Callable[[LLM, str, int], list[list[int]]]  # six prompts of a workload, at most so many tokens long


def load(
    target: str, drafters: Seq[str], say: Callable[[str], None], options: dict[str, Any], texts: Texts
) -> Subject:
    """Load `target` with all of `drafters`. Raises PacelineError."""
    llm = joined(target, drafters, say, options)
    if llm.engine.max_len < LEAST:
        raise UsageError(
            f"a context of {llm.engine.max_len} tokens is too short to compare texts in: "
            f"give at least --max-model-len {LEAST}"
        )
    return Subject(llm.engine, _prompts(llm, texts))


def joined(target: str, drafters: Seq[str], say: Callable[[str], None], options: Mapping[str, Any]) -> LLM:
    """One engine with the drafters of several. Raises PacelineError."""
    llm = LLM(target, drafter=drafters[0], say=say, **options)
    for name in drafters[1:]:
        chains = {**options, "draft_tree": None}  # trees are those of the first one
        _adopt(llm, LLM(target, drafter=name, draft_tokens=4, say=say, **chains))
    return llm


def _adopt(llm: LLM, other: LLM) -> None:
    """Take over the drafters of an engine that is given up; one that has a cache brings it along."""
    if (
        other.info["tensor_parallel"] > 1
        and MTPDrafter.name in other.engine.state.drafters
        and MTPDrafter.name not in llm.engine.state.drafters
    ):
        raise UsageError(
            "over several ranks Gemma's MTP drafter is sharded along with its target: name it as the first --drafter"
        )
    other.engine.close()  # what runs over its ranks is not taken over
    for name, drafter in other.engine.state.drafters.items():
        llm.engine.state.drafters.setdefault(name, drafter)
    llm.engine.combined += other.engine.combined


def _prompts(llm: LLM, texts: Texts) -> tuple[tuple[int, ...], ...]:
    """Short ones of several kinds, and every fourth so long that its answer outgrows the sliding window."""
    state = llm.engine.state
    windows = [w for w in state.target.layout.windows.values() if w is not None]
    longest = min(max(windows, default=SHORT) - SPARE, llm.engine.max_len * 3 // 4)
    short = [p for name in ("code", "prose", "json") for p in texts(llm, name, SHORT)]
    long = texts(llm, "long", max(longest, SHORT))
    order = [p for i in range(6) for p in (*short[i::6], long[i])]
    return tuple(tuple(p) for p in order)
