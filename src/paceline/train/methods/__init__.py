"""What can be trained: one loop, a folder for each method. To add one: CONTRIBUTING.md.

Here belongs what one kind of drafter does differently. What all share belongs to the room above.
"""

from __future__ import annotations

from pathlib import Path

from paceline.errors import UsageError
from paceline.models.config import parse_target, read_config
from paceline.train.methods.base import Method
from paceline.train.methods.dflash import DFlash
from paceline.train.methods.dspark import DSpark
from paceline.train.methods.eagle3 import Eagle3
from paceline.train.methods.gemma_assistant import GemmaAssistant
from paceline.train.methods.mtp import Mtp

METHODS: dict[str, type[GemmaAssistant] | type[Eagle3] | type[Mtp] | type[DFlash] | type[DSpark]] = {
    "gemma-assistant": GemmaAssistant,
    "eagle3": Eagle3,
    "mtp": Mtp,
    "dflash": DFlash,
    "dspark": DSpark,
}


def method_for(target: Path) -> str:
    """The name of the method that fits a target: Gemma 4 has its own kind of drafter."""
    return (
        "gemma-assistant" if parse_target(read_config(target)).model_type.startswith("gemma4") else "eagle3"
    )


def method_of(folder: Path) -> Method:
    """The method that makes drafters like the one in a folder. Raises UsageError and LoadError."""
    raw = read_config(folder)
    found = [method() for method in METHODS.values() if method.reads(raw)]
    if not found:
        raise UsageError(f"{folder} holds no drafter of a method that is trained: {', '.join(METHODS)}")
    return found[0]


__all__ = [
    "METHODS",
    "DFlash",
    "DSpark",
    "Eagle3",
    "GemmaAssistant",
    "Method",
    "Mtp",
    "method_for",
    "method_of",
]
