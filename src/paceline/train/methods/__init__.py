"""What can be trained: one loop, a folder for each method. To add one: CONTRIBUTING.md."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import UsageError
from paceline.models.config import parse_target, read_config
from paceline.models.foreign import drafter_kind
from paceline.train.methods.base import Method
from paceline.train.methods.eagle3 import Eagle3
from paceline.train.methods.gemma_assistant import GemmaAssistant

METHODS: dict[str, type[GemmaAssistant] | type[Eagle3]] = {
    "gemma-assistant": GemmaAssistant,
    "eagle3": Eagle3,
}


def method_for(target: Path) -> str:
    """The name of the method that fits a target: Gemma 4 has its own kind of drafter."""
    return (
        "gemma-assistant" if parse_target(read_config(target)).model_type.startswith("gemma4") else "eagle3"
    )


def find_method(name: str) -> type[GemmaAssistant] | type[Eagle3]:
    """The method called `name`, or UsageError with the names there are."""
    if name not in METHODS:
        raise UsageError(f"method {name!r} is unknown: use one of {', '.join(METHODS)}")
    return METHODS[name]


def method_of(folder: Path) -> Method:
    """The method that makes drafters like the one in a folder. Raises UsageError and LoadError."""
    kind = drafter_kind(read_config(folder))
    found = [method() for method in METHODS.values() if method.kind == kind]
    if not found:
        raise UsageError(f"{folder} holds no drafter of a method that is trained: {', '.join(METHODS)}")
    return found[0]


__all__ = ["METHODS", "Eagle3", "GemmaAssistant", "Method", "find_method", "method_for", "method_of"]
