"""paceline: speculative decoding for Gemma 4 that never changes a token.

    from paceline import LLM
    llm = LLM("demo")
    print(llm.generate("def parse(", max_tokens=64)[0].text)
    print(LLM("smollm2").chat([{"role": "user", "content": "Why are leaves green?"}])[0].text)

Importing this package is cheap: torch is loaded with the first model.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline.core import Completion, Delta, SamplingParams, Stats, TokenLogprob
from paceline.errors import (
    CapacityError,
    ConfigError,
    LoadError,
    PacelineError,
    PairError,
    PromptError,
    RequestFailed,
    UsageError,
    WeightsError,
)  # fmt: skip

if TYPE_CHECKING:
    from paceline.async_llm import AsyncLLM
    from paceline.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM", "AsyncLLM", "CapacityError", "Completion", "ConfigError", "Delta", "LoadError", "PacelineError", "PairError",
    "PromptError", "RequestFailed", "SamplingParams", "Stats", "TokenLogprob", "UsageError", "WeightsError",
    "__version__",
]  # fmt: skip
_LATER = {"LLM": "paceline.llm", "AsyncLLM": "paceline.async_llm"}  # torch comes with them


def __getattr__(name: str) -> Any:
    """Names whose modules are imported when they are first used (PEP 562)."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)
