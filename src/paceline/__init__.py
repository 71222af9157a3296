"""paceline: speculative decoding for Gemma 4 that never changes a token.

    from paceline import LLM
    llm = LLM("demo")
    print(llm.generate("def parse(", max_tokens=64)[0].text)
    print(LLM("smollm2").chat([{"role": "user", "content": "Why are leaves green?"}])[0].text)

Importing this package is cheap: torch is loaded with the first model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from paceline.lazy import attributes

if TYPE_CHECKING:
    from paceline.async_llm import AsyncLLM
    from paceline.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM", "AsyncLLM", "CapacityError", "Completion", "ConfigError", "Delta", "LoadError", "PacelineError", "PairError",
    "PromptError", "RequestFailed", "SamplingParams", "Stats", "TokenLogprob", "UsageError", "WeightsError",
    "__version__",
]  # fmt: skip
__getattr__ = attributes(__name__, LLM="paceline.llm", AsyncLLM="paceline.async_llm")
